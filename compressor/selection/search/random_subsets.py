"""Random pruning, the baseline of Parnami et al. 2021 (section 4.4.2): the best of many random removals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from compressor.results import Note, NoteCode
from compressor.selection.options import MethodOptions
from compressor.selection.search import base
from compressor.selection.search.base import Decision, Head, SubsetEvaluator


class RandomOptions(MethodOptions):
    """Options of `random`."""

    trials: int = Field(100, ge=1, description="number of random subsets, or of random orders with a budget")
    seed: int = Field(0, ge=0, description="seed of the draws; default: the recipe's seed")


class RandomSearch(base.Search):
    """The best of random subsets; with a budget, the longest of random removals that stay within it.

    With a number of heads to keep, every trial is one subset, and the subset with the best metric is selected. With a
    budget, every trial is an order of all heads, which are removed until the next one would exceed the budget; the
    order that removes most heads is selected, and of equal ones the one with the better metric.
    """

    options_class = RandomOptions
    options: RandomOptions

    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float) -> Iterator[Decision]:
        all_heads = frozenset(evaluator.heads)
        yield base.decide(evaluator, all_heads)
        orders = self.orders(evaluator.heads)
        if keep is not None:
            removed = len(evaluator.heads) - keep
            subsets = [all_heads - frozenset(order[:removed]) for order in orders]
            metrics = evaluator.evaluate_all(subsets)
            if removed:
                best = subsets[int(np.argmax(metrics))]
                yield base.decide(evaluator, best, {"searches": len(subsets)})
            return
        walks = [random_walk(evaluator, order, budget) for order in orders]
        longest = max(range(len(walks)), key=lambda number: (len(walks[number]), walks[number][-1:]))
        kept, removed = all_heads, len(walks[longest])
        for head in orders[longest][:removed]:
            kept = kept - {head}
            yield base.decide(evaluator, kept)
        if not removed:
            text = (
                f"no head was removed: the first head of each of {len(orders)} random orders costs more than {budget:g}"
            )
            note = Note(code=NoteCode.NOTHING_REMOVED, text=f"{text} (--max-drop)")
            yield base.decide(evaluator, kept, notes=(note,))

    def orders(self, heads: Sequence[Head]) -> list[list[Head]]:
        """The order of removal of each trial."""
        rng = np.random.default_rng(self.options.seed)
        return [[heads[index] for index in rng.permutation(len(heads))] for _ in range(self.options.trials)]


def random_walk(evaluator: SubsetEvaluator, order: Sequence[Head], budget: float) -> list[float]:
    """The metric after each removal in `order`, while its total drop is at most `budget`."""
    kept = frozenset(evaluator.heads)
    baseline, metrics = evaluator.evaluate(kept), []
    for head in order:
        kept = kept - {head}
        metric = evaluator.evaluate(kept)
        if base.metric_drop(baseline, metric) > budget:
            break
        metrics.append(metric)
    return metrics
