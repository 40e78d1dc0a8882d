"""Fold weights: compute the layout operators between a weight and the node that reads it, once and for all."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.passes.base import GraphPass, ReportedResult

_LAYOUT = frozenset(("Cast", "Concat", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators that only move, join or convert the elements of their inputs."""


@dataclasses.dataclass(frozen=True)
class FoldedWeights:
    """What `FoldWeights` changed: names of the tensors that became initializers."""

    tensors: tuple[str, ...]


class FoldWeights(GraphPass[FoldedWeights]):
    """Replace `Transpose(weight)` and other layout operators on constants by their results.

    An exported linear layer transposes its weight in the graph. Runtimes fold that themselves, but quantizers look for
    the initializer at the product, and leave a product in floats whose weight is behind an operator.

    Cases:
        1. An operator of layout whose inputs are all constants: its output becomes an initializer, also where it reads
           the output of another one.
        2. Anything else stays: operators that compute, and constants that a subgraph reads.
    """

    def call(self, model: ir.Model) -> ReportedResult[FoldedWeights]:
        from onnxscript.optimizer import fold_constants

        before = set(model.graph.initializers)
        result = fold_constants(model, should_fold=_is_layout)
        lifted = common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        unused = common.RemoveUnusedNodesPass()(model)
        tensors = tuple(name for name in model.graph.initializers if name not in before)
        modified = result.modified or lifted.modified or unused.modified
        return ReportedResult(model, modified, FoldedWeights(tensors))


def _is_layout(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _LAYOUT
