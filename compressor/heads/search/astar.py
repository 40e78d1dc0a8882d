"""A* pruning (Parnami, Singh, Joshi 2021): drop the cheapest head, look no more at those beyond the budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compressor.heads.search.base import Head, Step, Trials, drop, named, none_fits, require_end, taken


class AStarSearch:
    """The algorithm of figure 6. A head's cost is how far the metric falls below that of all heads if it goes too.

    Each iteration accepts the head of least cost where that is below the budget, negative costs counting as zero, and
    then walks the others in ascending order of cost: those for whom the sum of what they cost more than the accepted
    head exceeds what is left of the budget are eliminated. Equal heads go in (site, head) order. With a number to keep
    there is no budget, and nothing is eliminated.

    Args:
        variant: `paper`: costs count from all heads, as in figure 7 and table 3. `literal`: figure 6 to the letter,
            which takes every accepted head's cost off the budget again. `lazy`: as `paper`, but a head is measured
            again only while what it last added to the cost, a lower bound as long as that only grows, puts it first.
    """

    def __init__(self, *, variant: Literal["paper", "literal", "lazy"] = "paper") -> None:
        self.variant = variant

    def choose(self, trials: Trials, keep: int | None, budget: float | None) -> Iterator[Step]:
        limit = require_end("astar", keep, budget)
        if self.variant == "lazy":
            yield from _lazy(trials, keep, limit)
        else:
            yield from _eager(trials, keep, limit, literal=self.variant == "literal")


def _eager(trials: Trials, keep: int | None, limit: float, *, literal: bool) -> Iterator[Step]:
    kept = frozenset(trials.heads)
    baseline, remaining = trials.evaluate(kept), limit
    left = trials.heads
    yield Step(kept, _values(trials, kept, remaining), notes=_no_budget(limit))
    while left and len(kept) > (keep or 0) and remaining > 0:
        costs = {h: drop(baseline, m) for h, m in zip(left, trials.evaluate_without(kept, left), strict=True)}
        rank = sorted(left, key=costs.__getitem__)  # stable: `left` is in (site, head) order
        cost = max(0.0, costs[rank[0]])
        if keep is None and not cost < (remaining if literal else limit):
            yield _stopped(trials, kept, left, costs, remaining, limit)
            return
        kept = kept - {rank[0]}
        remaining = drop(remaining if literal else limit, cost)
        inside = frozenset(_within(rank[1:], costs, cost, remaining))
        left = tuple(head for head in trials.heads if head in inside)
        values = _values(trials, kept, remaining, searches=len(costs), candidates=len(left))
        yield Step(kept, values, costs, eliminated=kept - inside)


def _within(rank: Sequence[Head], costs: Mapping[Head, float], cost: float, remaining: float) -> Sequence[Head]:
    """The heads at the front of `rank` whose increments I_y = E_y - C_x add up to no more than what remains."""
    total = 0.0
    for place, head in enumerate(rank):
        total = round(total + max(0.0, costs[head]) - cost, 12)
        if total > remaining:
            return rank[:place]
    return rank


@dataclass
class _Iteration:
    """An acceptance whose elimination is not worked out unless a later one depends on it.

    Attributes:
        kept: heads before it.
        base: the cost of `kept`.
        left: the heads that it may have eliminated, in (site, head) order.
        added: what each was last seen to add to a cost, no more than it adds to `base`.
        fresh: those that add exactly that.
        cost, remaining: of the accepted head, and of the budget after it.
    """

    kept: frozenset[Head]
    base: float
    left: tuple[Head, ...]
    added: dict[Head, float]
    fresh: set[Head]
    cost: float
    remaining: float


class _Lazy:
    """Costs, measured where they are asked for."""

    def __init__(self, trials: Trials) -> None:
        self.trials = trials
        self.past: list[_Iteration] = []
        self.again = self.fell = self.searches = 0
        self._survives: dict[tuple[int, Head], bool] = {}

    def measure(self, kept: frozenset[Head], heads: Sequence[Head], added: dict[Head, float]) -> None:
        """Put into `added` what each of `heads` adds to the cost of `kept`."""
        here = self.trials.evaluate(kept)
        for head, metric in zip(heads, self.trials.evaluate_without(kept, heads), strict=True):
            adds = drop(here, metric)
            self.again += head in added
            self.fell += adds < added.get(head, adds)
            added[head] = adds
        self.searches += len(heads)

    def survives(self, head: Head, adds: float, iterations: int) -> bool:
        """Whether none of the first `iterations` eliminated a head that adds `adds` after them, so no more in them."""
        for number in range(iterations):
            then = self.past[number]
            ahead = sum(floor <= adds for floor in then.added.values())
            # Each head that the walk meets up to this one costs no more than it, so this is the most they add up to.
            if ahead * (max(0.0, then.base + adds) - then.cost) <= then.remaining:
                continue
            if (number, head) not in self._survives:
                self._survives[number, head] = head in self._walked(number, adds)
            if not self._survives[number, head]:
                return False
        return True

    def _walked(self, number: int, adds: float) -> Sequence[Head]:
        """The heads that add up to `adds` and that the walk of an iteration leaves in."""
        then = self.past[number]
        ahead = [head for head in then.left if then.added[head] <= adds]
        stale = [head for head in ahead if head not in then.fresh]
        if stale:
            self.measure(then.kept, stale, then.added)
            then.fresh.update(stale)
        rank = sorted((h for h in ahead if self.survives(h, then.added[h], number)), key=then.added.__getitem__)
        return _within(rank, {h: drop(then.added[h], -then.base) for h in rank}, then.cost, then.remaining)

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.fell:
            return ()
        return (
            f"lazy A*: {self.fell} of the {self.again} heads that were measured again cost less than before, where the"
            " search takes it that what a head costs only grows; variant=paper measures every head",
        )


def _lazy(trials: Trials, keep: int | None, limit: float) -> Iterator[Step]:
    kept, base, remaining = frozenset(trials.heads), 0.0, limit
    lazy, before = _Lazy(trials), 0
    added: dict[Head, float] = {}  # of the heads that are left; what each adds to `base` where it is fresh, or less
    yield Step(kept, _values(trials, kept, limit), notes=_no_budget(limit))
    if len(kept) > (keep or 0) and limit > 0:
        lazy.measure(kept, trials.heads, added)
    fresh = set(added)
    while added and len(kept) > (keep or 0):
        first = min((head for head in trials.heads if head in added), key=added.__getitem__)
        if first not in fresh:
            lazy.measure(kept, [first], added)
            fresh.add(first)
            continue
        if not lazy.survives(first, added[first], len(lazy.past)):
            del added[first]
            continue
        costs = {head: drop(adds, -base) for head, adds in added.items() if head in fresh}
        searches, before = lazy.searches - before, lazy.searches
        cost = max(0.0, costs[first])
        if keep is None and not cost < limit:
            stop = _stopped(trials, kept, tuple(added), costs, remaining, limit, searches)
            yield Step(kept, stop.values, costs, stop.eliminated, (*lazy.notes, *stop.notes))
            return
        del added[first]
        remaining = drop(limit, cost)
        left = tuple(head for head in trials.heads if head in added)
        if keep is None and fresh.issuperset(left):  # the first iteration: its walk has all it needs
            added = {head: added[head] for head in _within(sorted(left, key=costs.__getitem__), costs, cost, remaining)}
            left = tuple(head for head in left if head in added)
        elif keep is None:
            lazy.past.append(_Iteration(kept, base, left, dict(added), fresh - {first}, cost, remaining))
        kept, base, fresh = kept - {first}, costs[first], set()
        values = _values(trials, kept, remaining, searches=searches, candidates=len(left), fell=lazy.fell)
        yield Step(kept, values, costs, kept - frozenset(left), lazy.notes)


def _values(trials: Trials, kept: frozenset[Head], remaining: float, **values: float) -> dict[str, float]:
    budget = {"budget_left": remaining} if remaining < float("inf") else {}
    return taken(trials, kept, **budget, **values)


def _stopped(
    trials: Trials,
    kept: frozenset[Head],
    left: Sequence[Head],
    costs: Mapping[Head, float],
    remaining: float,
    limit: float,
    searches: int | None = None,
) -> Step:
    """The end: the cheapest head costs the budget or more."""
    cheapest = min(costs, key=costs.__getitem__)
    notes = (none_fits(named(cheapest), costs[cheapest], limit),) if len(kept) == len(trials.heads) else ()
    asked = len(costs) if searches is None else searches
    values = _values(trials, kept, remaining, searches=asked, candidates=len(left))
    return Step(kept, values, costs, kept - frozenset(left), notes)


def _no_budget(limit: float) -> tuple[str, ...]:
    """Figure 6 takes a head only for less than the budget, so nothing for nothing."""
    return () if limit else ("no head was removed: astar takes heads that cost less than --max-drop, which is 0",)
