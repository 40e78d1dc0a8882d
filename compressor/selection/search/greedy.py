"""Local pruning (Parnami et al. 2021, section 3.2): evaluate every remaining head, remove the cheapest, repeat."""

from __future__ import annotations

from collections.abc import Iterator

from compressor.selection.options import MethodOptions
from compressor.selection.search.base import (
    Search,
    Step,
    SubsetEvaluator,
    head_label,
    metric_drop,
    nothing_removed_note,
    require_end,
    step_values,
)


class GreedySearch(Search[MethodOptions]):
    """Greedy removal of the head whose removal leaves the best metric; of equal heads, the first in (site, head) order.

    With a budget, it continues while removing the cheapest head keeps the metric within the budget.
    """

    options_class = MethodOptions

    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Step]:
        limit = require_end("local", keep, budget)
        kept = frozenset(evaluator.heads)
        baseline = evaluator.evaluate(kept)
        yield Step(kept, step_values(evaluator, kept))
        while len(kept) > (keep or 0):
            candidates = [head for head in evaluator.heads if head in kept]
            metrics = evaluator.evaluate_without(kept, candidates)
            costs = {head: metric_drop(baseline, metric) for head, metric in zip(candidates, metrics, strict=True)}
            cheapest = min(candidates, key=costs.__getitem__)
            if keep is None and costs[cheapest] > limit:
                removed_none = len(candidates) == len(evaluator.heads)
                notes = (nothing_removed_note(head_label(cheapest), costs[cheapest], limit),) if removed_none else ()
                yield Step(kept, step_values(evaluator, kept, searches=len(candidates)), costs, notes=notes)
                return
            kept = kept - {cheapest}
            yield Step(kept, step_values(evaluator, kept, searches=len(candidates)), costs)
