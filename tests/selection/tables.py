"""Evaluators of subsets whose metric is a table of costs, for searches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from compressor.selection.search import Head

HEADS: tuple[Head, ...] = tuple((site, head) for site in ("a", "b") for head in range(5))
"""Two sites of five heads."""


class TableEvaluator:
    """A `SubsetEvaluator` with the importance of each head and the metric of each subset as given.

    Args:
        importance: head -> importance; its keys are the heads.
        metric: the metric of a subset; by default the number of its heads.
    """

    def __init__(
        self, importance: Mapping[Head, float], metric: Callable[[frozenset[Head]], float] = lambda kept: len(kept)
    ) -> None:
        self.heads = tuple(importance)
        self.count, self.forwards = 0, 0.0
        self.scored: list[frozenset[Head]] = []
        self._evaluated: dict[frozenset[Head], float] = {}
        self._importance, self._metric = importance, metric

    def evaluate(self, kept: frozenset[Head]) -> float:
        if kept not in self._evaluated:
            self.count += 1
            self._evaluated[kept] = float(self._metric(kept))
        return self._evaluated[kept]

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        return [self.evaluate(kept - {head}) for head in heads]

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return [self.evaluate(kept) for kept in subsets]

    def sensitivity(self, kept: frozenset[Head], rows: int) -> Mapping[Head, float]:
        self.scored.append(kept)
        return {head: value if head in kept else 0.0 for head, value in self._importance.items()}


class ReversedEvaluator(TableEvaluator):
    """Evaluates subsets in reverse if their order does not matter."""

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        return super().evaluate_without(kept, heads[::-1])[::-1]

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return super().evaluate_all(list(subsets)[::-1])[::-1]


def additive(
    costs: Sequence[float],
    pair_costs: Mapping[tuple[int, int], float] | None = None,
    kind: type[TableEvaluator] = TableEvaluator,
) -> TableEvaluator:
    """An evaluator whose metric is 100 minus the costs of the removed heads.

    Args:
        costs: cost of each of `HEADS`.
        pair_costs: additional cost of removing both heads of a pair; if none is negative, costs only grow.
        kind: class of the evaluator.
    """

    def metric(kept: frozenset[Head]) -> float:
        removed = [number for number, head in enumerate(HEADS) if head not in kept]
        pairs = sum(cost for pair, cost in (pair_costs or {}).items() if set(pair) <= set(removed))
        return 100 - sum(costs[number] for number in removed) - pairs

    return kind(dict(zip(HEADS, costs, strict=True)), metric)
