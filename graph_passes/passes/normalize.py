"""Bring a graph into the form the other passes read: no local functions, no sequences, every constant an initializer.

Block-sparse attention is an operator to them, though it is written as a function: its calls stay, and tell by their
attributes and inputs what is computed, which its body of plain operators does not.

Nothing that it computes changes, and no weight is copied: folding leaves whatever reads an initializer of floats alone.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import _constant_folding as folding

from graph_passes.block_sparse.function import DOMAIN, NAME

# Since this version of the file format, initializers need not be inputs of the graph too.
_INITIALIZERS_ALONE = 4


class Normalize(ir.passes.InPlacePass):
    """Inline functions (but block-sparse attention), fold shape arithmetic and sequence operators, lift constants to
    initializers.

    Cases:
        1. `SplitToSequence` with `SequenceAt` (fused query/key/value projections) becomes `Split`.
        2. Chains of constants fold into one.
        3. `Constant` nodes become initializers, and initializers are no inputs of the graph.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before = model.graph.num_nodes()
        passes = ir.passes.Sequential(
            common.InlinePass(lambda function: (function.domain, function.name) != (DOMAIN, NAME)),
            common.RemoveInitializersFromInputsPass(),
            folding.FoldConstantsPass(
                shape_inference=any(node.op_type == "SplitToSequence" and _unranked(node) for node in model.graph),
                input_size_limit=folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
                output_size_limit=folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
                should_fold=_may_fold,
            ),
            common.RemoveUnusedNodesPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        )
        result = passes(model)
        model.ir_version = max(model.ir_version, _INITIALIZERS_ALONE)
        return ir.passes.PassResult(model, result.modified or before != model.graph.num_nodes())


def _unranked(node: ir.Node) -> bool:
    """Whether the file records no shape for what a node reads: folding of sequences has to know it."""
    return node.inputs[0] is not None and node.inputs[0].shape is None


def _may_fold(node: ir.Node) -> bool | None:
    """Leave a node alone that reads weights: they keep their names, and stay in their file."""
    weights = any(value is not None and value.is_initializer() and _floats(value) for value in node.inputs)
    return False if weights else None


def _floats(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
