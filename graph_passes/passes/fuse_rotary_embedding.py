"""Fuse rotary embeddings: rotate queries and keys by one operator of ONNX Runtime."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.attention.operands import SWAP, before_swap
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape, producer_of, take_over

DOMAIN = "com.microsoft"
_KEEPS_HALVES = frozenset(("Cast", "Cos", "Identity", "Sin", "Unsqueeze"))
"""Operators after which the halves of the last axis are equal if they were before."""
_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class FuseRotaryEmbedding(GraphPass[Names]):
    """Replace the arithmetic of a rotary embedding by ONNX Runtime's `RotaryEmbedding`.

    The arithmetic is `x * cos + rotated(x) * sin` for `x` `[batch, head, position, width]`, where `rotated` exchanges
    the halves of the last axis and negates the first of them. The tables remain as they are computed, for each call
    anew, so that every scaling of frequencies and any positions are covered: the operator looks up row `i` of the
    tables for the `i`-th token of the batch.

    Cases:
        1. Both tables repeat their first half, and have one row for each position of all heads: one operator computes
           the embedding. It reads `x` before its heads and positions are exchanged, if they are.
        2. `x` is the first part of the width of each head, and the rest is joined to it unchanged: the operator reads
           whole heads.
        3. Other tables, and inputs in another precision, stay as they are.

    The report has the names of the nodes that are replaced.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        rewriter, names = _Rewriter(Probe(model)), list[str | None]()
        for node in list(model.graph):
            if node.op_type == "Add" and rewriter.fuse(node):
                names.append(node.name)
        if names:
            model.graph.opset_imports[DOMAIN] = 1
            model.graph.sort()
            RemoveUnusedNodesPass()(model)
        return changed(model, names)


class _Rewriter:
    """Replaces the sums of one graph; embeddings with the same tables share their rows."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._rows: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value, ir.Value]] = {}
        self._op = Tape()

    def fuse(self, add: ir.Node) -> bool:
        """Replace a sum, if it is a rotary embedding."""
        products = [_operands(value, "Mul") for value in add.inputs]
        for first, second in (products, products[::-1]):
            for (x, cos), (rotated, sin) in itertools.product(_orders(first), _orders(second)):
                if self._rotates(rotated, x) and self._are_tables(x, cos, sin):
                    self._replace(add, x, cos, sin)
                    return True
        return False

    def _rotates(self, rotated: ir.Value, x: ir.Value) -> bool:
        """Whether a tensor has the halves of the last axis of another, exchanged, and the first of them negated."""
        node, shape = rotated.producer(), self._probe.shape(x)
        if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or shape is None or len(shape) != 4:
            return False
        if node.attributes.get_int("axis", 0) not in (-1, 3) or shape[3] % 2 or not self._probe.fixed(x, 3):
            return False
        half, negated = shape[3] // 2, _operands(node.inputs[0], "Neg")
        return (
            bool(negated)
            and self._is_slice(negated[0], x, half, 2 * half)
            and self._is_slice(node.inputs[1], x, 0, half)
        )

    def _whole_heads(self, rotated: ir.Value, x: ir.Value) -> tuple[ir.Value, ir.Value] | None:
        """Whole heads of which `x` is the first part, and those with this part rotated; None: there are none."""
        readers, sources = list(rotated.uses()), _operands(x, "Slice")
        shape, part = (self._probe.shape(value) for value in (sources[0] if sources else None, x))
        if len(readers) != 1 or rotated.is_graph_output() or shape is None or part is None:
            return None
        (node, position), whole, width = readers[0], sources[0], part[3]
        if node.op_type != "Concat" or len(node.inputs) != 2 or position != 0:
            return None
        is_last = node.attributes.get_int("axis", 0) in (-1, 3) and all(map(partial(self._probe.fixed, whole), (1, 3)))
        joins = self._is_slice(x, whole, 0, width) and self._is_slice(node.inputs[1], whole, width, shape[3])
        return (whole, node.outputs[0]) if is_last and joins else None

    def _is_slice(self, value: ir.Value | None, x: ir.Value, start: int, end: int) -> bool:
        """Whether a tensor is a part of the last axis of `x`, whose width is fixed."""
        operands, shape = _operands(value, "Slice"), self._probe.shape(x)
        if len(operands) < 4 or operands[0] is not x or shape is None:
            return False
        bounds = [self._probe.constant(operand) for operand in operands[1:]]
        if any(bound is None or bound.size != 1 for bound in bounds):
            return False
        first, last, axis, *steps = [int(bound.item()) for bound in bounds if bound is not None]
        part = range(shape[3])[first:last]
        return axis in (-1, 3) and set(steps) <= {1} and (part.start, part.stop) == (start, end)

    def _are_tables(self, x: ir.Value, *tables: ir.Value) -> bool:
        """Whether tensors have a row for each position of `x`, with equal halves."""
        if self._probe.dtype(x) not in _TYPES:
            return False
        shapes = self._probe.shapes(x)
        for table in tables:
            for size, rows in zip(shapes, self._probe.shapes(table), strict=True):
                if size is None or rows is None or len(rows) != 4 or rows[1:] != (1, *size[2:]):
                    return False
                if rows[0] not in (1, size[0]):
                    return False
            if self._probe.dtype(table) != self._probe.dtype(x) or not self._repeats_halves(table):
                return False
        return True

    def _repeats_halves(self, table: ir.Value) -> bool:
        """Whether the last axis of a tensor has the same content twice."""
        value: ir.Value | None = table
        whole = self._probe.shape(table)
        while (node := producer_of(value)) is not None:
            shape = self._probe.shape(value)
            if shape is None or whole is None or shape[-1] != whole[-1]:
                return False
            if node.op_type == "Concat":
                axis = node.attributes.get_int("axis", 0) % len(shape)
                return axis == len(shape) - 1 and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            if node.op_type in ("Div", "Mul") and self._is_number(node.inputs[1]):
                value = node.inputs[0]
            elif node.op_type == "Mul" and self._is_number(node.inputs[0]):
                value = node.inputs[1]
            else:
                value = node.inputs[0] if node.op_type in _KEEPS_HALVES else None
        return False

    def _is_number(self, value: ir.Value | None) -> bool:
        content = self._probe.constant(value)
        return content is not None and content.size == 1

    def _replace(self, add: ir.Node, x: ir.Value, cos: ir.Value, sin: ir.Value) -> None:
        """Compute the embedding of `x` by the operator."""
        whole, replaced = self._whole_heads(add.outputs[0], x) or (x, add.outputs[0])
        shape, part, view = self._probe.shape(whole), self._probe.shape(x), before_swap(whole)
        assert shape is not None
        assert part is not None
        if view is None:
            source, batch, positions = whole, 0, 2
        else:
            source, batch, positions = self._op("Reshape", view, self._op.ints([0, 0, shape[1] * shape[3]])), 0, 1
        if (cos, sin) not in self._rows:
            sizes = self._op.size(source, batch), self._op.size(source, positions)
            self._rows[cos, sin] = self._numbered(sizes, cos, sin, part[3] // 2)
        heads = {} if whole is x else {"num_heads": shape[1], "rotary_embedding_dim": part[3]}
        inputs = source, *self._rows[cos, sin]
        result = self._op.op("RotaryEmbedding", inputs, heads, domain=DOMAIN, name=add.name)
        if view is not None:
            split = self._op("Reshape", result, self._op.ints([0, 0, shape[1], shape[3]]))
            result = self._op("Transpose", split, perm=SWAP)
        self._op.insert_before(add)
        self._op = Tape()
        take_over(replaced, result)

    def _numbered(
        self, sizes: tuple[ir.Value, ir.Value], cos: ir.Value, sin: ir.Value, half: int
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The number of the row of each token `[batch, position]`, and the rows of both tables `[row, half]`."""
        op = self._op
        first, step = (op.constant(np.array(number, np.int64)) for number in (0, 1))
        every = op("Range", first, op("Squeeze", op("Mul", *sizes)), step)
        numbers = op("Reshape", every, op("Concat", *sizes, axis=0))
        span = op("Concat", sizes[0], op.ints([1]), sizes[1], op.ints([half]), axis=0)
        rows = []
        for table in (cos, sin):
            part = op("Slice", table, op.ints([0]), op.ints([half]), op.ints([3]))
            rows.append(op("Reshape", op("Expand", part, span), op.ints([-1, half])))
        return numbers, rows[0], rows[1]


def _operands(value: ir.Value | None, op_type: str) -> tuple[ir.Value, ...]:
    """The inputs of the node of an operator that computes a tensor; empty if another one does."""
    node = producer_of(value)
    if node is None or node.op_type != op_type or node.domain:
        return ()
    return tuple(source for source in node.inputs if source is not None)


def _orders(operands: tuple[ir.Value, ...]) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Both orders of the operands of a product; none if there are not two."""
    if len(operands) == 2:
        first, second = operands
        yield first, second
        yield second, first
