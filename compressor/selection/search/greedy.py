"""Greedy removal (Parnami et al. 2021, section 3.2): evaluate every candidate, remove the cheapest, repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from compressor.results import Note, NoteCode
from compressor.selection.search import base
from compressor.selection.search.base import Decision, Head, SubsetEvaluator


class GreedySearch(base.Search):
    """Greedy removal of the head whose removal leaves the best metric; of equal heads, the first in (site, head) order.

    With a budget, it continues while removing the cheapest head keeps the metric within the budget.
    """

    def candidates(self, evaluator: SubsetEvaluator, kept: frozenset[Head]) -> Mapping[str, frozenset[Head]]:
        """Label of each candidate -> the heads that go with it; of equal candidates, the first is removed."""
        return {base.head_label(head): frozenset([head]) for head in evaluator.heads if head in kept}

    def metrics(
        self, evaluator: SubsetEvaluator, kept: frozenset[Head], candidates: Mapping[str, frozenset[Head]]
    ) -> list[float]:
        """The metric without each candidate."""
        return evaluator.evaluate_without(kept, [head for heads in candidates.values() for head in heads])

    def notes(self, kept: frozenset[Head], keep: int | None) -> tuple[Note, ...]:
        """Notes on a decision to keep these heads."""
        return ()

    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float) -> Iterator[Decision]:
        kept = frozenset(evaluator.heads)
        baseline = evaluator.evaluate(kept)
        yield base.decide(evaluator, kept, notes=self.notes(kept, keep))
        while candidates := {
            label: heads
            for label, heads in self.candidates(evaluator, kept).items()
            if len(kept) - len(heads) >= (keep or 0)
        }:
            metrics = self.metrics(evaluator, kept, candidates)
            drops = {label: base.metric_drop(baseline, left) for label, left in zip(candidates, metrics, strict=True)}
            cheapest = min(drops, key=drops.__getitem__)
            costs = {head: drops[label] for label, heads in candidates.items() for head in heads}
            searches = {"searches": len(candidates)}
            if keep is None and drops[cheapest] > budget:
                notes = base.nothing_removed_notes(evaluator, kept, cheapest, drops[cheapest], budget)
                yield base.decide(evaluator, kept, searches, costs, notes=notes)
                return
            kept = kept - candidates[cheapest]
            yield base.decide(evaluator, kept, searches, costs, notes=self.notes(kept, keep))


class GreedyByIndexSearch(GreedySearch):
    """Greedy removal of a head index from every site that has it; of equal indices, the first is removed.

    With a number of heads to keep, it stops before the first removal that would leave fewer, and adds a note if more
    heads are kept.
    """

    def candidates(self, evaluator: SubsetEvaluator, kept: frozenset[Head]) -> Mapping[str, frozenset[Head]]:
        return {
            f"head {index} of every site": frozenset(head for head in kept if head[1] == index)
            for index in sorted({index for _, index in kept})
        }

    def metrics(
        self, evaluator: SubsetEvaluator, kept: frozenset[Head], candidates: Mapping[str, frozenset[Head]]
    ) -> list[float]:
        return evaluator.evaluate_all([kept - heads for heads in candidates.values()])

    def notes(self, kept: frozenset[Head], keep: int | None) -> tuple[Note, ...]:
        if keep is None or len(kept) == keep:
            return ()
        text = f"{len(kept)} heads are kept instead of {keep}: global removes a head of every site at a time"
        return (Note(code=NoteCode.MORE_HEADS_KEPT, text=text),)
