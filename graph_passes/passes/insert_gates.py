"""Insert the gates of a plan into a graph of any exporter that has no gates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.attention.find import GraphSite, find_attention
from graph_passes.attention.find_groups import GraphGroup, integer_products, search_groups
from graph_passes.attention.gate_initializers import (
    HEAD_GATE,
    find_gates,
    gate_content,
    gate_initializer,
    nearest_float_type,
)
from graph_passes.attention.match_plan import Pair, match_feed_forwards, match_plan
from graph_passes.attention.products import GraphProduct
from graph_passes.block_sparse.function import is_block_sparse
from graph_passes.block_sparse.masks import mask_name
from graph_passes.errors import GraphError, GraphErrorCode, PlanError, listed
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.passes.insert_product_gates import gate_input
from graph_passes.plan import NeuronPlan, Plan, SitePlan
from graph_passes.weights import MatchedWeight

FINGERPRINT = "compressor.fingerprint"
"""Key of a graph's metadata: the fingerprint of the model that it was exported from."""


class InsertGates(GraphPass[Names]):
    """Multiply heads and neurons by gates, initializers named after the attention site or the feed-forward.

    Cases:
        1. The graph has gates, of the plan's groups and units. A feed-forward of the plan that is a group of the graph
           by its name (`find_groups`) and has no gate gets one; a gate of neurons that the plan does not list is open.
        2. It has none: each site of the plan is paired with its attentions, and each feed-forward that loses or scales
           neurons with its products, by the names of the graph's groups (`find_groups`). Names of other sources, such
           as those of a PyTorch model, are paired by `match_plan` and `match_feed_forwards`.

    The report has the names of the groups that were given a gate.

    Args:
        plan: the plan; gates are the scales of its kept units, and zero for dropped units.
        weights: name of a parameter -> the initializers that hold it, where its values are known; see `match_weights`.
        gate_all: insert gates of ones for feed-forwards that keep every neuron, too.

    Raises (from `call`):
        PlanError: the plan's groups are not those of the graph, the units are removed already, or a mask is missing.
        GraphError: the plan's groups are not those of the graph, whose weights are integers.
    """

    inlined = True

    def __init__(
        self, plan: Plan, weights: Mapping[str, MatchedWeight] | None = None, *, gate_all: bool = False
    ) -> None:
        self.plan = plan
        self.weights = weights or {}
        self.gate_all = gate_all

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        _check_masks(self.plan, model.graph)
        _check_fingerprint(self.plan, model)
        gates = find_gates(model.graph)
        if gates:
            ungated = self._ungated_groups(model, gates)
            _check_gates(self.plan, gates, ungated.keys())
            inserted = [group for group in self._scaled_feed_forwards() if group.name in ungated]
            for group in inserted:
                graph_group = ungated[group.name]
                for node in graph_group.products:
                    gate_input(model.graph, node, graph_group.position, group, graph_group.axis)
            return changed(model, (group.name for group in inserted))
        sites, feed_forwards = self._pairs(model)
        for site, attention in sites:
            _insert(model.graph, site, attention)
        for group, product in feed_forwards:
            gate_input(model.graph, product.node, product.position, group, product.axis)
        names = [*(site.name for site, _ in sites), *(group.name for group, _ in feed_forwards)]
        return changed(model, dict.fromkeys(names), is_other=True)

    def _scaled_feed_forwards(self) -> list[NeuronPlan]:
        """The feed-forwards that need gates."""
        return [group for group in self.plan.feed_forwards if self.gate_all or group.gate != (1.0,) * group.units]

    def _ungated_groups(self, model: ir.Model, gates: Collection[str]) -> dict[str, GraphGroup]:
        """Case 1: the feed-forwards of the plan that are groups of the graph and have no gate, by name."""
        units = {group.name: group.units for group in self.plan.feed_forwards if group.name not in gates}
        groups = search_groups(model).groups if units else ()
        return {g.name: g for g in groups if g.type == "neurons" and units.get(g.name) == g.units}

    def _pairs(self, model: ir.Model) -> tuple[list[Pair], list[tuple[NeuronPlan, GraphProduct]]]:
        """Case 2: the sites and the feed-forwards that get gates, each with what it is in the graph."""
        groups = search_groups(model).groups
        try:
            sites = _sites_of_groups(self.plan, groups)
            if sites is None:
                sites = match_plan(self.plan, find_attention(model))
            return sites, match_feed_forwards(self._scaled_feed_forwards(), model, self.weights, groups)
        except PlanError as error:
            for obstacle in integer_products(model):
                code = GraphErrorCode.UNSUPPORTED_OPERATOR
                raise GraphError(str(obstacle), code=code, operator=obstacle.op, node=obstacle.node) from error
            raise


def _sites_of_groups(plan: Plan, groups: Sequence[GraphGroup]) -> list[Pair] | None:
    """Each site of a plan with the attentions of the group that it is named after, or after the product of.

    Attentions that the plan does not name keep their heads. None, unless each site has the name and the sizes of a
    group of heads of its own.
    """
    heads = [group for group in groups if group.type == "heads"]
    by_name = {group.linear: group for group in heads} | {group.name: group for group in heads}
    pairs = [(site, by_name[site.name]) for site in plan.sites if site.name in by_name]
    of_size = [group for site, group in pairs if (group.units, group.head_dim) == (site.heads, site.head_dim)]
    if len({group.linear for group in of_size}) < len(plan.sites):
        return None
    return [(site, attention) for site, group in pairs for attention in group.attentions]


def _check_masks(plan: Plan, graph: ir.Graph) -> None:
    # Block-sparse attention reads a mask that was cut to the blocks kept, and cannot take another one.
    masks = {
        name for name, value in graph.initializers.items() if any(not is_block_sparse(node) for node, _ in value.uses())
    }
    for site in plan.sites:
        if site.mask is not None and mask_name(site.name) not in masks:
            raise PlanError(
                f"site {site.name} has a mask in the plan and none in this graph, which was shrunk already or exported"
                " without masks; give the model folder: compress MODEL --plan PLAN",
                code=GraphErrorCode.MASK_MISSING,
                site=site.name,
            )


def _check_fingerprint(plan: Plan, model: ir.Model) -> None:
    fingerprint = model.metadata_props.get(FINGERPRINT)
    if fingerprint is not None and plan.model is not None and fingerprint != plan.model:
        message = f"the plan belongs to the model {plan.model}, the graph to {fingerprint}; use the graph's own plan"
        raise PlanError(message, code=GraphErrorCode.MODEL_MISMATCH, plan=plan.model, graph=fingerprint)


def _check_gates(plan: Plan, gates: dict[str, ir.Value], ungated: Collection[str]) -> None:
    """Case 1."""
    for group in plan.groups:
        if group.name in ungated:
            continue
        if group.name not in gates:
            message = f"group {group.name} is not in this graph, which has {listed(gates)}; use the graph's own plan"
            raise PlanError(message, code=GraphErrorCode.SITE_MISSING, site=group.name)
        if gate_content(group, gates[group.name]) is None:
            tensor = gates[group.name].const_value
            size = tensor.size if tensor is not None else 0
            raise PlanError(
                f"group {group.name}: the plan has {group.units} {group.type}, the graph's gate has {size} elements;"
                " use the graph's own plan",
                code=GraphErrorCode.SITE_MISMATCH,
                site=group.name,
                units=group.units,
                gate=size,
            )
    names = {group.name for group in plan.groups}
    for name, gate in gates.items():
        if name not in names and (gate.name or "").endswith(HEAD_GATE):
            message = f"the graph's site {name} is not in the plan; use the graph's own plan"
            raise PlanError(message, code=GraphErrorCode.SITE_MISSING, site=name)


def _insert(graph: ir.Graph, site: SitePlan, attention: GraphSite) -> None:
    """Case 2, for one attention of a site."""
    value, producer = attention.output, attention.output.producer()
    assert producer is not None
    dtype = nearest_float_type(value)
    if attention.axis == attention.rank - 1:
        content = np.repeat(np.array(site.gate), site.head_dim)
    else:
        content = np.array(site.gate).reshape(-1, *(1,) * (attention.rank - 1 - attention.axis))
    gate = gate_initializer(graph, site, content, dtype)
    product = ir.node("Mul", [value, gate], name=f"{value.name}.gate")
    gated = product.outputs[0]
    gated.dtype, gated.shape = dtype, value.shape
    graph.insert_after(producer, product)
    if value.is_graph_output():  # A graph that returns the heads returns them gated, under the same name.
        value.name, gated.name = f"{value.name}.ungated", value.name
    ir.convenience.replace_all_uses_with(value, gated, replace_graph_outputs=True)
    product.replace_input_with(0, value)
