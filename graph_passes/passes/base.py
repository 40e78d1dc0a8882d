"""The base class of passes, which return the model together with a frozen report of what they changed."""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Iterable
from typing import Generic, TypeVar

import onnx_ir as ir

from graph_passes.block_sparse.function import is_block_sparse

Report = TypeVar("Report")
"""The report of a pass: a frozen dataclass, or `Names`."""
Names = tuple[str, ...]
"""Names of the changed nodes, tensors or groups; the pass says which."""


@dataclasses.dataclass
class ReportedResult(ir.passes.PassResult, Generic[Report]):
    """Result of a pass.

    Attributes:
        report: what the pass changed, and what it left unchanged on purpose.
    """

    report: Report


class GraphPass(ir.passes.PassBase, Generic[Report]):
    """A pass that returns a report. It edits the model in place unless it overrides `in_place`.

    Reports of changes are logged at level DEBUG with the name of the pass's module.
    """

    inlined = False
    """Whether the pass reads only the main graph, and requires that it calls no local functions."""

    @property
    def in_place(self) -> bool:
        return True

    @property
    def changes_input(self) -> bool:
        return True

    def requires(self, model: ir.Model) -> None:
        if self.inlined:
            require_inlined(model)

    @abc.abstractmethod
    def call(self, model: ir.Model) -> ReportedResult[Report]:
        """Rewrite the model and report what changed."""

    def __call__(self, model_or_result: ir.Model | ir.passes.PassResult, /) -> ReportedResult[Report]:
        result = super().__call__(model_or_result)
        assert isinstance(result, ReportedResult)
        if result.modified:
            logging.getLogger(type(self).__module__).debug("%s", result.report)
        return result


def changed(model: ir.Model, names: Iterable[str | None], *, is_other: bool = False) -> ReportedResult[Names]:
    """The result of a pass that changed what has these names, or something else (`is_other`)."""
    report = tuple(name or "" for name in names)
    return ReportedResult(model, bool(report) or is_other, report)


def require_inlined(model: ir.Model) -> None:
    """Check the precondition of passes that read only the main graph.

    Raises:
        PreconditionError: the graph calls a local function other than block-sparse attention.
    """
    for node in model.graph:
        if node.op_identifier() in model.functions and not is_block_sparse(node):
            raise ir.passes.PreconditionError(
                f"{node.name}: calls the local function {node.domain}::{node.op_type}; run Normalize first"
            )
