"""What a search asks of a model, and what it gives back: a subset of heads, found by evaluation alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from compressor.errors import UsageError

Head = tuple[str, int]
"""A head for life: the name of its site and its id in the untouched model."""


class SubsetEvaluator(Protocol):
    """The frozen model, as a search sees it. Dropout is off; a subset is evaluated once and remembered."""

    heads: tuple[Head, ...]
    """All heads in (site, head) order, the order in which ties are broken."""

    @property
    def count(self) -> int:
        """Evaluations made so far, the remembered ones not counted again."""
        ...

    @property
    def forwards(self) -> float:
        """What they cost: forwards of the whole model over all evaluation rows that would have taken as much."""
        ...

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
    """One decision of a search; the last may be to stop.

    Attributes:
        kept: the heads that stay after it.
        values: what a curve shows, e.g. `metric`, larger is better; what the searches share is in `step_values`.
        costs: what the decision was based on: how far the metric falls below that of all heads if this head goes too.
        eliminated: heads that stay for good, as the search looks at them no more.
        notes: what a reader of the result must know, were this the last step.
    """

    kept: frozenset[Head]
    values: Mapping[str, float]
    costs: Mapping[Head, float] = field(default_factory=dict)
    eliminated: frozenset[Head] = frozenset()
    notes: tuple[str, ...] = ()


class Search(Protocol):
    """A method that chooses heads without learning. Its options are its constructor's."""

    def choose(self, trials: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Step]:
        """The way from all heads down to the chosen ones, told as it is found; the last step holds the choice.

        The first step holds all heads. Every step's heads are among those of the step before.

        Args:
            trials: the model.
            keep: exactly how many heads to keep; None: as few as the budget allows.
            budget: by how much the metric may fall below that of all heads, in its own unit; not looked at where
                `keep` is given. One of the two is.

        Raises:
            UsageError: neither is given, or the method cannot work by the one that is.
        """
        ...


def step_values(trials: SubsetEvaluator, kept: frozenset[Head], **values: float) -> dict[str, float]:
    """The values of a step that every search tells: the metric of `kept`, and the work done until then."""
    metric = trials.evaluate(kept)
    return {"metric": metric, **values, "evaluations": float(trials.count), "forwards": float(trials.forwards)}


def metric_drop(before: float, after: float) -> float:
    """How far the metric fell, in its unit. Of two shares of some rows it has no digits beyond what is rounded off."""
    return round(before - after, 12)


def require_end(method: str, keep: int | None, budget: float | None) -> float:
    """The budget, infinite where heads are counted.

    Raises:
        UsageError: neither is given, or the budget is negative.
    """
    if keep is not None:
        return float("inf")
    if budget is None:
        raise UsageError(
            f"{method} needs an end; say how many heads to keep with --keep, or their cost with --max-drop"
        )
    if not budget >= 0:
        raise UsageError(f"max_drop {budget:g}: what heads may cost; give 0 or more")
    return budget


def head_label(head: Head) -> str:
    """A head as a reader knows it."""
    return f"head {head[1]} of {head[0]}"


def nothing_removed_note(what: str, cost: float, budget: float) -> str:
    """The note of a search that leaves every head where it is."""
    return f"no head was removed: {what} costs least, {cost:.4g} of the metric, and {budget:g} may be lost (--max-drop)"
