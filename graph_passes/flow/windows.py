"""Sizes that are too small for the windows of convolutions and poolings, from which no shape can be inferred."""

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
    if not _has_window(node):
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


def window_merges_sizes(node: ir.Node, first: Mapping[ir.Value, Shape], second: Mapping[ir.Value, Shape]) -> bool:
    """Whether the window of a convolution or a pooling gives one size for inputs of two sizes.

    Strides do so to small sizes, e.g. a stride of two to sizes of one and two; the size would pass for a fixed one.

    Args:
        node: any node.
        first: the known shapes of tensors under one assignment of sizes.
        second: the same tensors under another assignment.
    """
    if not _has_window(node):
        return False
    before, after = ([_spatial(value, walk) for walk in (first, second)] for value in (node.inputs[0], node.outputs[0]))
    pairs = zip(zip(*before, strict=False), zip(*after, strict=False), strict=False)
    return any(sizes[0] != sizes[1] and windows[0] == windows[1] for sizes, windows in pairs)


def _has_window(node: ir.Node) -> bool:
    return node.domain in ("", "ai.onnx") and (node.op_type in _WEIGHTS or node.op_type in _POOLS)


def _spatial(value: ir.Value | None, shapes: Mapping[ir.Value, Shape]) -> Shape:
    """The sizes of a tensor without its first two axes; empty where they are unknown."""
    return shapes[value][2:] if value is not None and value in shapes else ()
