"""Shape inputs of `Reshape`, `Expand` and `ConstantOfShape`, written as plainly as the graph allows.

Exporters compute them with dozens of nodes. Nearly all of them say no more than: as the input here, this many there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.flow.axis_flow import Need, NoRuleError, whole
from graph_passes.flow.concrete_shapes import Probe


def plain_shape(node: ir.Node, source: ir.Value | None, need: Need, probe: Probe) -> list[int | None] | None:
    """The shape input that gives the node's output the sizes `need`: a number an axis, or None for one computed.

    `Reshape`: 0 copies the input's size at the same place, -1 is inferred. `Expand`: 1 leaves the input's size.

    Returns:
        The numbers, or None where the output's shape is unknown.
    """
    out = node.outputs[0]
    after, other = probe.shapes(out)
    if after is None or other is None:
        return None
    before = probe.shapes(source) if source is not None else (None, None)
    numbers: list[int | None] = []
    for axis, size in enumerate(after):
        index = need[axis]
        if size == other[axis]:
            numbers.append(size if index is None else len(index))
        elif node.op_type == "Expand" and _kept(before, (after, other), axis):
            numbers.append(1)
        elif index is not None:
            numbers.append(-1)  # The heads share this axis with the batch: what is left for them is inferred.
        elif node.op_type == "Reshape" and _copied(before, (after, other), axis):
            numbers.append(0)
        else:
            numbers.append(None)
    if node.op_type == "Reshape" and numbers.count(None) == 1 and -1 not in numbers:
        numbers[numbers.index(None)] = -1
    return numbers


def _copied(before: tuple, after: tuple, axis: int) -> bool:
    """Whether the input has the output's size at the same place, counted from the first axis."""
    return all(a is not None and axis < len(a) and a[axis] == b[axis] for a, b in zip(before, after, strict=True))


def _kept(before: tuple, after: tuple, axis: int) -> bool:
    """Whether the input has the output's size at the same place, counted from the last axis."""
    return all(
        a is not None and axis - len(b) >= -len(a) and a[axis - len(b)] == b[axis]
        for a, b in zip(before, after, strict=True)
    )


def _writable(node: ir.Node, numbers: list[int | None]) -> bool:
    return numbers.count(-1) <= (1 if node.op_type == "Reshape" else 0)


def check_shape_input(node: ir.Node, source: ir.Value | None, need: Need, probe: Probe) -> None:
    """Make sure that `set_shape_input` can say what a node's output will hold.

    Raises:
        NoRuleError: it cannot.
    """
    numbers = plain_shape(node, source, need, probe)
    if any(index is not None for index in need) and (numbers is None or not _writable(node, numbers)):
        raise NoRuleError("has a shape that cannot be told")


def set_shape_input(node: ir.Node, source: ir.Value | None, need: Need | None, probe: Probe) -> bool:
    """Give a node the shape input that makes its output hold `need` (None: all). Returns whether anything changed."""
    position = 0 if node.op_type == "ConstantOfShape" else 1
    shape = probe.shape(node.outputs[0])
    if need is None:
        need = whole(len(shape or ()))
    cut = any(index is not None for index in need)
    numbers = plain_shape(node, source, need, probe)
    if numbers is None or not _writable(node, numbers):
        return False
    if None in numbers and not cut:
        return False
    if 0 in numbers or "allowzero" in node.attributes:
        node.attributes.pop("allowzero", None)
    graph, old = node.graph, node.inputs[position]
    assert graph is not None
    if None not in numbers:
        content = ir.tensor(np.array(numbers, np.int64))
        known = old.const_value if old is not None else None
        if known is not None and np.array_equal(known.numpy(), content.numpy()):
            return False
        constant = ir.node("Constant", [], {"value": content})
        graph.insert_before(node, constant)
        node.replace_input_with(position, constant.outputs[0])
        return True
    nodes, parts = [], []
    for axis, number in enumerate(numbers):
        if number is None:
            index = ir.node("Constant", [], {"value_ints": [axis]})
            part = ir.node("Gather", [old, index.outputs[0]], {"axis": 0})
            nodes.append(index)
        else:
            part = ir.node("Constant", [], {"value_ints": [number]})
        nodes.append(part)
        parts.append(part.outputs[0])
    joined = ir.node("Concat", parts, {"axis": 0})
    graph.insert_before(node, [*nodes, joined])
    node.replace_input_with(position, joined.outputs[0])
    return True
