"""Insert gates before the products that units end in, in a graph whose operators were changed since it was exported."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from graph_passes.attention.gate_initializers import gate_contents, gate_initializer, nearest_float_type
from graph_passes.errors import GraphErrorCode, PlanError
from graph_passes.flow.axis_flow import Flow
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.rules import RULES
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.plan import GroupPlan, Plan


def products_of_groups(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """Group -> names of the products that sum over its units: output projections and down projections.

    Args:
        model: a graph with gates, without local functions.
    """
    # Any factors that differ will do: a reshape passes on no gain where all factors are equal.
    gates = {
        value: (group, np.arange(1.0, content.size + 1).reshape(content.shape))
        for value, (group, content) in gate_contents(model.graph).items()
    }
    products: dict[str, list[str]] = {}
    for node, sums in Flow(model, gates, RULES, Probe(model)).sums.items():
        for group in frozenset().union(*(gain.sites for gain in sums.values())):
            products.setdefault(group, []).append(node.name or "")
    return {group: tuple(names) for group, names in products.items()}


class InsertProductGates(GraphPass[Names]):
    """Multiply the first input of products by the gate of the group whose units they read, on the axis of the sums.

    A quantized graph has the products of the float graph, by name, but its gates are gone: kept units have none. With
    gates before its products it is shrunk like any other graph.

    The report has the names of the groups whose products were gated.

    Args:
        plan: the groups; gates are the scales of kept units, and zero for dropped ones.
        products: group -> names of its products, see `products_of_groups`.

    Raises (from `call`):
        PlanError: a product is missing, or its inputs are not the units of the group.
    """

    inlined = True

    def __init__(self, plan: Plan, products: Mapping[str, Collection[str]]) -> None:
        self.plan = plan
        self.products = products

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        nodes = {node.name: node for node in model.graph}
        probe = Probe(model)
        for group in self.plan.groups:
            for name in self.products.get(group.name, ()):
                if name not in nodes:
                    raise PlanError(
                        f"{group.name}: the graph has no matmul {name}; use the quantized graph of the same model",
                        code=GraphErrorCode.SITE_MISSING,
                        site=group.name,
                    )
                _gate_product(model.graph, nodes[name], group, probe)
        return changed(model, (group.name for group in self.plan.groups), is_other=True)


def _gate_product(graph: ir.Graph, node: ir.Node, group: GroupPlan, probe: Probe) -> None:
    """Gate the first input of one product of a group."""
    value = node.inputs[0]
    shape = probe.shape(value)
    axis = -1 if shape is None or node.op_type != "Conv" else 1 - len(shape)  # channels, counted from the last axis
    if value is None or shape is None or shape[axis] != group.units * group.width:
        raise PlanError(
            f"{group.name}: the matmul {node.name} does not read {group.units} units of width {group.width}; use the"
            " graph of the same model",
            code=GraphErrorCode.SITE_MISMATCH,
            site=group.name,
        )
    gate_input(graph, node, 0, group, axis)


def gate_input(graph: ir.Graph, node: ir.Node, position: int, group: GroupPlan, axis: int = -1) -> None:
    """Multiply an input of a product by the gate of a group; all products of a group share the initializer.

    Args:
        group: the group, whose units are the indices of one axis of the input.
        axis: that axis, counted from the last.

    Raises:
        PlanError: the gate of the group has another layout, from a product that was gated before.
    """
    value = node.inputs[position]
    assert value is not None
    dtype = nearest_float_type(value)
    content = np.repeat(np.array(group.gate), group.width).reshape(-1, *(1,) * (-1 - axis))
    gate = gate_initializer(graph, group, content, dtype)
    product = ir.node("Mul", [value, gate], name=f"{node.name or gate.name}.gate")
    gated = product.outputs[0]
    gated.dtype, gated.shape = dtype, value.shape
    graph.insert_before(node, product)
    node.replace_input_with(position, gated)
