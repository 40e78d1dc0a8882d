"""Pair the feed-forwards of a plan with the products of a graph that read their neurons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from graph_passes.attention.find_groups import FoundGroup
from graph_passes.attention.match_plan import same_path
from graph_passes.attention.products import GraphProduct, find_products
from graph_passes.errors import GraphErrorCode, PlanError, listed
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.plan import NeuronPlan
from graph_passes.weights.match_weights import MatchedWeight


def weight_name(group: NeuronPlan) -> str:
    """Name of the parameter that reads the neurons of a feed-forward."""
    return f"{group.name}.weight"


def match_feed_forwards(
    groups: Sequence[NeuronPlan],
    model: ir.Model,
    matches: Mapping[str, MatchedWeight],
    found: Sequence[FoundGroup] = (),
) -> list[tuple[NeuronPlan, GraphProduct]]:
    """Pair each feed-forward with the products that read its neurons; a module that is called often has several.

    Cases:
        1. A group of the graph has its name and units: the products of the group, if they have its weight.
        2. The values of its weight are known: the products with an initializer of these values.
        3. They are not: the products that sum over as many units, if there is one such product, or if the exporter
           recorded module paths.
        4. Several initializers or modules are left: those whose module path is that of the feed-forward.

    Args:
        groups: the feed-forwards.
        model: the graph.
        matches: name of a parameter -> the initializers that hold it, where its values are known.
        found: the groups of the graph, see `find_groups`.

    Raises:
        PlanError: a feed-forward has no product, or several, or a product belongs to several feed-forwards.
    """
    products = find_products(model, Probe(model)) if groups else []
    pairs: list[tuple[NeuronPlan, GraphProduct]] = []
    owners: dict[ir.Node, str] = {}
    nodes = {(g.name, g.units): frozenset(g.products) for g in found if g.type == "neurons"}
    for group in groups:
        match = matches.get(weight_name(group))
        fitting = [product for product in products if match is None or product.weight in match.initializers]
        named = [product for product in fitting if product.node in nodes.get((group.name, group.units), ())]
        for product in named or _products_of(group, fitting, by_value=match is not None):
            owner = owners.setdefault(product.node, group.name)
            if owner != group.name:
                raise _ambiguous(f"{owner} and {group.name} both match the product {product}", group)
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
            f"feed-forward {group.name}: no product of this graph reads {group.units} neurons with its weight; use the"
            " whole graph of the plan's model",
            code=GraphErrorCode.SITE_MISSING,
            site=group.name,
        )
    if not _is_one(chosen, by_value=by_value, by_name=by_name):
        names = listed(map(str, chosen))
        raise _ambiguous(f"feed-forward {group.name} matches several products of this graph, {names}", group)
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
