"""What a search asks of a model, and what it gives back: a subset of heads, found by evaluation alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

Head = tuple[str, int]
"""A head for life: the name of its site and its id in the untouched model."""


class Trials(Protocol):
    """The frozen model, as a search sees it. Dropout is off; a subset is evaluated once and remembered."""

    heads: tuple[Head, ...]
    """All heads in (site, head) order, the order in which ties are broken."""

    count: int
    """Evaluations made so far, the remembered ones not counted again."""

    def evaluate(self, kept: frozenset[Head]) -> float:
        """The metric on the evaluation rows with the heads `kept`; larger is better, whatever the metric."""
        ...

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        """`evaluate` of each, in their order: the evaluations do not depend on each other."""
        ...

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        """Mean over training rows of |dL/dgate| of each head, the heads outside `kept` at zero (`sensitivity.py`)."""
        ...


@dataclass(frozen=True)
class Step:
    """One decision of a search: the heads kept after it and what it was based on, e.g. `{"metric": 0.91}`."""

    kept: frozenset[Head]
    values: Mapping[str, float]


class Search(Protocol):
    """A method that chooses heads without learning. Its options are its constructor's."""

    def choose(self, trials: Trials, keep: int | None) -> Iterator[Step]:
        """The way from all heads down to the chosen ones, told as it is found; the last step holds the choice.

        Args:
            trials: the model.
            keep: exactly how many heads to keep; None where the method has a budget of its own, such as a drop of
                the metric.

        Raises:
            UsageError: `keep` is None and the method has no budget of its own.
        """
        ...
