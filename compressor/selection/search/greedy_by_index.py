"""Global pruning (Parnami et al. 2021, section 3.2): remove the cheapest head index from every site at once."""

from __future__ import annotations

from collections.abc import Iterator

from compressor.results import Note, NoteCode
from compressor.selection.search import base
from compressor.selection.search.base import Decision, Head, SubsetEvaluator


class GreedyByIndexSearch(base.Search):
    """Greedy removal of a head index from every site that has it; of equal indices, the first is removed.

    With a number of heads to keep, it stops before the first removal that would leave fewer, and adds a note if more
    heads are kept.
    """

    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Decision]:
        limit = base.require_end("global", keep, budget)
        kept = frozenset(evaluator.heads)
        baseline = evaluator.evaluate(kept)
        yield base.decide(evaluator, kept, notes=_more_kept(kept, keep))
        groups = {index: frozenset(head for head in kept if head[1] == index) for _, index in evaluator.heads}
        while groups:
            groups = {index: heads for index, heads in sorted(groups.items()) if len(kept) - len(heads) >= (keep or 0)}
            if not groups:
                return
            metrics = evaluator.evaluate_all([kept - heads for heads in groups.values()])
            by_index = {
                index: base.metric_drop(baseline, metric) for index, metric in zip(groups, metrics, strict=True)
            }
            cheapest = min(by_index, key=by_index.__getitem__)
            costs = {head: by_index[index] for index, heads in groups.items() for head in heads}
            searches = {"searches": len(groups)}
            if keep is None and by_index[cheapest] > limit:
                candidate, cost = f"head {cheapest} of every site", by_index[cheapest]
                notes = base.nothing_removed_notes(evaluator, kept, candidate, cost, limit)
                yield base.decide(evaluator, kept, searches, costs, notes=notes)
                return
            kept = kept - groups.pop(cheapest)
            yield base.decide(evaluator, kept, searches, costs, notes=_more_kept(kept, keep))


def _more_kept(kept: frozenset[Head], keep: int | None) -> tuple[Note, ...]:
    """A note if more heads are kept than requested."""
    if keep is None or len(kept) == keep:
        return ()
    text = f"{len(kept)} heads are kept instead of {keep}: global removes a head of every site at a time"
    return (Note(code=NoteCode.MORE_HEADS_KEPT, text=text),)
