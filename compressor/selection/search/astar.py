"""A* pruning (Parnami, Singh, Joshi 2021): remove the cheapest head and eliminate those beyond the budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field

from compressor.results import Note, NoteCode
from compressor.selection.options import MethodOptions
from compressor.selection.search import base
from compressor.selection.search.base import Decision, Head, SubsetEvaluator


class AStarOptions(MethodOptions):
    """Options of `astar`.

    Variants:

    - `paper`: costs are relative to all heads, as in figure 7 and table 3.
    - `literal`: figure 6 as printed, which subtracts the cost of every removed head from the budget again.
    - `lazy`: as `paper`, but a head is evaluated again only while its last cost is the lowest; elimination uses the
      last costs. The removed head always has a new cost, so the budget holds. If costs only grow, last costs are lower
      bounds, and the removed head is the cheapest candidate, as in `paper`. The candidates are those of `paper` if
      nothing is eliminated (a number of heads is kept) or costs add up. Otherwise elimination by lower bounds keeps
      candidates that elimination by costs would not, and the removed heads differ from then on; to know them would take
      the evaluations that `lazy` saves.
    """

    variant: Literal["paper", "literal", "lazy"] = Field("paper", description="how costs and the budget are counted")


class AStarSearch(base.Search):
    """The algorithm of figure 6 of the paper.

    The cost of a head is the drop of the metric from that of all heads if the head is removed too. Each iteration
    removes the head of least cost if that is below the budget, where negative costs count as zero. Then it visits the
    other candidates in ascending order of cost and sums the excess of their costs over that of the removed head; the
    candidates at which the sum exceeds the remaining budget are eliminated. Equal heads are visited in (site, head)
    order. With a number of heads to keep there is no budget, and nothing is eliminated.
    """

    options_class = AStarOptions
    options: AStarOptions

    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float) -> Iterator[Decision]:
        literal = self.options.variant == "literal"
        costs = _Costs(evaluator, lazy=self.options.variant == "lazy")
        kept, remaining, candidates, searches = frozenset(evaluator.heads), budget, evaluator.heads, 0

        def budget_left() -> dict[str, float]:
            return {"budget_left": remaining} if budget < math.inf else {}

        def values() -> dict[str, float]:
            return {**budget_left(), "searches": searches, "candidates": len(candidates), **costs.decreases}

        yield base.decide(evaluator, kept, budget_left(), notes=_zero_budget(budget))
        while candidates and len(kept) > (keep or 0) and remaining > 0:
            first, searches = costs.cheapest(kept, candidates)
            cost = max(0.0, costs.last[first])
            if keep is None and not cost < (remaining if literal else budget):
                notes = base.nothing_removed_notes(evaluator, kept, base.head_label(first), cost, budget)
                eliminated, notes = kept - frozenset(candidates), (*costs.notes, *notes)
                yield base.decide(evaluator, kept, values(), costs.of(candidates), eliminated=eliminated, notes=notes)
                return
            kept = kept - {first}
            remaining = base.metric_drop(remaining if literal else budget, cost)
            ranked = sorted((head for head in candidates if head != first), key=costs.last.__getitem__)
            affordable = frozenset(_affordable(ranked, costs.last, cost, remaining))
            considered = costs.of(candidates)
            candidates = tuple(head for head in evaluator.heads if head in affordable)
            eliminated = kept - affordable
            yield base.decide(evaluator, kept, values(), considered, eliminated=eliminated, notes=costs.notes)


def _affordable(ranked: Sequence[Head], costs: Mapping[Head, float], cost: float, remaining: float) -> Sequence[Head]:
    """The first heads of `ranked`, in ascending order of cost, whose increments sum to at most the remaining budget.

    The increment of a head is I_y = E_y - C_x, its cost less that of the removed head, at least zero.
    """
    total = 0.0
    for number, head in enumerate(ranked):
        total = round(total + max(cost, costs[head]) - cost, 12)
        if total > remaining:
            return ranked[:number]
    return ranked


class _Costs:
    """Measures the costs of heads and keeps the last cost of each; `lazy` for the variant of this name."""

    def __init__(self, evaluator: SubsetEvaluator, *, lazy: bool) -> None:
        self.evaluator, self.lazy = evaluator, lazy
        self.last: dict[Head, float] = {}
        self._baseline = evaluator.evaluate(frozenset(evaluator.heads))
        self._repeats = self._decreases = 0

    def cheapest(self, kept: frozenset[Head], candidates: Sequence[Head]) -> tuple[Head, int]:
        """The candidate of least cost, and the number of candidates that were evaluated to find it.

        The candidates, in (site, head) order, are those of the heads `kept` that may be removed.
        """
        fresh: set[Head] = set()
        while (first := min(candidates, key=lambda head: self.last.get(head, -math.inf))) not in fresh:
            batch = [first] if self.lazy and first in self.last else candidates
            for head, metric in zip(batch, self.evaluator.evaluate_without(kept, batch), strict=True):
                cost = base.metric_drop(self._baseline, metric)
                self._repeats += head in self.last
                self._decreases += cost < self.last.get(head, cost)
                self.last[head] = cost
            fresh.update(batch)
        return first, len(fresh)

    def of(self, heads: Sequence[Head]) -> dict[Head, float]:
        """The last cost of each of `heads`."""
        return {head: self.last[head] for head in heads}

    @property
    def decreases(self) -> dict[str, float]:
        """How often a cost decreased, contrary to the assumption of `lazy`; stored curves have the key `fell`."""
        return {"fell": float(self._decreases)} if self.lazy else {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """A note if costs decreased under `lazy`."""
        if not self.lazy or not self._decreases:
            return ()
        text = (
            f"lazy A*: {self._decreases} of the {self._repeats} heads that were evaluated again cost less than before,"
            " although the search assumes that costs only grow; variant=paper evaluates every head"
        )
        return (Note(code=NoteCode.COSTS_DECREASED, text=text),)


def _zero_budget(budget: float) -> tuple[Note, ...]:
    """A note for a budget of zero: figure 6 removes only heads that cost less than the budget."""
    if budget:
        return ()
    text = "no head was removed: astar removes heads that cost less than --max-drop, which is 0"
    return (Note(code=NoteCode.NOTHING_REMOVED, text=text),)
