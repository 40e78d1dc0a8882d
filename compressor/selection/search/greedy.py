"""Local pruning (Parnami et al. 2021, section 3.2): evaluate every remaining head, remove the cheapest, repeat."""

from __future__ import annotations

from collections.abc import Iterator

from compressor.selection.search import base
from compressor.selection.search.base import Decision, SubsetEvaluator


class GreedySearch(base.Search):
    """Greedy removal of the head whose removal leaves the best metric; of equal heads, the first in (site, head) order.

    With a budget, it continues while removing the cheapest head keeps the metric within the budget.
    """

    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Decision]:
        limit = base.require_end("local", keep, budget)
        kept = frozenset(evaluator.heads)
        baseline = evaluator.evaluate(kept)
        yield base.decide(evaluator, kept)
        while len(kept) > (keep or 0):
            candidates = [head for head in evaluator.heads if head in kept]
            metrics = evaluator.evaluate_without(kept, candidates)
            costs = {head: base.metric_drop(baseline, metric) for head, metric in zip(candidates, metrics, strict=True)}
            cheapest = min(candidates, key=costs.__getitem__)
            if keep is None and costs[cheapest] > limit:
                label, cost = base.head_label(cheapest), costs[cheapest]
                notes = base.nothing_removed_notes(evaluator, kept, label, cost, limit)
                yield base.decide(evaluator, kept, {"searches": len(candidates)}, costs, notes=notes)
                return
            kept = kept - {cheapest}
            yield base.decide(evaluator, kept, {"searches": len(candidates)}, costs)
