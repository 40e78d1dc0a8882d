"""Detect whether the mask of an attention hides later keys, that is whether it is computed by comparing positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from graph_passes.attention.tracing import LAYOUT, PRODUCTS
from graph_passes.flow.concrete_shapes import Probe

_COMPARISONS = frozenset(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Trilu"))


def is_causally_masked(values: Sequence[ir.Value | None], probe: Probe) -> bool:
    """Whether one of some tensors, scores or masks, is computed from a comparison of query and key positions."""
    stack, visited = list(values), set[ir.Value]()
    while stack:
        value = stack.pop()
        if value is None or value in visited or (node := value.producer()) is None:
            continue
        visited.add(value)
        if node.op_type in PRODUCTS | {"Gather", "Shape"}:
            continue
        shape = probe.shape(node.outputs[0]) or ()
        of_pairs = len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1
        if node.op_type in _COMPARISONS and of_pairs and not _is_threshold(node, probe):
            return True
        stack.extend(node.inputs)
    return False


def _is_threshold(node: ir.Node, probe: Probe) -> bool:
    """Whether a computed mask of floats is compared with a single number.

    Block masks test the model's own mask for hidden pairs this way. Such a node does not compare positions; the nodes
    that compute the model's mask do. A mask that is stored in the graph has no such nodes, and counts as a comparison.
    """
    if node.op_type == "Trilu":
        return False
    sizes = [math.prod(shape) for shape in map(probe.shape, node.inputs) if shape is not None]
    dtypes = [dtype for dtype in map(probe.dtype, node.inputs) if dtype is not None]
    if 1 not in sizes or not any(dtype.is_floating_point() for dtype in dtypes):
        return False
    return any(_is_calculated(value) for value in node.inputs)


def _is_calculated(value: ir.Value | None) -> bool:
    """Whether a tensor is calculated rather than stored; changes of layout are not calculations."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in LAYOUT:
            return node.op_type != "Constant"
        value = node.inputs[0]
    return False
