"""The interface of a search: it evaluates subsets of heads of a frozen model and yields the steps of its removal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from compressor.errors import ErrorCode, UsageError
from compressor.results import Note, NoteCode
from compressor.selection.options import MethodOptions

Head = tuple[str, int]
"""A head: the name of its site and its index in the original model."""
OptionsT = TypeVar("OptionsT", bound=MethodOptions)


class SubsetEvaluator(Protocol):
    """The frozen model as a search sees it. Dropout is off; every subset is evaluated once and then cached."""

    heads: tuple[Head, ...]
    """All heads in (site, head) order, the order in which ties are broken."""

    @property
    def count(self) -> int:
        """Number of different subsets that were evaluated."""
        ...

    @property
    def forwards(self) -> float:
        """Cost of these evaluations, in forwards of the whole model over all evaluation rows."""
        ...

    def evaluate(self, kept: frozenset[Head]) -> float:
        """The metric on the evaluation rows with the heads `kept`; larger is better, whatever the metric."""
        ...

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        """`evaluate` of `kept` without each one of `heads`, in their order; cheaper than separate calls."""
        ...

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        """`evaluate` of each subset, in their order; the evaluations do not depend on each other."""
        ...

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        """Mean over training rows of |dL/dgate| of each head, with the heads outside `kept` at zero.

        See `gradient_importance`.
        """
        ...


@dataclass(frozen=True)
class Step:
    """One decision of a search; the last may be to stop.

    Attributes:
        kept: the heads that are kept after it.
        values: values for the curves, e.g. `metric`, larger is better; `step_values` has those that all searches share.
        costs: the basis of the decision: how far the metric falls below that of all heads if this head is removed too.
        eliminated: heads that are kept for good, because the search no longer considers them.
        notes: what a reader of the result must know if this is the last step.
    """

    kept: frozenset[Head]
    values: Mapping[str, float]
    costs: Mapping[Head, float] = field(default_factory=dict)
    eliminated: frozenset[Head] = frozenset()
    notes: tuple[Note, ...] = ()


class Search(ABC, Generic[OptionsT]):
    """A method that selects heads by evaluating subsets, without training.

    Args:
        options: None: the defaults.

    Attributes:
        options_class: class of its options; `MethodOptions` itself where it has none.
        options: its options.
    """

    options_class: type[OptionsT]

    def __init__(self, options: OptionsT | None = None) -> None:
        self.options = options or self.options_class()

    @abstractmethod
    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Step]:
        """The steps from all heads down to the selected ones; the last step holds the result.

        The first step holds all heads. The heads of every step are among those of the step before.

        Args:
            evaluator: the model.
            keep: exactly how many heads to keep; None: as few as the budget permits.
            budget: how far the metric may fall below that of all heads, in its own unit; ignored if `keep` is set.

        Raises:
            UsageError: neither is set, or the method cannot work by the one that is.
        """


def step_values(evaluator: SubsetEvaluator, kept: frozenset[Head], **values: float) -> dict[str, float]:
    """The values of a step that all searches share: the metric of `kept`, and the evaluations until then."""
    metric = evaluator.evaluate(kept)
    return {"metric": metric, **values, "evaluations": float(evaluator.count), "forwards": float(evaluator.forwards)}


def metric_drop(before: float, after: float) -> float:
    """How far the metric fell, in its unit, without the rounding errors of a difference of two shares."""
    return round(before - after, 12)


def require_end(method: str, keep: int | None, budget: float | None) -> float:
    """The budget; infinity if the number of heads is fixed.

    Raises:
        UsageError: neither is set, or the budget is negative.
    """
    if keep is not None:
        return float("inf")
    if budget is None:
        raise UsageError(
            f"{method} needs a stopping rule; set the number of heads (--keep) or the loss allowed (--max-drop)",
            code=ErrorCode.MISSING_VALUE,
            field="keep",
            fields=("keep", "max_drop"),
            method=method,
        )
    if not budget >= 0:
        raise UsageError(
            f"--max-drop {budget:g}: the loss of the metric that is allowed; choose 0 or more",
            code=ErrorCode.OUT_OF_RANGE,
            field="max_drop",
            value=budget,
        )
    return budget


def head_label(head: Head) -> str:
    """A head as a reader knows it: `head 3 of encoder.layer.0.attention`."""
    return f"head {head[1]} of {head[0]}"


def nothing_removed_note(candidate: str, cost: float, budget: float) -> Note:
    """The note of a search that keeps every head, because the cheapest candidate costs more than the budget."""
    return Note(
        code=NoteCode.NOTHING_REMOVED,
        text=f"no head was removed: {candidate} costs least, {cost:.4g} of the metric, and {budget:g} is allowed"
        " (--max-drop)",
    )
