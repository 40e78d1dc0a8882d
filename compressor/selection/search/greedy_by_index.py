"""Global pruning (Parnami et al. 2021, section 3.2): drop one head index in every site at once, the cheapest."""

from __future__ import annotations

from collections.abc import Iterator

from compressor.selection.search.base import (
    Head,
    Step,
    SubsetEvaluator,
    metric_drop,
    nothing_removed_note,
    require_end,
    step_values,
)


class GlobalSearch:
    """Greedy removal of a head index from every site that has it; of equal indices the first goes.

    With a number to keep, it stops before the first removal that would leave fewer, and says so.
    """

    def choose(self, trials: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Step]:
        limit = require_end("global", keep, budget)
        kept = frozenset(trials.heads)
        baseline = trials.evaluate(kept)
        yield Step(kept, step_values(trials, kept), notes=_uneven(kept, keep))
        left = {index: frozenset(head for head in kept if head[1] == index) for _, index in trials.heads}
        while left:
            left = {index: heads for index, heads in sorted(left.items()) if len(kept) - len(heads) >= (keep or 0)}
            if not left:
                return
            metrics = trials.evaluate_all([kept - heads for heads in left.values()])
            by_index = {index: metric_drop(baseline, metric) for index, metric in zip(left, metrics, strict=True)}
            cheapest = min(by_index, key=by_index.__getitem__)
            costs = {head: by_index[index] for index, heads in left.items() for head in heads}
            searches = len(left)
            if keep is None and by_index[cheapest] > limit:
                what = f"head {cheapest} of every site"
                notes = (
                    (nothing_removed_note(what, by_index[cheapest], limit),) if len(kept) == len(trials.heads) else ()
                )
                yield Step(kept, step_values(trials, kept, searches=searches), costs, notes=notes)
                return
            kept = kept - left.pop(cheapest)
            yield Step(kept, step_values(trials, kept, searches=searches), costs, notes=_uneven(kept, keep))


def _uneven(kept: frozenset[Head], keep: int | None) -> tuple[str, ...]:
    if keep is None or len(kept) == keep:
        return ()
    return (f"global removes a head of every site at a time: {len(kept)} heads stay, the fewest not below {keep}",)
