"""Pair the groups of a plan with the attentions and products of a graph that has no gates yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from graph_passes.attention.find import GraphSite
from graph_passes.attention.find_groups import GraphGroup
from graph_passes.attention.products import GraphProduct, find_products
from graph_passes.errors import GraphErrorCode, PlanError, listed
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.plan import NeuronPlan, Plan, SitePlan
from graph_passes.weights import MatchedWeight

Pair = tuple[SitePlan, GraphSite]

_RENAME = "use a plan of the exported model, or name its sites as the graph does (compress sites GRAPH)"
_EXPORT = "use a plan of this model, and a graph of compressor.export_reference, which names its sites"


def match_plan(plan: Plan, attentions: list[GraphSite]) -> list[Pair]:
    """Pair each site of a plan with the attentions of a graph that belong to it.

    Cases:
        1. The exporter recorded module paths: the path of each site is the scope of one attention, or of the product
           that mixes its heads, up to prefixes of wrappers. A module that the model calls several times is one site
           with several attentions of one name.
        2. It recorded none: the graph has as many attentions as the plan has sites, in the same order.

    Raises:
        PlanError: neither case applies, the numbers of heads or their widths differ, or the heads are removed already.
    """
    kept = [len(site.kept) for site in plan.sites if site.kept]
    if plan.heads_kept < plan.heads and [attention.heads for attention in attentions] == kept:
        raise PlanError(
            "the graph seems to be shrunk already: its attentions have as many heads as the plan keeps; use the graph"
            " that has every head",
            code=GraphErrorCode.ALREADY_SHRUNK,
            heads=kept,
        )
    by_name = [(site, [attention for attention in attentions if _is_of(attention, site)]) for site in plan.sites]
    has_names = any(matches for _, matches in by_name)
    pairs = _match_by_name(by_name, attentions) if has_names else _match_in_order(plan, attentions)
    for site, attention in pairs:
        if (site.heads, site.head_dim) != (attention.heads, attention.head_dim):
            raise PlanError(
                f"site {site.name}: the plan has {site.heads} heads of width {site.head_dim}, the graph"
                f" {attention.heads} of width {attention.head_dim} ({attention.name or 'nameless'}); use a plan of this"
                " model",
                code=GraphErrorCode.SITE_MISMATCH,
                site=site.name,
                attention=attention.name,
                heads=attention.heads,
                head_dim=attention.head_dim,
            )
    return pairs


def _is_of(attention: GraphSite, site: SitePlan) -> bool:
    """Whether a site is named after an attention, or after the projection that reads its heads."""
    return same_path(site.name, attention.name) or same_path(site.name, attention.projection)


def _match_by_name(by_name: list[tuple[SitePlan, list[GraphSite]]], attentions: list[GraphSite]) -> list[Pair]:
    """Case 1."""
    _require_all_matched(by_name, attentions)
    for site, matches in by_name:
        if len({attention.name for attention in matches}) > 1:
            raise PlanError(
                f"site {site.name} matches several attentions of this graph, {_names(matches)}; {_EXPORT}",
                code=GraphErrorCode.SITE_AMBIGUOUS,
                site=site.name,
                attentions=[attention.name for attention in matches],
            )
    for attention in attentions:
        sites = [site.name for site, matches in by_name if attention in matches]
        if len(sites) > 1:
            raise PlanError(
                f"the graph's attention {attention.name} matches several sites of the plan, {listed(sites)}; use a plan"
                " of this model",
                code=GraphErrorCode.SITE_AMBIGUOUS,
                attention=attention.name,
                sites=sites,
            )
    return [(site, attention) for site, matches in by_name for attention in matches]


def _require_all_matched(by_name: list[tuple[SitePlan, list[GraphSite]]], attentions: list[GraphSite]) -> None:
    matched = [attention for _, matches in by_name for attention in matches]
    missing = [site.name for site, matches in by_name if not matches]
    unlisted = [attention for attention in attentions if attention not in matched]
    if not missing and not unlisted:
        return
    if missing and unlisted:
        problem = (
            f"no attention of the graph matches {listed(missing)} of the plan, and no site of the plan matches"
            f" {_names(unlisted)} of the graph"
        )
    elif missing:
        problem = f"no attention of the graph ({_names(attentions)}) matches {listed(missing)} of the plan"
    else:
        problem = (
            f"no site of the plan ({listed(site.name for site, _ in by_name)}) matches {_names(unlisted)} of the graph"
        )
    remedy = _RENAME if missing else "list every attention in the plan, with all of its heads where none is dropped"
    raise PlanError(
        f"{problem}; {remedy}",
        code=GraphErrorCode.SITE_MISSING,
        sites=missing,
        attentions=[attention.name for attention in unlisted],
    )


def _match_in_order(plan: Plan, attentions: list[GraphSite]) -> list[Pair]:
    """Case 2."""
    if len(attentions) != len(plan.sites):
        has_names = any(attention.name for attention in attentions)
        names = f"under other names ({_names(attentions)})" if has_names else "without names"
        raise PlanError(
            f"the plan has {len(plan.sites)} sites ({listed(site.name for site in plan.sites)}) and the graph"
            f" {len(attentions)} recognized attentions, {names}; {_RENAME if has_names else _EXPORT}",
            code=GraphErrorCode.SITE_MISMATCH,
            sites=len(plan.sites),
            attentions=len(attentions),
        )
    pairs = list(zip(plan.sites, attentions, strict=True))
    for site, attention in pairs:
        if (site.kind == "cross") != (attention.kind == "cross"):
            raise PlanError(
                f"site {site.name}: {site.kind} attention in the plan, but the graph's attention at the same position"
                f" ({attention.name or 'nameless'}) is {attention.kind}; {_EXPORT}",
                code=GraphErrorCode.SITE_MISMATCH,
                site=site.name,
                kind=attention.kind,
            )
    return pairs


def same_path(name: str, scope: str | None) -> bool:
    """Whether a node's scope lies in a group's module, up to a prefix that one of the two has and the other lacks."""
    if scope is None:
        return False
    path, scope_path = name.split("."), scope.split(".")
    starts = range(max(len(path), len(scope_path)))
    inside = any(scope_path[start : start + len(path)] == path for start in starts)
    return inside or any(path[start:] == scope_path for start in starts if path[start:])


def _names(attentions: list[GraphSite]) -> str:
    return listed(attention.name or "a nameless one" for attention in attentions)


def weight_name(group: NeuronPlan) -> str:
    """Name of the parameter that reads the neurons of a feed-forward."""
    return f"{group.name}.weight"


def match_feed_forwards(
    groups: Sequence[NeuronPlan],
    model: ir.Model,
    matches: Mapping[str, MatchedWeight],
    graph_groups: Sequence[GraphGroup] = (),
) -> list[tuple[NeuronPlan, GraphProduct]]:
    """Pair each feed-forward with the products that read its neurons; a module that is called often has several.

    Cases:
        1. A group of the graph has its name and units: the products of the group, if they have its weight.
        2. The values of its weight are known: the products with an initializer of these values.
        3. They are not: the products that sum over as many units, if there is one such product, or if the exporter
           recorded module paths.
        4. Several initializers or modules are left: those whose module path is that of the feed-forward.

    Args:
        matches: name of a parameter -> the initializers that hold it, where its values are known.
        graph_groups: the groups of the graph, see `find_groups`.

    Raises:
        PlanError: a feed-forward has no product, or several, or a product belongs to several feed-forwards.
    """
    products = find_products(model, Probe(model)) if groups else []
    pairs: list[tuple[NeuronPlan, GraphProduct]] = []
    owners: dict[ir.Node, str] = {}
    nodes = {(g.name, g.units): frozenset(g.products) for g in graph_groups if g.type == "neurons"}
    for group in groups:
        match = matches.get(weight_name(group))
        fitting = [product for product in products if match is None or product.weight in match.initializers]
        named = [product for product in fitting if product.node in nodes.get((group.name, group.units), ())]
        for product in named or _products_of(group, fitting, by_value=match is not None):
            owner = owners.setdefault(product.node, group.name)
            if owner != group.name:
                raise _ambiguous(f"{owner} and {group.name} both match the matmul {product}", group)
            pairs.append((group, product))
    return pairs


def _products_of(group: NeuronPlan, products: Iterable[GraphProduct], *, by_value: bool) -> list[GraphProduct]:
    """The products of one feed-forward among some, which were selected by the values of its weight if `by_value`."""
    fitting = [product for product in products if product.units == group.units]
    named = [product for product in fitting if same_path(group.name, product.path)]
    if by_value:
        by_name = bool(named) and not _is_one(fitting, by_value=True)
    else:
        by_name = any(product.path for product in fitting)
    chosen = named if by_name else fitting
    if not chosen:
        raise PlanError(
            f"feed-forward {group.name}: no matmul of this graph reads {group.units} neurons with its weight; use the "
            f"whole graph of the plan's model",
            code=GraphErrorCode.SITE_MISSING,
            site=group.name,
        )
    if not _is_one(chosen, by_value=by_value, by_name=by_name):
        names = listed(map(str, chosen))
        raise _ambiguous(f"feed-forward {group.name} matches several matmuls of this graph, {names}", group)
    return chosen


def _is_one(products: Sequence[GraphProduct], *, by_value: bool, by_name: bool = False) -> bool:
    """Whether products, selected by the values of their weight or by their path, are certainly calls of one module."""
    if len({product.path for product in products}) != 1:
        return False
    # An exporter may store the weight of a module once for each call.
    has_one_weight = len({product.weight for product in products}) == 1
    return (by_value and by_name) or (has_one_weight and (by_value or by_name or len(products) == 1))


def _ambiguous(problem: str, group: NeuronPlan) -> PlanError:
    return PlanError(
        f"{problem}; export the graph with the names of its modules, or keep every neuron of {group.name} in the plan",
        code=GraphErrorCode.SITE_AMBIGUOUS,
        site=group.name,
    )
