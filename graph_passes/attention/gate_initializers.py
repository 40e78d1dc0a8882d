"""Gate initializers: tensors of a graph whose elements multiply the units of one group.

They are named after the group: `<site>.head_gate` for the heads of an attention site, `<linear>.neuron_gate` for the
neurons that a linear reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graph_passes.errors import GraphErrorCode, PlanError
from graph_passes.plan import GroupPlan, GroupType, Plan
from graph_passes.tape import add_initializer

HEAD_GATE = "head_gate"
GATE_NAMES: Mapping[GroupType, str] = {"heads": HEAD_GATE, "neurons": "neuron_gate"}
"""Type of a group -> name of its gate in the PyTorch module, and the last part of its initializer's name."""

GATE_SUFFIXES = tuple(f".{name}" for name in GATE_NAMES.values())
"""The parts of a gate initializer's name that follow the group's name."""


def gate_name(group: GroupPlan) -> str:
    """Name of the initializer that gates a group."""
    return f"{group.name}.{GATE_NAMES[group.type]}"


def gated_group(value: ir.Value | None) -> str | None:
    """Name of the group that a tensor gates, or None if it is not a gate initializer."""
    if value is None or not value.is_initializer():
        return None
    name = value.name or ""
    return next((name.removesuffix(suffix) for suffix in GATE_SUFFIXES if name.endswith(suffix)), None)


def find_gates(graph: ir.Graph) -> dict[str, ir.Value]:
    """Gate initializers by name of the group, in the order in which the graph first reads them."""
    gates: dict[str, ir.Value] = {}
    for node in graph:
        for value in node.inputs:
            group = gated_group(value)
            if group is not None and value is not None:
                gates.setdefault(group, value)
    return gates


def gate_contents(graph: ir.Graph) -> dict[ir.Value, tuple[str, np.ndarray]]:
    """Gate initializer -> name of its group, and its content."""
    gates = find_gates(graph).items()
    return {value: (group, value.const_value.numpy()) for group, value in gates if value.const_value is not None}


def gate_content(group: GroupPlan, gate: ir.Value) -> np.ndarray | None:
    """The plan's gate in the shape of an initializer.

    Args:
        group: the plan of the group.
        gate: its gate initializer, with one element for each unit or for each of `units * width` positions.

    Returns:
        The values in the initializer's shape and type; None if its size is neither of the two.
    """
    tensor = gate.const_value
    if tensor is None or tensor.size == 0 or tensor.size % group.units:
        return None
    repeats = tensor.size // group.units
    if repeats not in (1, group.width):
        return None
    content = np.repeat(np.array(group.gate), repeats).reshape(tensor.shape.numpy())
    return content.astype(tensor.dtype.numpy())


def set_gates(graph: ir.Graph, plan: Plan) -> None:
    """Write the plan's gates into the graph's gate initializers, except those of another size."""
    gates = find_gates(graph)
    for group in plan.groups:
        value = gates.get(group.name)
        content = gate_content(group, value) if value is not None else None
        if value is not None and content is not None and value.const_value is not None:
            value.const_value = ir.Tensor(content, dtype=value.const_value.dtype, name=value.name)


def gate_initializer(graph: ir.Graph, group: GroupPlan, content: np.ndarray, dtype: ir.DataType) -> ir.Value:
    """The gate initializer of a group, which is added to the graph if the graph lacks it.

    Args:
        content: its values, in the layout of the tensor that they multiply.

    Raises:
        PlanError: the graph has a gate of the group in another layout.
    """
    name = gate_name(group)
    gate = graph.initializers.get(name)
    if gate is None:
        gate = add_initializer(graph, name, ir.Tensor(content.astype(dtype.numpy()), dtype=dtype, name=name))
    elif tuple(gate.shape or ()) != content.shape:
        raise PlanError(
            f"group {group.name} is computed in two layouts of its {group.type} in this graph; export the graph with"
            " its gates",
            code=GraphErrorCode.SITE_AMBIGUOUS,
            site=group.name,
        )
    return gate


def nearest_float_type(value: ir.Value) -> ir.DataType:
    """Type of a tensor; where the file does not record it, the type of the nearest float tensor before it."""
    queue, visited = [value], {value}
    for candidate in queue:
        if candidate.dtype is not None and candidate.dtype.is_floating_point():
            return candidate.dtype
        producer = candidate.producer()
        sources = [source for source in producer.inputs if source is not None] if producer is not None else []
        queue += [source for source in sources if source not in visited]
        visited.update(sources)
    return ir.DataType.FLOAT
