"""Random pruning, the baseline of Parnami et al. 2021 (section 4.4.2): heads in random order, the best of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from compressor.errors import UsageError
from compressor.selection.search.base import Head, Step, SubsetEvaluator, metric_drop, require_end, step_values


class RandomSearch:
    """The best of random subsets, or the longest of random ways down that stay within the budget.

    Args:
        trials: how many are tried. With a number to keep each is one subset, and the one of the best metric wins; by a
            budget each is an order of all heads, followed until the next head would exceed it, and the one that
            removes most wins, of equal ones that of the better metric.
        seed: of the draws; the recipe's where none is given.

    Raises:
        UsageError: no tries.
    """

    def __init__(self, *, trials: PositiveInt = 100, seed: NonNegativeInt = 0) -> None:
        if trials < 1:
            raise UsageError(f"trials {trials}: random ways to try; give 1 or more")
        self.trials, self.seed = trials, seed

    def choose(self, trials: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Step]:
        limit = require_end("random", keep, budget)
        everything = frozenset(trials.heads)
        yield Step(everything, step_values(trials, everything))
        orders = self.orders(trials.heads)
        if keep is not None:
            gone = len(trials.heads) - keep
            subsets = [everything - frozenset(order[:gone]) for order in orders]
            metrics = trials.evaluate_all(subsets)
            if gone:
                best = subsets[int(np.argmax(metrics))]
                yield Step(best, step_values(trials, best, searches=len(subsets)))
            return
        walks = [random_walk(trials, order, limit) for order in orders]
        best_order = max(range(len(walks)), key=lambda n: (len(walks[n]), walks[n][-1:]))
        kept, gone = everything, len(walks[best_order])
        for head in orders[best_order][:gone]:
            kept = kept - {head}
            yield Step(kept, step_values(trials, kept))
        if not gone:
            note = f"no head was removed: none that begins one of {len(orders)} random orders costs {limit:g} or less"
            yield Step(kept, step_values(trials, kept), notes=(f"{note} (--max-drop)",))

    def orders(self, heads: Sequence[Head]) -> list[list[Head]]:
        """The orders in which heads are removed, one a try."""
        draw = np.random.default_rng(self.seed)
        return [[heads[place] for place in draw.permutation(len(heads))] for _ in range(self.trials)]


def random_walk(trials: SubsetEvaluator, order: Sequence[Head], budget: float) -> list[float]:
    """The metric after each head of `order` that can go before one more would cost more than `budget`."""
    kept = frozenset(trials.heads)
    baseline, metrics = trials.evaluate(kept), []
    for head in order:
        kept = kept - {head}
        metric = trials.evaluate(kept)
        if metric_drop(baseline, metric) > budget:
            break
        metrics.append(metric)
    return metrics
