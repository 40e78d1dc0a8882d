"""Infer shapes, types and small contents of one node's outputs from those of its inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from graph_passes.flow.foreign_shapes import OLD_COMPARES, Shape, foreign_shape
from graph_passes.flow.node_calls import node_call, output_contents, output_types
from graph_passes.flow.windows import leaves_nothing

# Operators with which exporters compute shapes; outputs of other operators are not evaluated.
_SHAPE_ARITHMETIC = frozenset(
    "Add And Cast CastLike Concat Constant ConstantOfShape Div Equal Expand Floor Gather Identity Less Max Min Mod Mul "
    "Neg Not Or Range ReduceProd ReduceSum Reshape Sign Slice Split Sqrt Squeeze Sub Transpose Unsqueeze Where".split()
)

LARGEST_CONSTANT = 4096
"""Maximum number of elements of a tensor whose content is evaluated."""

Inferred = tuple[ir.Value, Shape | None, ir.DataType | None]
"""A tensor, its shape and its type; None where they are unknown."""


def infer(
    node: ir.Node,
    model: ir.Model,
    shapes: dict[ir.Value, Shape],
    types: dict[ir.Value, ir.DataType],
    constants: dict[ir.Value, np.ndarray],
) -> Iterator[Inferred]:
    """Shape and type of each output of a node, as far as its inputs determine them.

    Args:
        node: the node.
        model: the model of the node, for its operator sets.
        shapes: known shapes of the tensors before the node.
        types: known types of the elements of these tensors.
        constants: known contents of small tensors.
    """
    shape = foreign_shape(node, shapes)
    if shape is not None:
        yield from _infer_foreign(node, shape, types)
        return
    call = node_call(node, model, shapes, types, constants) if _is_safe(node, shapes) else None
    if call is None:
        yield from ((value, None, None) for value in node.outputs)
        return
    for value, (shape, dtype) in zip(node.outputs, output_types(call), strict=True):
        yield value, shape, dtype


def _is_safe(node: ir.Node, shapes: dict[ir.Value, Shape]) -> bool:
    """Whether ONNX's inference can read a node without an assertion that would end the process.

    It clamps the ends of a `Slice` to the sizes of its input, which fails where nothing is left of an axis. Negative
    sizes, which it infers for a window larger than its input, do not get this far.
    """
    if leaves_nothing(node, shapes):
        return False
    source = node.inputs[0] if node.inputs else None
    return not (node.op_type == "Slice" and source in shapes and 0 in shapes[source])


def _infer_foreign(node: ir.Node, shape: Shape, types: dict[ir.Value, ir.DataType]) -> Iterator[Inferred]:
    """Shapes and types of the outputs of a foreign operator, from the shape of its first output."""
    # The first inputs of an embedding are ids; its data come third.
    data = node.inputs[2 if node.op_type == "EmbedLayerNormalization" else 0]
    dtype = types.get(data) if data is not None else None
    dtype = ir.DataType.BOOL if node.op_type in OLD_COMPARES else dtype
    yield node.outputs[0], shape, dtype
    for position, value in enumerate(node.outputs[1:], 1):
        # The fourth output is the sum that is normalized, which the next residual adds to.
        is_sum = position == 3 and node.op_type.startswith("Skip")
        yield value, shape if is_sum else None, dtype if is_sum else None


def evaluate(
    node: ir.Node,
    model: ir.Model,
    shapes: dict[ir.Value, Shape],
    types: dict[ir.Value, ir.DataType],
    constants: dict[ir.Value, np.ndarray],
) -> None:
    """Add the content of a node's small outputs to `constants` if the content of its inputs is known.

    Args:
        node: the node.
        model: the model of the node, for its operator sets.
        shapes: known shapes of the tensors up to the node's outputs.
        types: known types of the elements of these tensors.
        constants: known contents of small tensors.
    """
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type in ("Shape", "Size"):
        shape = shapes.get(node.inputs[0]) if node.inputs[0] is not None else None
        if shape is not None:
            start, end = (node.attributes.get(name) for name in ("start", "end"))
            selected = shape[slice(start.as_int() if start else None, end.as_int() if end else None)]
            content = np.array(selected if node.op_type == "Shape" else np.prod(shape), dtype=np.int64)
            constants[node.outputs[0]] = content
            shapes.setdefault(node.outputs[0], content.shape)
        return
    if node.op_type not in _SHAPE_ARITHMETIC or any(v is not None and v not in constants for v in node.inputs):
        return
    outputs = [shapes.get(value) for value in node.outputs]
    if any(shape is None or np.prod(shape, dtype=np.int64) > LARGEST_CONSTANT for shape in outputs):
        return
    call = node_call(node, model, shapes, types, constants)
    contents = () if call is None else output_contents(call)
    if contents:
        constants.update(zip(node.outputs, contents, strict=True))
