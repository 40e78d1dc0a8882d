"""Remove empty attention: a layer without heads is its output bias on the residual, not a product of width zero."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.gates import find_gates
from graph_passes.probe import Probe

# The output is zero if the first input is.
_ZERO_IN_ZERO_OUT = frozenset(
    ("Cast", "CastLike", "Div", "Dropout", "Expand", "Flatten", "Identity", "Neg", "Reshape", "Slice", "Squeeze")
) | frozenset(("Transpose", "Unsqueeze"))
# The output is zero if any input is.
_PRODUCTS = frozenset(("Einsum", "MatMul", "Mul"))


class RemoveEmptyAttention(ir.passes.InPlacePass):
    """Follow the zeros of sites without heads to where they are added, and leave the other addend.

    Cases:
        1. Zero moved, multiplied or projected is zero.
        2. Zero added to something is that something, where the sum's shape does not come from the zero.
        3. `Gemm` of zero is its addend.
        4. Anything else receives zeros, made to its shape: the projections before them are gone all the same.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        empty = [
            value
            for value in find_gates(model.graph).values()
            if value.const_value is not None and not value.const_value.numpy().any()
        ]
        if not empty:
            return ir.passes.PassResult(model, False)
        probe = Probe(model)
        zeros = set(empty)
        for node in list(model.graph):
            if any(value in zeros for value in node.inputs):
                self._follow(model, node, zeros, probe)
        common.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, True)

    def _follow(self, model: ir.Model, node: ir.Node, zeros: set[ir.Value], probe: Probe) -> None:
        out = node.outputs[0]
        first = node.inputs[0]
        zero = node.op_type in _PRODUCTS or (node.op_type in _ZERO_IN_ZERO_OUT and first in zeros)
        if zero and not out.is_graph_output():
            zeros.add(out)
            return
        if node.op_type == "Add":
            (other,) = [value for value in node.inputs if value not in zeros] or [None]
            if other is None:
                zeros.add(out)
                return
            if _replace(out, other, probe):
                return
        if node.op_type == "Gemm" and first in zeros:
            addend = node.inputs[2] if len(node.inputs) > 2 else None
            if addend is None:
                zeros.add(out)
                return
            if node.attributes.get_float("beta", 1.0) == 1.0 and _replace(out, addend, probe):
                return
        for position, value in enumerate(node.inputs):
            if value in zeros and value not in model.graph.initializers.values():
                _materialize(model, node, position, probe)


def _replace(out: ir.Value, other: ir.Value, probe: Probe) -> bool:
    """Let `other` stand for `out`, if every reader sees the same (case 2)."""
    if out.is_graph_output():
        return False
    if probe.shapes(out) != probe.shapes(other):
        readers = [node for node, _ in out.uses()]
        if any(node.op_type != "Add" for node in readers):
            return False
        for node in readers:
            rest = [value for value in node.inputs if value is not out]
            if len(rest) != 1 or probe.shapes(rest[0]) != probe.shapes(node.outputs[0]):
                return False
    ir.convenience.replace_all_uses_with(out, other)
    return True


def _materialize(model: ir.Model, node: ir.Node, position: int, probe: Probe) -> None:
    """Give a node real zeros in place of a tensor known to be zero (case 4)."""
    value = node.inputs[position]
    assert value is not None
    assert node.graph is not None
    dtype = value.dtype or ir.DataType.FLOAT
    shape = probe.shapes(value)
    like = next(
        (
            known
            for other in _before(model.graph, node)
            for known in other.outputs
            if probe.shapes(known) == shape and known is not value and shape[0] is not None
        ),
        None,
    )
    if like is None:
        return  # The zeros stay what they are: computed by the gate.
    size = ir.node("Shape", [like])
    zero = ir.node("Constant", [], {"value": ir.tensor(np.zeros((), dtype.numpy()))})
    full = ir.node("Expand", [zero.outputs[0], size.outputs[0]])
    full.outputs[0].dtype = dtype
    node.graph.insert_before(node, [size, zero, full])
    node.replace_input_with(position, full.outputs[0])


def _before(graph: ir.Graph, node: ir.Node) -> list[ir.Node]:
    """Nodes before this one, first to last; a tensor among them is there whatever the plan drops after it."""
    found: list[ir.Node] = []
    for other in graph:
        if other is node:
            break
        found.append(other)
    return found
