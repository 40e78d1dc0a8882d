"""Conditions of a graph that have one value whatever the sizes of its inputs are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe

_COMPARISONS = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))


def settled_condition(value: ir.Value | None, probe: Probe) -> bool | None:
    """The value of a condition, or None where it may depend on the inputs of the graph.

    Both walks of a probe can agree on a condition that other sizes change: neither has one row. A comparison is
    therefore trusted if its operands are the same in both walks, or if they are equal sizes.

    Args:
        value: a boolean.
        probe: the shapes and small contents of the graph.
    """
    content = probe.constant(value)
    return bool(content.item()) if content is not None and content.size == 1 and _is_settled(value, probe) else None


def _is_settled(value: ir.Value | None, probe: Probe) -> bool:
    """Whether the content of a tensor, which is the same in both walks, is so at all sizes."""
    if probe.constant(value) is None:
        return False
    node = value.producer() if value is not None else None
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
