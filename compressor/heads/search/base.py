"""What a search asks of a model, and what it gives back: a subset of heads, found by evaluation alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    forwards: float
    """What they cost: forwards of the whole model over all evaluation rows that would have taken as much."""

    def evaluate(self, kept: frozenset[Head]) -> float:
        """The metric on the evaluation rows with the heads `kept`; larger is better, whatever the metric."""
        ...

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        """`evaluate` of `kept` without each of `heads`, one at a time, in their order; cheaper than one by one."""
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

    def choose(self, trials: Trials, keep: int | None, budget: float | None) -> Iterator[Step]:
        """The way from all heads down to the chosen ones, told as it is found; the last step holds the choice.

        Every step's heads are among those of the step before.

        Args:
            trials: the model.
            keep: exactly how many heads to keep; None: as few as the budget allows.
            budget: by how much the metric may fall below that of all heads, in its own unit; not looked at where
                `keep` is given. One of the two is.

        Raises:
            UsageError: the method cannot work by the one that is given.
        """
        ...
