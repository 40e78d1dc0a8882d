"""A* pruning (Parnami, Singh, Joshi 2021): drop the cheapest head, look no more at those beyond the budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from compressor.selection.search.base import (
    Head,
    Step,
    SubsetEvaluator,
    head_label,
    metric_drop,
    nothing_removed_note,
    require_end,
    step_values,
)


class AStarSearch:
    """The algorithm of figure 6. A head's cost is how far the metric falls below that of all heads if it goes too.

    Each iteration accepts the head of least cost where that is below the budget, negative costs counting as zero, and
    then walks the others in ascending order of cost: those for whom the sum of what they cost more than the accepted
    head exceeds what is left of the budget are eliminated. Equal heads go in (site, head) order. With a number to keep
    there is no budget, and nothing is eliminated.

    Args:
        variant: `paper`: costs count from all heads, as in figure 7 and table 3. `literal`: figure 6 to the letter,
            which takes every accepted head's cost off the budget again. `lazy`: as `paper`, but a head is measured
            again only while what it last cost puts it first, and is walked by at that. Where costs only grow that is a
            lower bound, and the head accepted is the cheapest one, as in `paper`. Under a budget a walk by lower bounds
            may leave heads in that one by costs eliminates; where costs add up, none of them would have gone anyway.
    """

    def __init__(self, *, variant: Literal["paper", "literal", "lazy"] = "paper") -> None:
        self.variant = variant

    def choose(self, trials: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Step]:
        limit = require_end("astar", keep, budget)
        costs = _Costs(trials, lazy=self.variant == "lazy")
        kept, remaining, left = frozenset(trials.heads), limit, trials.heads
        yield Step(kept, _values(trials, kept, remaining), notes=_no_budget(limit))
        while left and len(kept) > (keep or 0) and remaining > 0:
            first, searches = costs.cheapest(kept, left)
            cost = max(0.0, costs.last[first])
            if keep is None and not cost < (remaining if self.variant == "literal" else limit):
                notes = (
                    (nothing_removed_note(head_label(first), cost, limit),) if len(kept) == len(trials.heads) else ()
                )
                values = _values(trials, kept, remaining, searches=searches, candidates=len(left), **costs.fallen)
                yield Step(kept, values, costs.of(left), kept - frozenset(left), (*costs.notes, *notes))
                return
            kept = kept - {first}
            remaining = metric_drop(remaining if self.variant == "literal" else limit, cost)
            others = sorted((head for head in left if head != first), key=costs.last.__getitem__)
            inside = frozenset(_within(others, costs.last, cost, remaining))
            shown = costs.of(left)
            left = tuple(head for head in trials.heads if head in inside)
            values = _values(trials, kept, remaining, searches=searches, candidates=len(left), **costs.fallen)
            yield Step(kept, values, shown, kept - inside, costs.notes)


def _within(rank: Sequence[Head], costs: Mapping[Head, float], cost: float, remaining: float) -> Sequence[Head]:
    """The heads at the front of `rank` whose increments I_y = E_y - C_x add up to no more than what remains."""
    total = 0.0
    for place, head in enumerate(rank):
        total = round(total + max(cost, costs[head]) - cost, 12)
        if total > remaining:
            return rank[:place]
    return rank


class _Costs:
    """What each head cost when it was last measured."""

    def __init__(self, trials: SubsetEvaluator, *, lazy: bool) -> None:
        self.trials, self.lazy = trials, lazy
        self.last: dict[Head, float] = {}
        self._baseline = trials.evaluate(frozenset(trials.heads))
        self._again = self._fell = 0

    def cheapest(self, kept: frozenset[Head], left: Sequence[Head]) -> tuple[Head, int]:
        """The head of least cost of `left`, which are in (site, head) order, and how many were measured to know it."""
        fresh: set[Head] = set()
        while (first := min(left, key=lambda head: self.last.get(head, -math.inf))) not in fresh:
            ask = [first] if self.lazy and first in self.last else left
            for head, metric in zip(ask, self.trials.evaluate_without(kept, ask), strict=True):
                cost = metric_drop(self._baseline, metric)
                self._again += head in self.last
                self._fell += cost < self.last.get(head, cost)
                self.last[head] = cost
            fresh.update(ask)
        return first, len(fresh)

    def of(self, heads: Sequence[Head]) -> dict[Head, float]:
        return {head: self.last[head] for head in heads}

    @property
    def fallen(self) -> dict[str, float]:
        """How often the premise broke."""
        return {"fell": float(self._fell)} if self.lazy else {}

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.lazy or not self._fell:
            return ()
        return (
            f"lazy A*: {self._fell} of the {self._again} heads that were measured again cost less than before, where"
            " the search takes it that what a head costs only grows; variant=paper measures every head",
        )


def _values(trials: SubsetEvaluator, kept: frozenset[Head], remaining: float, **values: float) -> dict[str, float]:
    budget = {"budget_left": remaining} if remaining < float("inf") else {}
    return step_values(trials, kept, **budget, **values)


def _no_budget(limit: float) -> tuple[str, ...]:
    """Figure 6 takes a head only for less than the budget, so nothing for nothing."""
    return () if limit else ("no head was removed: astar takes heads that cost less than --max-drop, which is 0",)
