"""What a tool that rewrote a graph left out: values that its nodes read before, and that nothing reads now."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir


def lost_dependencies(before: ir.Model, after: ir.Model) -> list[str]:
    """What nodes read in one graph, and the values of the same names do not depend on in another.

    Args:
        before: the graph, with all nodes on its top level.
        after: a graph in which some nodes are replaced; the names of the values that remain are the same.

    Returns:
        Each as `input -> output`, names of values. Constants are not counted.
    """
    names = {value.name for node in before.graph for value in node.outputs} | {v.name for v in before.graph.inputs}
    values = {value.name: value for node in after.graph for value in node.outputs}
    lost = []
    for node in before.graph:
        # Outputs that a node omits have an empty name.
        for output in (value for value in node.outputs if value.name and value.name in values):
            sources = _nearest(values[output.name], names)
            lost += [
                f"{value.name} -> {output.name}"
                for value in node.inputs
                if value is not None and value.name not in sources and not _is_constant(value)
            ]
    return lost


def _nearest(value: ir.Value, names: Collection[str | None]) -> set[str | None]:
    """Those of some named values that a value is computed from, without others in between."""
    reached: set[str | None] = set()
    waiting = [value]
    while waiting:
        producer = waiting.pop().producer()
        for source in () if producer is None else filter(None, producer.inputs):
            if source.name in names:
                reached.add(source.name)
            else:
                waiting.append(source)
    return reached


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return value.is_initializer() or (producer is not None and producer.op_type == "Constant")
