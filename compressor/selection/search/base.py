"""The interface of a search: it evaluates subsets of heads of a frozen model and yields its decisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from compressor.results import Note, NoteCode
from compressor.selection.options import MethodOptions
from compressor.units import Site

Head = tuple[str, int]
"""A head: the name of its site and its index in the original model."""


def all_heads(sites: Sequence[Site]) -> tuple[Head, ...]:
    """Every head in (site, head) order."""
    return tuple((site.name, head) for site in sites for head in range(site.heads))


class SubsetEvaluator(Protocol):
    """Evaluates subsets of heads of a frozen model without dropout. Every subset is evaluated once and then cached."""

    heads: tuple[Head, ...]
    """All heads in (site, head) order, the order in which ties are broken."""

    @property
    def count(self) -> int:
        """Number of different subsets that were evaluated."""

    @property
    def forwards(self) -> float:
        """Cost of these evaluations, in forwards of the whole model over all evaluation rows."""

    def evaluate(self, kept: frozenset[Head]) -> float:
        """The metric on the evaluation rows with the heads `kept`, negated if lower is better."""

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        """`evaluate` of `kept` without each of `heads`, in their order; cheaper than separate calls."""

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        """`evaluate` of each subset, in their order."""

    def sensitivity(self, kept: frozenset[Head], rows: int) -> Mapping[Head, float]:
        """Mean over at most `rows` training rows of |dL/dgate| of each head, with the heads outside `kept` at zero."""


@dataclass(frozen=True)
class Decision:
    """One decision of a search; the last may be to stop.

    Attributes:
        kept: the heads that are kept after the decision.
        values: values for the curves, e.g. `metric` (larger is better); see `decide`.
        costs: the basis of the decision: by candidate head, the drop of the metric from that of all heads if the head
            is removed too.
        eliminated: heads that the search no longer considers, so they are kept.
        notes: facts for a reader of the result if this is the last decision.
    """

    kept: frozenset[Head]
    values: Mapping[str, float]
    costs: Mapping[Head, float] = field(default_factory=dict)
    eliminated: frozenset[Head] = frozenset()
    notes: tuple[Note, ...] = ()


class Search(ABC):
    """A method that selects heads by evaluating subsets, without training."""

    options_class: ClassVar[type[MethodOptions]] = MethodOptions
    options: MethodOptions

    def __init__(self, options: MethodOptions | None = None) -> None:
        self.options = options or self.options_class()

    @abstractmethod
    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float) -> Iterator[Decision]:
        """The decisions from all heads down to the selected ones, each of which keeps a subset of the one before it.

        Args:
            keep: exact number of heads to keep; None: as few as the budget permits.
            budget: maximum drop of the metric from that of all heads, as computed; infinite if `keep` is set.
        """


def decide(
    evaluator: SubsetEvaluator,
    kept: frozenset[Head],
    values: Mapping[str, float] | None = None,
    costs: Mapping[Head, float] | None = None,
    *,
    eliminated: frozenset[Head] = frozenset(),
    notes: tuple[Note, ...] = (),
) -> Decision:
    """The decision to keep `kept`; the metric, and the number and cost of evaluations so far, are added to `values`."""
    metric = evaluator.evaluate(kept)
    counts = {"evaluations": float(evaluator.count), "forwards": float(evaluator.forwards)}
    return Decision(kept, {"metric": metric, **(values or {}), **counts}, costs or {}, eliminated, notes)


def metric_drop(before: float, after: float) -> float:
    """The drop of the metric, rounded to remove the rounding errors of a difference of two shares."""
    return round(before - after, 12)


def head_label(head: Head) -> str:
    """A head as text: `head 3 of encoder.layer.0.attention`."""
    return f"head {head[1]} of {head[0]}"


def nothing_removed_notes(
    evaluator: SubsetEvaluator, kept: frozenset[Head], candidate: str, cost: float, budget: float
) -> tuple[Note, ...]:
    """The note that every head is kept because the cheapest candidate costs more than the budget, if all are kept."""
    if len(kept) < len(evaluator.heads):
        return ()
    text = f"no head was removed: {candidate} costs least, {cost:.4g} of the metric, and {budget:g} is allowed"
    return (Note(code=NoteCode.NOTHING_REMOVED, text=f"{text} (--max-drop)"),)
