"""Normalize a graph for other passes: remove local functions and sequences, and make constants initializers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import _constant_folding as folding

from graph_passes.block_sparse.function import DOMAIN, NAME
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, ReportedResult, require_inlined
from graph_passes.tape import Tape, producer_of

_SEPARATE_INITIALIZERS = 4
"""First version of the file format in which initializers need not be inputs of the graph too."""


_COMPARISONS = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))


class Normalize(GraphPass[int]):
    """Inline local functions, fold shape arithmetic and sequence operators, and lift constants to initializers.

    Cases:
        1. A call of a local function is replaced by the function's nodes. Calls of block-sparse attention stay: their
           attributes and inputs say what is computed, which the plain operators of the function's body do not.
        2. `SplitToSequence` with `SequenceAt` (fused query/key/value projections) becomes `Split`.
        3. Chains of constants fold into one. No weight is copied: a node that reads an initializer of floats is not
           folded, so that weights keep their names and stay in their file.
        4. An `If` whose condition is the same for all sizes of the inputs becomes the branch that it takes.
        5. `Constant` nodes become initializers, and initializers are removed from the inputs of the graph.

    The report is the number of nodes after the pass.
    """

    def call(self, model: ir.Model) -> ReportedResult[int]:
        before = model.graph.num_nodes()
        passes = ir.passes.Sequential(
            common.InlinePass(lambda function: (function.domain, function.name) != (DOMAIN, NAME)),
            common.RemoveInitializersFromInputsPass(),
            folding.FoldConstantsPass(
                shape_inference=any(_is_unranked_split(node) for node in model.graph),
                input_size_limit=folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
                output_size_limit=folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
                should_fold=_may_fold,
            ),
            common.RemoveUnusedNodesPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        )
        conditions = len(_conditions(model))
        result = passes(model)
        while _settle_conditions(model) or len(_conditions(model)) < conditions:
            conditions = len(_conditions(model))
            _release_branches(model.graph)
            common.NameFixPass()(model)  # tensors of two branches may have one name
            passes(model)
        model.ir_version = max(model.ir_version, _SEPARATE_INITIALIZERS)
        after = model.graph.num_nodes()
        return ReportedResult(model, result.modified or before != after, after)

    def ensures(self, model: ir.Model) -> None:
        require_inlined(model)


def _conditions(model: ir.Model) -> list[ir.Node]:
    """The nodes that take one of two branches."""
    return [node for node in model.graph if node.op_type == "If" and not node.domain]


def _settle_conditions(model: ir.Model) -> bool:
    """Case 4: make conditions that are known constants, for the folding pass; returns whether there are any.

    The folding pass itself knows no condition that compares free sizes.
    """
    computed = [node for node in _conditions(model) if node.inputs[0] is not None and not is_constant(node.inputs[0])]
    probe = Probe(model) if computed else None
    count = 0
    for node in computed:
        settled = _settled_condition(node.inputs[0], probe) if probe is not None else None
        if settled is not None:
            op = Tape()
            node.replace_input_with(0, op.constant(np.array(settled)))
            op.insert_before(node)
            count += 1
    return bool(count)


def _settled_condition(value: ir.Value | None, probe: Probe) -> bool | None:
    """The value of a condition, or None where it may depend on the inputs of the graph.

    Both walks of a probe can agree on a condition that other sizes change: neither has one row. A comparison is
    therefore trusted if its operands are the same in both walks, or if they are equal sizes.
    """
    content = probe.constant(value)
    return bool(content.item()) if content is not None and content.size == 1 and _is_settled(value, probe) else None


def _is_settled(value: ir.Value | None, probe: Probe) -> bool:
    """Whether the content of a tensor, which is the same in both walks, is so at all sizes."""
    if probe.constant(value) is None:
        return False
    node = producer_of(value)
    if node is None or probe.dtype(value) != ir.DataType.BOOL:
        return True
    if node.op_type == "Equal" and _are_equal(node, probe):
        return True
    if node.op_type in _COMPARISONS:
        return all(probe.constant(operand) is not None for operand in node.inputs)
    return all(operand is None or _is_settled(operand, probe) for operand in node.inputs)


def _are_equal(node: ir.Node, probe: Probe) -> bool:
    """Whether the operands of a node are the same numbers as each other, in both walks."""
    return all(
        first is not None and second is not None and np.array_equal(first, second)
        for first, second in zip(*map(probe.contents, node.inputs), strict=True)
    )


def _release_branches(graph: ir.Graph) -> None:
    """Remove the uses of tensors by branches that no node takes any more: they would count as read."""
    nodes = frozenset(graph.all_nodes())
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in nodes for value in node.outputs)]
    for value in values:
        for reader, position in list(value.uses()):
            if reader not in nodes:
                reader.replace_input_with(position, None)


def is_constant(value: ir.Value) -> bool:
    """Whether a tensor is an initializer, or the output of a `Constant` node."""
    producer = value.producer()
    return value.is_initializer() or (producer is not None and producer.op_type == "Constant")


def _is_unranked_split(node: ir.Node) -> bool:
    """Whether a node splits a tensor into a sequence and a shape that folding it needs is not recorded.

    The shape of the tensor says which axis is split, that of the sizes how many parts there are.
    """
    return node.op_type == "SplitToSequence" and any(value is not None and value.shape is None for value in node.inputs)


def _may_fold(node: ir.Node) -> bool | None:
    """The argument `should_fold` of the folding pass: False keeps the node, None lets the pass decide."""
    reads_weights = any(value is not None and value.is_initializer() and is_float(value) for value in node.inputs)
    return False if reads_weights else None


def is_float(value: ir.Value) -> bool:
    """Whether a tensor is known to hold floating-point numbers."""
    return value.dtype is not None and value.dtype.is_floating_point()
