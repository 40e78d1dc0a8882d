"""Operators that need all of an axis, and the graph's outputs, which do as well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir

from graph_passes.flow.cut import Cuts
from graph_passes.flow.rule import NoRuleError
from graph_passes.flow.sizes import BATCH


def find_mixer(value: ir.Value, node: ir.Node | None, position: int, axis: int, cuts: Cuts) -> tuple[str, str] | None:
    """The first node that needs all of an axis of a tensor, at a node that reads it or after that node.

    Args:
        value: the tensor.
        node: the node that reads it; None: the graph returns it.
        position: position of the tensor among the node's inputs.
        axis: the axis.
        cuts: the graph's shapes and rules.

    Returns:
        Operator and name of the node, or `graph output` and the name of the output; None if there is no such node.
    """
    if node is None:
        return "graph output", value.name or ""
    stack, visited = [(node, position, axis)], {(value, axis)}
    while stack:
        reader, input_position, input_axis = stack.pop()
        if _mixes(reader, input_position, input_axis, cuts):
            return reader.op_type, reader.name or ""
        for output, output_axis in _carriers(reader, input_position, input_axis, cuts):
            if output.is_graph_output():
                return "graph output", output.name or ""
            if (output, output_axis) not in visited:
                visited.add((output, output_axis))
                stack += [(user, user_position, output_axis) for user, user_position in output.uses()]
    return None


def _mixes(node: ir.Node, position: int, axis: int, cuts: Cuts) -> bool:
    rule = cuts.rule(node)
    try:
        return rule is None or rule.mixes(node, position, axis, cuts)
    except NoRuleError:
        return True


def _carriers(node: ir.Node, position: int, axis: int, cuts: Cuts) -> Iterator[tuple[ir.Value, int]]:
    """Output axes with more than one index that carry the heads of an input's axis.

    An axis of rows carries none of them, although a reshape makes it from an axis of rows and heads.
    """
    rule = cuts.rule(node)
    assert rule is not None
    with contextlib.suppress(NoRuleError):
        for output, output_axis in rule.carries(node, position, axis, cuts):
            value = node.outputs[output]
            first, second = cuts.probe.shapes(value)
            if first is None or first[output_axis] == 1:
                continue
            if second is None or (first[output_axis], second[output_axis]) != BATCH:
                yield value, output_axis
