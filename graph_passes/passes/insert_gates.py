"""Insert the gates of a plan into a graph that has none, wherever it came from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from graph_passes.attention.find import GraphSite, find_attention
from graph_passes.attention.gates import find_gates, gate_content, gate_name
from graph_passes.block_sparse.function import DOMAIN, NAME
from graph_passes.block_sparse.masks import mask_name
from graph_passes.errors import PlanError
from graph_passes.plan import Plan, SitePlan

FINGERPRINT = "compressor.fingerprint"
"""Metadata of a graph: the fingerprint of the model that it was exported from."""


class InsertGates(ir.passes.InPlacePass):
    """Multiply each site's attention output by a gate initializer named after the site.

    Cases, by how the plan's sites meet the graph's attention:
        1. Gates are there: nothing is inserted. They must be the plan's, head for head.
        2. The exporter left module paths: each site's path is one attention's scope, up to prefixes of wrappers.
        3. It left none: as many attentions as sites, with the same heads, in the same order.

    Raises (from `call`):
        PlanError: none of these, or the heads are gone already; the message says what does not fit.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        # What block-sparse attention reads was cut to the blocks it keeps: no other mask can be given it.
        masks = {
            name
            for name, value in model.graph.initializers.items()
            if any((node.domain, node.op_type) != (DOMAIN, NAME) for node, _ in value.uses())
        }
        for site in self.plan.sites:
            if site.mask is not None and mask_name(site.name) not in masks:
                raise PlanError(
                    f"site {site.name} has a mask in the plan and none in this graph, which was shrunk"
                    " already or exported without; give the model folder: compress MODEL --plan PLAN"
                )
        made_for = model.metadata_props.get(FINGERPRINT)
        if None not in (made_for, self.plan.model) and made_for != self.plan.model:
            raise PlanError(
                f"the plan belongs to the model {self.plan.model}, the graph to {made_for}; use the graph's own plan"
            )
        gates = find_gates(model.graph)
        if gates:
            _check_gates(self.plan, gates)
            return ir.passes.PassResult(model, False)
        for site, place in _meet(self.plan, find_attention(model)):
            _insert(model.graph, site, place)
        return ir.passes.PassResult(model, True)


def _check_gates(plan: Plan, gates: dict[str, ir.Value]) -> None:
    """Case 1."""
    for site in plan.sites:
        if site.name not in gates:
            raise PlanError(f"site {site.name} is not in this graph, which has {_listed(gates)}; use its own plan")
        if gate_content(site, gates[site.name]) is None:
            size = gates[site.name].const_value
            raise PlanError(
                f"site {site.name}: the plan has {site.heads} heads, the graph's gate has "
                f"{size.size if size is not None else 0}; use the graph's own plan"
            )
    names = {site.name for site in plan.sites}
    for name in gates:
        if name not in names:
            raise PlanError(f"the graph's site {name} is not in the plan; use the graph's own plan")


def _meet(plan: Plan, places: list[GraphSite]) -> list[tuple[SitePlan, GraphSite]]:
    """Pair the plan's sites with the graph's attentions."""
    if plan.heads_kept < plan.heads and [place.heads for place in places] == [
        len(s.kept) for s in plan.sites if s.kept
    ]:
        raise PlanError(
            "the graph seems to be shrunk already: its attentions have as many heads as the plan keeps; give the graph"
            " that has every head"
        )
    by_name = [(site, [place for place in places if _same_path(site.name, place.name)]) for site in plan.sites]
    pairs = _meet_by_name(by_name, places) if any(found for _, found in by_name) else _meet_in_order(plan, places)
    for site, place in pairs:
        if (site.heads, site.head_dim) != (place.heads, place.head_dim):
            raise PlanError(
                f"site {site.name}: the plan has {site.heads} heads of {site.head_dim}, the graph {place.heads} of "
                f"{place.head_dim} at {place.name or 'that place'}; use a plan of this model"
            )
    return pairs


def _meet_by_name(
    by_name: list[tuple[SitePlan, list[GraphSite]]], places: list[GraphSite]
) -> list[tuple[SitePlan, GraphSite]]:
    """Case 2. A module that the model calls several times is one site with several attentions of one name."""
    for site, found in by_name:
        if not found:
            raise PlanError(
                f"site {site.name} is no attention of this graph, which has {_names(places)}; use a plan of this model"
            )
        if len({place.name for place in found}) > 1:
            raise PlanError(
                f"site {site.name} could be several attentions of this graph, which has {_names(found)}; "
                "export the graph with its gates"
            )
    pairs = [(site, place) for site, found in by_name for place in found]
    for place in places:
        sites = [site.name for site, found in pairs if found is place]
        if len(sites) != 1:
            which = f"could be any of {_listed(sites)}" if sites else "is not in the plan"
            raise PlanError(f"the graph's attention {place.name or 'without a name'} {which}; use a plan of this model")
    return pairs


def _meet_in_order(plan: Plan, places: list[GraphSite]) -> list[tuple[SitePlan, GraphSite]]:
    """Case 3."""
    if len(places) != len(plan.sites):
        raise PlanError(
            f"the plan has {len(plan.sites)} sites and the graph {len(places)} attentions that can be told; "
            "use a plan of this model, or export the graph with its gates"
        )
    pairs = list(zip(plan.sites, places, strict=True))
    for site, place in pairs:
        if (site.kind == "cross") != (place.kind == "cross"):
            raise PlanError(
                f"site {site.name}: a {site.kind} attention in the plan, and the graph's nameless attention in its "
                f"place is {place.kind}; export the graph with its gates"
            )
    return pairs


def _same_path(site: str, scope: str | None) -> bool:
    """Whether a node's scope lies in a site's module, up to a prefix that one of the two has and the other lacks."""
    if scope is None:
        return False
    mine, theirs = site.split("."), scope.split(".")
    starts = range(max(len(mine), len(theirs)))
    inside = any(theirs[start : start + len(mine)] == mine for start in starts)
    return inside or any(mine[start:] == theirs for start in starts if mine[start:])


def _names(places: list[GraphSite]) -> str:
    return _listed(place.name or "a nameless one" for place in places)


def _listed(names: Iterable[str]) -> str:
    known = list(dict.fromkeys(names))
    return ", ".join(known[:4]) + (f" and {len(known) - 4} more" if len(known) > 4 else "")


def _insert(graph: ir.Graph, site: SitePlan, place: GraphSite) -> None:
    value, producer = place.output, place.output.producer()
    assert producer is not None
    if place.axis == place.rank - 1:
        content = np.repeat(np.array(site.gate), site.head_dim)
    else:
        content = np.array(site.gate).reshape(-1, *(1,) * (place.rank - 1 - place.axis))
    dtype = _dtype(value)
    gate = graph.initializers.get(gate_name(site.name))
    if gate is not None and tuple(gate.shape or ()) != content.shape:
        raise PlanError(
            f"site {site.name} is computed in two layouts of its heads in this graph; export the graph with its gates"
        )
    if gate is None:
        tensor = ir.Tensor(content.astype(dtype.numpy()), dtype=dtype, name=gate_name(site.name))
        gate = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(dtype), shape=tensor.shape)
        graph.register_initializer(gate)
    readers = list(value.uses())
    product = ir.node("Mul", [value, gate], name=f"{value.name}.gate")
    gated = product.outputs[0]
    gated.dtype, gated.shape = dtype, value.shape
    graph.insert_after(producer, product)
    for node, position in readers:
        node.replace_input_with(position, gated)
    for position, output in enumerate(graph.outputs):
        if output is value:  # The graph gives the heads out: it gives them out gated, under the same name.
            graph.outputs[position] = gated
            value.name, gated.name = f"{value.name}.ungated", value.name


def _dtype(value: ir.Value) -> ir.DataType:
    """Type of a tensor; past operators that ONNX does not know, that of the first float tensor on the way there."""
    queue, seen = [value], {value}
    for one in queue:
        if one.dtype is not None and one.dtype.is_floating_point():
            return one.dtype
        producer = one.producer()
        sources = [source for source in producer.inputs if source is not None] if producer is not None else []
        queue += [source for source in sources if source not in seen]
        seen.update(sources)
    return ir.DataType.FLOAT
