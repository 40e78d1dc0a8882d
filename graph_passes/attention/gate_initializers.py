"""Gate initializers: tensors of a graph, named `<site>.head_gate`, whose elements multiply the heads of one site."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.plan import Plan, SitePlan

GATE_NAME = "head_gate"
"""Name of a gate in its PyTorch module, and the last part of its initializer's name."""

GATE_SUFFIX = f".{GATE_NAME}"
"""The part of a gate initializer's name that follows the site's name."""


def gate_name(site: str) -> str:
    """Name of the initializer that gates a site."""
    return site + GATE_SUFFIX


def gated_site(value: ir.Value | None) -> str | None:
    """The site that a tensor gates, or None if it is not a gate initializer."""
    if value is None or not value.is_initializer() or not (value.name or "").endswith(GATE_SUFFIX):
        return None
    return (value.name or "").removesuffix(GATE_SUFFIX)


def find_gates(graph: ir.Graph) -> dict[str, ir.Value]:
    """Gate initializers by site name, in the order in which the graph first reads them."""
    gates: dict[str, ir.Value] = {}
    for node in graph:
        for value in node.inputs:
            site = gated_site(value)
            if site is not None and value is not None:
                gates.setdefault(site, value)
    return gates


def gate_content(site: SitePlan, gate: ir.Value) -> np.ndarray | None:
    """The plan's gate in the shape of an initializer.

    Args:
        site: the plan of the site.
        gate: its gate initializer, with one element for each head or for each of `heads * head_dim` positions.

    Returns:
        The values in the initializer's shape and type; None if its size is neither of the two.
    """
    tensor = gate.const_value
    if tensor is None or tensor.size == 0 or tensor.size % site.heads:
        return None
    repeats = tensor.size // site.heads
    if repeats not in (1, site.head_dim):
        return None
    content = np.repeat(np.array(site.gate), repeats).reshape(tensor.shape.numpy())
    return content.astype(tensor.dtype.numpy())


def set_gates(graph: ir.Graph, plan: Plan) -> None:
    """Write the plan's gates into the graph's gate initializers; sites whose gate has another size stay as they are."""
    gates = find_gates(graph)
    for site in plan.sites:
        value = gates.get(site.name)
        content = gate_content(site, value) if value is not None else None
        if value is not None and content is not None and value.const_value is not None:
            value.const_value = ir.Tensor(content, dtype=value.const_value.dtype, name=value.name)
