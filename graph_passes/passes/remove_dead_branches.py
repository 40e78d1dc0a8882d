"""Remove empty attention: a layer without heads is its output bias on the residual, not a product of width zero."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention.gates import find_gates
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.materialize import fill

# The output is zero if the first input is.
_ZERO_IN_ZERO_OUT = frozenset(
    ("Cast", "CastLike", "Div", "Dropout", "Expand", "Flatten", "Identity", "Neg", "Reshape", "Slice", "Squeeze")
) | frozenset(("Transpose", "Unsqueeze"))
# The output is zero if any input is.
_PRODUCTS = frozenset(("Einsum", "MatMul", "Mul"))
# The output repeats a vector along its last axis if the first input does, as long as that axis stays.
_KEEPS_ROWS = frozenset(("Dropout", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))


class RemoveEmptyAttention(ir.passes.InPlacePass):
    """Follow the zeros of sites without heads to where they are added, and leave the other addend.

    Cases:
        1. Zero moved, multiplied or projected is zero.
        2. Zero added to something is that something; `Gemm` of zero is its addend.
        3. A bias left alone that way stands for its rows, until it is added to something of the rows' shape.
        4. Anything else receives zeros or rows, made to their shape: the projections before them are gone all the same.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        empty = [
            value
            for value in find_gates(model.graph).values()
            if value.const_value is not None and not value.const_value.numpy().any()
        ]
        if not empty:
            return ir.passes.PassResult(model, False)
        walk = _Walk(model, empty)
        for node in list(model.graph):
            walk.follow(node)
        common.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, True)


class _Walk:
    """What is known of the graph's values on the way: zero, or the rows of a smaller tensor."""

    def __init__(self, model: ir.Model, empty: list[ir.Value]) -> None:
        self.graph = model.graph
        self.probe = Probe(model)
        self.zeros = set(empty)
        self.rows: dict[ir.Value, ir.Value] = {}
        self.gates = frozenset(empty)

    def follow(self, node: ir.Node) -> None:
        known = [value for value in node.inputs if value in self.zeros or value in self.rows]
        if not known:
            return
        out = node.outputs[0]
        if self._is_zero(node):
            self.zeros.add(out)
        elif (rows := self._rows(node)) is not None:
            if self.probe.shapes(rows) == self.probe.shapes(out) and not out.is_graph_output():
                ir.convenience.replace_all_uses_with(out, rows)
                return
            self.rows[out] = rows
        else:
            for position, value in enumerate(node.inputs):
                if value is not None and value not in self.gates:
                    self._make(node, position, value)
            return
        if out.is_graph_output():
            self._give_out(node, out)

    def _is_zero(self, node: ir.Node) -> bool:
        """Case 1, and a sum or `Gemm` of nothing but zeros."""
        first = node.inputs[0]
        if node.op_type in _PRODUCTS:
            return any(value in self.zeros for value in node.inputs)
        if node.op_type == "Gemm":
            return first in self.zeros and (len(node.inputs) < 3 or node.inputs[2] in self.zeros | {None})
        if node.op_type == "Add":
            return all(value in self.zeros for value in node.inputs)
        return node.op_type in _ZERO_IN_ZERO_OUT and first in self.zeros

    def _rows(self, node: ir.Node) -> ir.Value | None:
        """Cases 2 and 3: the tensor whose rows, broadcast, are the node's output."""
        out, first = node.outputs[0], node.inputs[0]
        if node.op_type == "Gemm" and first in self.zeros:
            return node.inputs[2] if node.attributes.get_float("beta", 1.0) == 1.0 else None
        if node.op_type == "Add":
            rest = [value for value in node.inputs if value not in self.zeros]
            if len(rest) == 1 and rest[0] is not None:
                return self.rows.get(rest[0], rest[0])
            for row, other in (rest, reversed(rest)):
                # The sum's shape comes from the other addend: the row may stand there as it is.
                if row in self.rows and other is not None and self.probe.shapes(other) == self.probe.shapes(out):
                    node.replace_input_with(list(node.inputs).index(row), self.rows[row])
            return None
        if node.op_type in _KEEPS_ROWS and first in self.rows:
            row = self.rows[first]
            rank = len(self.probe.shape(row) or (1, 1))
            before, after = self.probe.shapes(first), self.probe.shapes(out)
            if rank <= 1 and all(a and b and a[-1] == b[-1] for a, b in zip(before, after, strict=True)):
                return row
        return None

    def _make(self, node: ir.Node, position: int, value: ir.Value) -> None:
        """Case 4."""
        if value in self.zeros or value in self.rows:
            made = fill(self.graph, value, self.rows.get(value), node, self.probe)
            if made is not None:  # Else it stays what it is: computed by the gate.
                node.replace_input_with(position, made)

    def _give_out(self, node: ir.Node, out: ir.Value) -> None:
        """Case 4, at an output of the graph, which keeps its name."""
        made = fill(self.graph, out, self.rows.get(out), node, self.probe)
        if made is not None:
            ir.convenience.replace_all_uses_with(out, made, replace_graph_outputs=True)
            out.name, made.name, made.shape = None, out.name, out.shape
