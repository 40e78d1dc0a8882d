"""Pair the feed-forwards of a plan with the products of a graph that read their neurons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from graph_passes.attention.match_plan import same_path
from graph_passes.attention.site_names import module_path
from graph_passes.attention.tracing import KEEPS_ELEMENTS, PRODUCTS, is_computed
from graph_passes.errors import GraphErrorCode, PlanError, listed
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.plan import NeuronPlan
from graph_passes.weights.match_weights import MatchedWeight


@dataclasses.dataclass(frozen=True)
class GraphProduct:
    """A product of an activation with a weight of two axes.

    Attributes:
        node: the product.
        position: position of the activation among its inputs.
        axis: the axis of the activation that is summed over, counted from the last.
        units: size of that axis.
        weight: the initializer of the weight.
    """

    node: ir.Node
    position: int
    axis: int
    units: int
    weight: ir.Value

    @property
    def path(self) -> str | None:
        """Path of the module that the product was exported from, by its scope or the name of its weight, or None."""
        return module_path(self.node) or (self.weight.name or "").rpartition(".")[0] or None

    def __str__(self) -> str:
        return self.node.name or self.weight.name or "a nameless one"


def weight_name(group: NeuronPlan) -> str:
    """Name of the parameter that reads the neurons of a feed-forward."""
    return f"{group.name}.weight"


def match_feed_forwards(
    groups: Sequence[NeuronPlan], model: ir.Model, matches: Mapping[str, MatchedWeight]
) -> list[tuple[NeuronPlan, GraphProduct]]:
    """Pair each feed-forward with the products that read its neurons; a module that is called often has several.

    Cases:
        1. The values of its weight are known: the products with an initializer of these values.
        2. They are not: the products that sum over as many units, if there is one such product, or if the exporter
           recorded module paths.
        3. Several initializers or modules are left: those whose module path is that of the feed-forward.

    Args:
        groups: the feed-forwards.
        model: the graph.
        matches: name of a parameter -> the initializers that hold it, where its values are known.

    Raises:
        PlanError: a feed-forward has no product, or several, or a product belongs to several feed-forwards.
    """
    products = list(_products(model)) if groups else []
    pairs: list[tuple[NeuronPlan, GraphProduct]] = []
    owners: dict[ir.Node, str] = {}
    for group in groups:
        for product in _products_of(group, products, matches.get(weight_name(group))):
            owner = owners.setdefault(product.node, group.name)
            if owner != group.name:
                raise _ambiguous(f"{owner} and {group.name} both match the product {product}", group)
            pairs.append((group, product))
    return pairs


def _products(model: ir.Model) -> Iterator[GraphProduct]:
    """The products of activations with weights of two axes."""
    probe = Probe(model)
    for node in model.graph:
        if node.op_type not in PRODUCTS or any(node.attributes.get_int(f"transBatch{side}", 0) for side in "AB"):
            continue
        for position in range(2):
            weight, activation = _weight(node.inputs[1 - position]), node.inputs[position]
            shape = probe.shape(activation)
            if weight is None or shape is None or len(shape) < 2 or not is_computed(activation):
                continue
            transposed = bool(node.attributes.get_int("transB" if position else "transA", 0))
            axis = -1 if transposed == bool(position) else -2
            yield GraphProduct(node, position, axis, shape[axis], weight)


def _weight(value: ir.Value | None) -> ir.Value | None:
    """The initializer of two axes that an operand holds, as it is, converted or transposed."""
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.op_type not in KEEPS_ELEMENTS:
            return None
        value = node.inputs[0]
    if value is None or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    return value


def _products_of(
    group: NeuronPlan, products: Iterable[GraphProduct], match: MatchedWeight | None
) -> list[GraphProduct]:
    """The products of one feed-forward."""
    fitting = [product for product in products if product.units == group.units]
    if match is not None:
        fitting = [product for product in fitting if product.weight in match.initializers]
    named = [product for product in fitting if same_path(group.name, product.path)]
    by_value = match is not None
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
    """Whether products are certainly calls of one module.

    Args:
        products: the products.
        by_value: whether they were selected by the values of their weight.
        by_name: whether they were selected by their module path.
    """
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
