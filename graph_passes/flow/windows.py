"""Sizes that are too small for the window of a convolution or a pooling, for which no shape can be inferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graph_passes.flow.foreign_shapes import Shape

_WEIGHTS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""Position of the weights among the inputs of a convolution."""
_POOLS = frozenset(("AveragePool", "LpPool", "MaxPool"))


def leaves_nothing(node: ir.Node, shapes: Mapping[ir.Value, Shape]) -> bool:
    """Whether the window of a convolution or a pooling is larger than its padded input.

    Args:
        node: any node.
        shapes: the known shapes of the tensors before it.
    """
    if node.domain not in ("", "ai.onnx") or (node.op_type not in _WEIGHTS and node.op_type not in _POOLS):
        return False
    sizes = _spatial(node.inputs[0], shapes)
    window: Sequence[int] = node.attributes.get_ints("kernel_shape", ())
    if not window and node.op_type in _WEIGHTS:
        window = _spatial(node.inputs[_WEIGHTS[node.op_type]], shapes)
    if not sizes or len(window) != len(sizes) or node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
        return False
    rank = len(sizes)
    pads = node.attributes.get_ints("pads", (0,) * 2 * rank)
    dilations = node.attributes.get_ints("dilations", (1,) * rank)
    return any(
        size + pads[axis] + pads[rank + axis] < dilations[axis] * (window[axis] - 1) + 1
        for axis, size in enumerate(sizes)
    )


def _spatial(value: ir.Value | None, shapes: Mapping[ir.Value, Shape]) -> Shape:
    """The sizes of a tensor without its first two axes; empty where they are unknown."""
    return shapes[value][2:] if value is not None and value in shapes else ()
