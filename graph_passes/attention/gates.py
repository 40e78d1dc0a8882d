"""Gates of a graph: initializers named `<site>.head_gate` whose elements multiply the heads of one site."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.plan import Plan, SitePlan

GATE = "head_gate"
"""What a gate is called on its module, and so behind the site's name in a graph."""
SUFFIX = f".{GATE}"


def gate_name(site: str) -> str:
    """Name of the initializer that gates a site."""
    return site + SUFFIX


def find_gates(graph: ir.Graph) -> dict[str, ir.Value]:
    """Gate initializers by site name, in the order in which the graph first reads them."""
    found: dict[str, ir.Value] = {}
    for node in graph:
        for value in node.inputs:
            if value is not None and value.is_initializer() and (value.name or "").endswith(SUFFIX):
                found.setdefault((value.name or "").removesuffix(SUFFIX), value)
    return found


def gate_content(site: SitePlan, gate: ir.Value) -> np.ndarray | None:
    """The plan's gate in the initializer's shape: one element a head, or `head_dim` of them; None if neither fits."""
    tensor = gate.const_value
    if tensor is None or tensor.size == 0 or tensor.size % site.heads:
        return None
    each = tensor.size // site.heads
    if each != 1 and each != site.head_dim:
        return None
    content = np.repeat(np.array(site.gate), each).reshape(tensor.shape.numpy())
    return content.astype(tensor.dtype.numpy())


def set_gates(graph: ir.Graph, plan: Plan) -> None:
    """Write the plan's gates into the graph's gate initializers."""
    gates = find_gates(graph)
    for site in plan.sites:
        value = gates.get(site.name)
        content = gate_content(site, value) if value is not None else None
        if value is not None and content is not None and value.const_value is not None:
            value.const_value = ir.Tensor(content, dtype=value.const_value.dtype, name=value.name)
