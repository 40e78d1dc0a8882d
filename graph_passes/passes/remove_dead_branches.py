"""Remove dead branches: replace an attention without heads by its output bias, which is added to the residual."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention.gate_initializers import gate_contents
from graph_passes.flow.concrete_shapes import Probe, Shapes
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape, ancestors

_ZERO_IF_FIRST_IS = frozenset(
    "Cast CastLike Div Dropout Expand Flatten Identity Neg Reshape Slice Squeeze Transpose Unsqueeze".split()
)
"""Operators whose output is zero if their first input is."""
_ZERO_IF_ANY_IS = frozenset(("Einsum", "MatMul", "Mul"))
"""Operators whose output is zero if any input is."""
_KEEPS_ROWS = frozenset(("Dropout", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators whose output repeats a vector along its last axis if their first input does and that axis stays."""


class RemoveDeadBranches(GraphPass[Names]):
    """Follow the zeros of sites without heads to where they are added, and leave the other addend.

    Cases:
        1. A zero tensor that is moved, multiplied or projected is zero.
        2. Zero plus a tensor is that tensor; `Gemm` of zero is its addend.
        3. A bias that remains alone is kept as a single row, and so is the sum of two such rows, until it is added to a
           tensor of the full shape.
        4. Any other operator reads zeros or rows of the full shape, which do not depend on the projections.

    The report has the names of the sites without heads whose zeros were followed.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        contents = gate_contents(model.graph).items()
        gates = {site: value for value, (site, content) in contents if not content.any()}
        if not gates:
            return changed(model, ())
        zeros = _ZeroFlow(model, list(gates.values()))
        for node in list(model.graph):
            zeros.follow(node)
        removed = common.RemoveUnusedNodesPass()(model).modified
        return ReportedResult(model, zeros.modified or removed, tuple(gates))


class _ZeroFlow:
    """The tensors that are zero or repeat the rows of a smaller tensor, among the nodes followed so far."""

    def __init__(self, model: ir.Model, gates: list[ir.Value]) -> None:
        self.modified = False
        self._graph = model.graph
        self._probe = Probe(model)
        self._gates = frozenset(gates)
        self._zeros = set(gates)
        self._rows: dict[ir.Value, ir.Value] = {}

    def follow(self, node: ir.Node) -> None:
        """Follow zeros and rows through one node; its producers must have been followed before."""
        if not any(value in self._zeros or value in self._rows for value in node.inputs):
            return
        output = node.outputs[0]
        if self._is_zero(node):
            self._zeros.add(output)
        elif (rows := self._rows_of(node)) is not None:
            if self._probe.shapes(rows) == self._probe.shapes(output) and not output.is_graph_output():
                ir.convenience.replace_all_uses_with(output, rows)
                self.modified = True
                return
            self._rows[output] = rows
        else:
            for position, value in enumerate(node.inputs):
                if value is not None and value not in self._gates:
                    self._materialize_input(node, position, value)
            return
        if output.is_graph_output():
            self._materialize_output(node, output)

    def _is_zero(self, node: ir.Node) -> bool:
        """Case 1, and a sum or `Gemm` of zeros alone."""
        first = node.inputs[0]
        if node.op_type in _ZERO_IF_ANY_IS:
            return any(value in self._zeros for value in node.inputs)
        if node.op_type == "Gemm":
            return first in self._zeros and (len(node.inputs) < 3 or node.inputs[2] in self._zeros | {None})
        if node.op_type == "Add":
            return all(value in self._zeros for value in node.inputs)
        return node.op_type in _ZERO_IF_FIRST_IS and first in self._zeros

    def _rows_of(self, node: ir.Node) -> ir.Value | None:
        """Cases 2 and 3: the tensor whose rows, broadcast, are the node's output."""
        if node.op_type == "Gemm" and node.inputs[0] in self._zeros:
            return node.inputs[2] if node.attributes.get_float("beta", 1.0) == 1.0 else None
        if node.op_type == "Add":
            return self._rows_of_sum(node)
        if node.op_type in _KEEPS_ROWS and node.inputs[0] in self._rows:
            row = self._rows[node.inputs[0]]
            rank = len(self._probe.shape(row) or (1, 1))
            before, after = self._probe.shapes(node.inputs[0]), self._probe.shapes(node.outputs[0])
            if rank <= 1 and all(a and b and a[-1] == b[-1] for a, b in zip(before, after, strict=True)):
                return row
        return None

    def _rows_of_sum(self, node: ir.Node) -> ir.Value | None:
        """The addend that is not zero, or the sum of two rows; else repeated rows are replaced by one row."""
        addends = [value for value in node.inputs if value not in self._zeros]
        if len(addends) == 1 and addends[0] is not None:
            return self._rows.get(addends[0], addends[0])
        rows = [self._rows[value] for value in addends if value in self._rows]
        if len(rows) == 2 and self._probe.shapes(rows[0]) == self._probe.shapes(rows[1]):
            op = Tape()
            total = op("Add", *rows)
            op.insert_before(node)
            self._probe.copy_shape(total, rows[0])
            total.type, total.shape, self.modified = rows[0].type, rows[0].shape, True
            return total
        output_shapes = self._probe.shapes(node.outputs[0])
        for row, addend in (addends, reversed(addends)):
            # The shape of the sum comes from the other addend, so that the row may broadcast.
            if row in self._rows and addend is not None and self._probe.shapes(addend) == output_shapes:
                node.replace_input_with(list(node.inputs).index(row), self._rows[row])
                self.modified = True
        return None

    def _materialize_input(self, node: ir.Node, position: int, value: ir.Value) -> None:
        """Case 4."""
        if value in self._zeros or value in self._rows:
            filled = _materialize(self._graph, value, self._rows.get(value), node, self._probe)
            if filled is not None:  # Otherwise the shape is unknown, and the zeros are still computed with the gate.
                node.replace_input_with(position, filled)
                self.modified = True

    def _materialize_output(self, node: ir.Node, output: ir.Value) -> None:
        """Case 4, at an output of the graph, which keeps its name."""
        filled = _materialize(self._graph, output, self._rows.get(output), node, self._probe)
        if filled is not None:
            ir.convenience.replace_all_uses_with(output, filled, replace_graph_outputs=True)
            output.name, filled.name, filled.shape = None, output.name, output.shape
            self.modified = True


def _materialize(
    graph: ir.Graph, like: ir.Value, rows: ir.Value | None, before: ir.Node, probe: Probe
) -> ir.Value | None:
    """A tensor in the shape of another: zeros, or rows that are repeated.

    Sizes are read from the graph's inputs, else from the first tensor of that shape, so that no dropped tensor is
    computed only for its shape.

    Args:
        like: the tensor whose shape and type the new one has.
        rows: a tensor that broadcasts to the shape; None: zeros.
        before: the node before which the new nodes are inserted.
        probe: the graph's shapes; the new tensor's are added.

    Returns:
        The new tensor, or None where the graph does not determine the shape.
    """
    first, second = probe.shapes(like)
    if not first or not second:
        return None
    op, behind = Tape(), ancestors([like])
    inputs = sorted(graph.inputs, key=lambda value: value not in behind)  # equal sizes may be those of two batches
    factors = [_factors(inputs, sizes, probe) for sizes in zip(first, second, strict=True)]
    if None in factors:
        same_shape = _first_of_shape(graph, (first, second), before, probe)
        if same_shape is None or same_shape is like:
            return None
        shape = op("Shape", same_shape)
    else:
        shape = op("Concat", *(_product(of_axis, op) for of_axis in factors if of_axis is not None), axis=0)
    dtype = like.dtype or probe.dtype(like) or ir.DataType.FLOAT
    if rows is None:
        rows = op("Constant", value=ir.tensor(np.zeros((), dtype.numpy()), dtype=dtype))
    result = op("Expand", rows, shape)
    op.insert_before(before)
    result.dtype = dtype
    probe.copy_shape(result, like)
    return result


_Factors = list[int | tuple[ir.Value, int]]
"""Factors of a size: numbers, and the sizes of axes of inputs."""


def _factors(inputs: Sequence[ir.Value], sizes: tuple[int, int], probe: Probe) -> _Factors | None:
    """The factors of a size that has these values under both assignments; None: inputs do not determine it."""
    if sizes[0] == sizes[1]:
        return [sizes[0]]
    for value in inputs:
        first, second = probe.shapes(value)
        for axis, (a, b) in enumerate(zip(first or (), second or (), strict=True)):
            if a == b or sizes[0] % a or sizes[1] % b:
                continue
            quotients = (sizes[0] // a, sizes[1] // b)
            rest: _Factors | None = [] if quotients == (1, 1) else _factors(inputs, quotients, probe)
            if rest is not None:
                return [(value, axis), *rest]
    return None


def _product(factors: _Factors, op: Tape) -> ir.Value:
    """A product as a tensor `[1]`."""
    sizes = (op.ints([factor]) if isinstance(factor, int) else op.size(*factor) for factor in reversed(factors))
    return functools.reduce(lambda product, size: op("Mul", size, product), sizes)


def _first_of_shape(graph: ir.Graph, shapes: Shapes, before: ir.Node, probe: Probe) -> ir.Value | None:
    """The first computed tensor of a shape among those before a node; None if there is none."""
    nodes = itertools.takewhile(lambda node: node is not before, graph)
    return next((value for node in nodes for value in node.outputs if probe.shapes(value) == shapes), None)
