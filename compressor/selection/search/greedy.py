"""Local pruning (Parnami et al. 2021, section 3.2): try every head that is left, drop the cheapest, begin again."""

from __future__ import annotations

from collections.abc import Iterator

from compressor.selection.search.base import (
    Step,
    SubsetEvaluator,
    head_label,
    metric_drop,
    nothing_removed_note,
    require_end,
    step_values,
)


class LocalSearch:
    """Greedy removal of the head after which the metric is best; of equal heads the first in (site, head) order.

    By a budget it goes on while the cheapest head leaves the metric within it.
    """

    def choose(self, trials: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Step]:
        limit = require_end("local", keep, budget)
        kept = frozenset(trials.heads)
        baseline = trials.evaluate(kept)
        yield Step(kept, step_values(trials, kept))
        while len(kept) > (keep or 0):
            left = [head for head in trials.heads if head in kept]
            costs = {
                h: metric_drop(baseline, m) for h, m in zip(left, trials.evaluate_without(kept, left), strict=True)
            }
            cheapest = min(left, key=costs.__getitem__)
            if keep is None and costs[cheapest] > limit:
                notes = (
                    (nothing_removed_note(head_label(cheapest), costs[cheapest], limit),)
                    if len(left) == len(trials.heads)
                    else ()
                )
                yield Step(kept, step_values(trials, kept, searches=len(left)), costs, notes=notes)
                return
            kept = kept - {cheapest}
            yield Step(kept, step_values(trials, kept, searches=len(left)), costs)
