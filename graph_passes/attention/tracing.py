"""Follow activations through the operators around an attention, back to projections and forward to the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.tape import producer_of, source_before

LAYOUT = frozenset("Cast Expand Flatten Identity Reshape Slice Squeeze Tile Transpose Unsqueeze".split())
"""Operators that move, repeat or convert elements."""
_RESHAPES = frozenset(("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
PRODUCTS = frozenset(("FusedMatMul", "Gemm", "MatMul"))
"""Operators that multiply matrices."""
KEEPS_ELEMENTS = frozenset(("Cast", "Identity", "Transpose"))
"""Operators that may stand between a weight and the product that reads it."""
_POINTWISE = frozenset(("Add", "CastLike", "Clip", "Div", "Dropout", "Max", "Min", "Mul", "Sub", "Tanh", "Where"))
_SELECTIONS = frozenset(("Gather", "GatherElements", "GatherND", "Slice"))
"""Operators that select elements of their first input."""
_PARTS_OF_NORMS = frozenset(("Div", "Mul", "Sub"))
"""Operators of a decomposed norm that read its input, and what is computed from it alone."""

_STEPS = 8
"""Nodes that `is_computed` follows before it assumes that a tensor is computed."""


def is_computed(value: ir.Value | None) -> bool:
    """Whether a tensor depends on the graph's inputs, as far as a few nodes before it show."""
    for _ in range(_STEPS):
        if value is None or value.is_initializer():
            return False
        node = value.producer()
        if node is None:
            return True
        if node.op_type not in KEEPS_ELEMENTS | {"DequantizeLinear"} or not node.inputs:
            return bool(node.inputs)
        value = node.inputs[0]
    return True


def product_behind(value: ir.Value | None) -> ir.Node | None:
    """The product of two activations that scores are computed from, or None."""
    while (node := producer_of(value)) is not None:
        if node.op_type in PRODUCTS:
            return node if all(is_computed(operand) for operand in node.inputs[:2]) else None
        if node.op_type not in _POINTWISE | LAYOUT:
            return None
        operands = node.inputs[1:] if node.op_type == "Where" else node.inputs
        branches = [operand for operand in operands if is_computed(operand)]
        if len(branches) > 1:
            branches = [operand for operand in branches if product_behind(operand) is not None]
        value = branches[0] if branches else None
    return None


def product_ahead(value: ir.Value) -> ir.Node | None:
    """The product of probabilities, its left operand, with values, or None."""
    return _ahead(
        value,
        lambda node, read: node.op_type in PRODUCTS and node.inputs[0] is read and is_computed(node.inputs[1]),
    )


def projection_ahead(value: ir.Value) -> ir.Node | None:
    """The product of heads with the weight that mixes them, or None."""
    products = PRODUCTS | {"Conv"}
    return _ahead(value, lambda node, _: node.op_type in products and sum(map(is_computed, node.inputs[:2])) == 1)


def _ahead(value: ir.Value, is_end: Callable[[ir.Node, ir.Value], bool]) -> ir.Node | None:
    """The first node that ends a walk forward over pointwise operators and changes of layout, or None."""
    while True:
        readers = [node for node, _ in value.uses()]
        for node in readers:
            if is_end(node, value):
                return node
        onward = [node for node in readers if node.op_type in _POINTWISE | LAYOUT]
        if not onward:
            return None
        value = onward[-1].outputs[0]


def source_activation(value: ir.Value | None) -> ir.Value | None:
    """The activation that a query or key is projected from, before its layout changes."""
    while (node := producer_of(value)) is not None:
        operands = [operand for operand in node.inputs if is_computed(operand)]
        if node.op_type in PRODUCTS and len(operands) == 1:
            return source_before(operands[0], _RESHAPES)  # optimizers insert reshapes around a projection
        data = [operand for operand in operands if operand is not None and not _is_index(operand)]
        if node.op_type == "Concat":  # new keys follow those of a cache
            data = [operand for operand in data if not operand.is_graph_input()]
        is_lookup = node.op_type == "Gather" and is_computed(node.inputs[1])
        if not data or is_lookup or node.op_type == "LayerNormalization":
            return value
        value = data[0]
    return value


def attend_to_themselves(query: ir.Value | None, key: ir.Value | None) -> bool:
    """Whether queries and keys are computed from one activation, or some of its positions, by norms and weights alone.

    A graph that returns one position computes the queries of its last layer at this position alone.
    """
    return not set(_same_sequence(query)).isdisjoint(_same_sequence(key))


def _same_sequence(value: ir.Value | None) -> Iterator[ir.Value]:
    """The activation that a query or key is projected from, and what it is computed from alone.

    This ends at a sum of two activations, such as that of the residual stream, or at embeddings.
    """
    value = source_activation(value)
    while value is not None and is_computed(value):
        yield value
        node = value.producer()
        if node is None:
            return
        operands = node.inputs[:1] if node.op_type in _SELECTIONS else list(filter(is_computed, node.inputs))
        if len(operands) > 1 and node.op_type not in LAYOUT | _PARTS_OF_NORMS:
            return
        value = operands[0] if operands else None


def _is_index(value: ir.Value) -> bool:
    """Whether a tensor holds positions, sizes or conditions rather than activations."""
    return value.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


def separate_heads(value: ir.Value, heads: int, probe: Probe) -> ir.Value | None:
    """The first tensor `[batch, heads, length, width]` that one `[batch * heads, length, width]` is reshaped to."""
    while True:
        onward = [node for node, _ in value.uses() if node.op_type in ("Identity", "Reshape")]
        if len(onward) != 1:
            return None
        value = onward[0].outputs[0]
        shapes = probe.shapes(value)
        if all(shape is not None and len(shape) == 4 and shape[1] == heads for shape in shapes):
            return value


def count_repeats(value: ir.Value | None, probe: Probe) -> int:
    """Number of query heads that share one key/value head, read from what repeats its axis after the projection."""
    while (node := producer_of(value)) is not None and node.op_type in LAYOUT:
        before, after = probe.shape(node.inputs[0]), probe.shape(node.outputs[0])
        if node.op_type in ("Expand", "Tile") and before and after and len(before) == len(after):
            for axis, (old, size) in enumerate(zip(before, after, strict=True)):
                # What is repeated for each row is not shared by heads.
                if old == 1 and size > 1 and probe.fixed(node.outputs[0], axis):
                    return size
        value = node.inputs[0]
    return 1
