"""Find the units that can be removed from a graph: the heads of attentions and the neurons of feed-forwards.

A group is found by trying what `shrink` does: the units are gated where a product with a weight reads them, and axis
flow (`flow.axis_flow`) follows them back. They are a group if no operator prevents their removal and a weight before
them is cut. Neurons are those of feed-forwards whose outputs join a residual sum: what a classifier reads is not
removed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.attention.find import GraphSite, search_attention
from graph_passes.attention.gate_initializers import gated_group
from graph_passes.attention.products import GraphProduct, find_products, weight_of
from graph_passes.attention.site_names import module_path
from graph_passes.attention.tracing import PRODUCTS, is_computed, projection_ahead
from graph_passes.flow.axis_flow import Flow, GraphOrder, bodies_of
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.indices import is_partial
from graph_passes.flow.refusal import Refusal, RefusalCode
from graph_passes.flow.rule import Gain
from graph_passes.flow.rules import RULES
from graph_passes.plan import GroupPlan, GroupType, Kind, NeuronPlan, SitePlan
from graph_passes.tape import producer_of

_SUMS = frozenset("Add Sum SkipLayerNormalization SkipSimplifiedLayerNormalization".split())
"""Operators that add the output of a sublayer to the residual stream."""
_INTEGER_PRODUCTS = frozenset(
    "ConvInteger DynamicQuantizeMatMul MatMulInteger MatMulIntegerToFloat MatMulNBits QAttention QGemm QLinearConv"
    " QLinearMatMul".split()
)
"""Operators whose weights are integers, whose scales axis flow cannot cut."""
_ENDS = (
    PRODUCTS
    | _INTEGER_PRODUCTS
    | frozenset("Attention Conv Einsum GroupQueryAttention MultiHeadAttention Softmax".split())
)
"""Operators after which a tensor is no longer the output of the same sublayer."""
_SIZES = frozenset(("Shape", "Size"))
_CACHE = re.compile(r"past|present|cache", re.IGNORECASE)
"""Parts of the names of inputs and outputs that hold keys and values of earlier positions."""


@dataclasses.dataclass(frozen=True)
class GraphGroup:
    """Units of a graph that `shrink` can remove.

    Attributes:
        name: name of the group in plans, unique in the graph. For neurons it is `linear`, the name of the product that
            reads them. For heads it is that of the attention: the name of its gate, or the module path that the
            exporter recorded at its softmax; an attention that has no such name of its own is named `linear` too.
        type: `heads` or `neurons`.
        units: number of units.
        width: consecutive inputs of the products that belong to one unit.
        products: the nodes that sum over the units; several where a module is called several times.
        position: position of the units' tensor among the inputs of the first product.
        axis: the axis of that tensor that holds `units * width` indices, counted from the last.
        weight: name of the initializer that the first product multiplies the units by; empty if it is computed.
        linear: name of the first product: the module path that the exporter recorded, else that in the name of its
            weight or of its bias, else the name of the node, else `product_<n>`.
        attentions: for heads, the calls of the attention; empty for neurons.
        weights: names of the initializers of all products: an exporter may store the weight once for each call.
    """

    name: str
    type: GroupType
    units: int
    width: int
    products: tuple[ir.Node, ...] = dataclasses.field(repr=False)
    position: int = dataclasses.field(repr=False)
    axis: int = dataclasses.field(repr=False)
    weight: str
    linear: str
    attentions: tuple[GraphSite, ...] = dataclasses.field(default=(), repr=False)
    weights: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @property
    def kind(self) -> Kind | None:
        """Kind of the attention; None for neurons."""
        return self.attentions[0].kind if self.attentions else None

    @property
    def kv_heads(self) -> int | None:
        """Number of key/value heads; None for neurons."""
        return self.attentions[0].kv_heads if self.attentions else None

    @property
    def head_dim(self) -> int | None:
        """Width of one head's value vector; None for neurons."""
        return self.attentions[0].head_dim if self.attentions else None

    def plan(self, kept: Iterable[int], scale: Iterable[float] = ()) -> GroupPlan:
        """The plan of this group that keeps some units.

        Args:
            kept: ids of the units, ascending.
            scale: the gate of each kept unit; by default all ones.

        Raises:
            ValueError: a unit does not exist or is repeated, or there is not one scale for each.
        """
        if not self.attentions:
            return NeuronPlan(self.name, self.units, tuple(kept), tuple(scale))
        site = self.attentions[0]
        return SitePlan(self.name, site.kind, site.heads, site.kv_heads, site.head_dim, tuple(kept), tuple(scale))


@dataclasses.dataclass(frozen=True)
class GraphGroups:
    """What can be removed from a graph.

    Attributes:
        groups: the groups, in the order in which the graph computes their products.
        obstacles: operators that look like an attention or a feed-forward but are no group, with the operator that
            prevents it. `Refusal.sites` has the name that the group would have.
    """

    groups: tuple[GraphGroup, ...]
    obstacles: tuple[Refusal, ...]

    @property
    def outcome(self) -> str:
        """The searched patterns and the first obstacle, for the message about a graph without groups."""
        first, *more = self.obstacles or (None,)
        stop = "the graph has neither" if first is None else f"{first}" + (f" (and {len(more)} more)" if more else "")
        return (
            "Searched for attentions (a Softmax between two matmuls of activations, or one operator that computes all "
            f"of it) and for feed-forwards (two matmuls with weights, the second of which joins a residual sum): {stop}"
        )

    def __getitem__(self, name: str) -> GraphGroup:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)


def search_groups(model: ir.Model) -> GraphGroups:
    """The groups of a graph that `passes.Normalize` has normalized; see `graph_passes.find_groups`."""
    return _Search(model).run()


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Units that may be a group, before it has a name.

    Attributes:
        products: the products that sum over the units.
        width: consecutive inputs of the products that belong to one unit.
        attentions: the calls of the attention; empty for neurons.
    """

    products: tuple[GraphProduct, ...]
    width: int
    attentions: tuple[GraphSite, ...] = ()

    @property
    def type(self) -> GroupType:
        return "heads" if self.attentions else "neurons"


class _Search:
    """One search for groups, whose steps share the shapes of the graph and its products."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.probe = Probe(model)
        self.order = GraphOrder(model.graph)
        self.products = {product.node: product for product in find_products(model, self.probe)}
        self.weights: dict[GraphProduct, ir.Value] = {}
        self.names: dict[GraphProduct, str] = {}
        self.ends = set[ir.Node]()  # what sums over heads
        self.obstacles: list[Refusal] = []

    def run(self) -> GraphGroups:
        sites, unrecognized = search_attention(self.model, self.probe)
        stop = _end_of_shapes(self.model, self.probe)
        if stop is not None:
            self.obstacles.append(stop)
            unrecognized = [refusal for refusal in unrecognized if refusal.code is not RefusalCode.UNKNOWN_SHAPE]
        self.obstacles += [*integer_products(self.model), *_products_in_bodies(self.model), *unrecognized]
        calls = list(self._calls(sites))
        products = sorted(self.products.values(), key=lambda product: self.order.positions[product.node])
        self.weights = _same_weights(products)
        self.names = _names_of_products(products, self.weights)
        heads = list(self._heads(calls))
        taken = {product.node for candidate in heads for product in candidate.products}
        neurons = list(self._neurons([product for product in products if product.node not in taken]))
        self.obstacles += self._other_products()
        candidates = sorted([*heads, *neurons], key=lambda candidate: self.order.positions[candidate.products[0].node])
        return GraphGroups(tuple(self._named(candidates)), tuple(dict.fromkeys(self.obstacles)))

    def _calls(self, sites: Sequence[GraphSite]) -> Iterator[_Candidate]:
        """The attentions whose heads can be removed, with the products that sum over them, each alone."""
        for number, site in enumerate(sites):
            if site.heads == 1 and (product := self._product_of_head(site)) is not None:
                yield _Candidate((product,), product.units, (site,))
                continue
            flow = self._flow_of_heads(site.name or f"attention {number}", [site])
            self.ends |= flow.sums.keys()
            ends = tuple(self._product_of_sum(node, flow, site) for node in flow.sums)
            if not flow.refusals and (not ends or None in ends):
                self.obstacles.append(_no_projection(site, flow))
            elif not self._is_refused(flow):
                products = tuple(end for end in ends if end is not None)
                self.products |= {product.node: product for product in products}
                yield _Candidate(products, products[0].units // site.heads, (site,))

    def _product_of_head(self, site: GraphSite) -> GraphProduct | None:
        """The product that sums over the only head of an attention, or None.

        Without this head no attention is left: its zeros are followed (`RemoveDeadBranches`) instead of indices, so
        that nothing prevents the removal.
        """
        node = projection_ahead(site.output)
        product = None if node is None else self.products.get(node)
        return product if product is not None and product.units == site.head_dim else None

    def _product_of_sum(self, node: ir.Node, flow: Flow, site: GraphSite) -> GraphProduct | None:
        """A node that sums over the heads of an attention, in their order and over nothing else, as a product with a
        weight, also where it is an `Einsum`, or None."""
        summed = next(iter(flow.sums[node].values()))
        in_order = np.repeat(_numbered_gate(site.heads), site.head_dim)
        if len(flow.sums[node]) > 1 or not np.array_equal(summed.factors, in_order):
            return None
        if node in self.products:
            return self.products[node]
        operands = [(position, axis) for position, axis in enumerate(summed.axes) if axis is not None]
        weights = {position: weight_of(node.inputs[position]) for position, _ in operands}
        computed = [(position, axis) for position, axis in operands if weights[position] is None]
        weight = next((weight for weight in weights.values() if weight is not None), None)
        if len(operands) != 2 or len(computed) != 1 or weight is None:
            return None
        position, axis = computed[0]
        rank = len(self.probe.shape(node.inputs[position]) or ())
        return GraphProduct(node, position, axis - rank, len(summed.factors), weight)

    def _heads(self, calls: Sequence[_Candidate]) -> Iterator[_Candidate]:
        """The attentions whose heads can be removed; those that one module computes are one candidate."""
        modules: dict[Hashable, list[_Candidate]] = {}
        for call in calls:
            weights = frozenset(self.weights[product] for product in call.products)
            modules.setdefault((call.attentions[0].heads, call.width, weights), []).append(call)
        for of_module in modules.values():
            products = tuple(dict.fromkeys(product for call in of_module for product in call.products))
            candidate = _Candidate(
                products, of_module[0].width, tuple(site for call in of_module for site in call.attentions)
            )
            if len(of_module) == 1 or not self._is_refused(self._flow_of_heads("attention", candidate.attentions)):
                yield candidate

    def _flow_of_heads(self, name: str, sites: Sequence[GraphSite]) -> Flow:
        """Axis flow with some of the heads gated, at every reader of each tensor of heads."""
        gains: dict[tuple[ir.Node, int], Gain] = {}
        for site in sites:
            factors = np.repeat(_numbered_gate(site.heads), site.head_dim if site.axis == site.rank - 1 else 1)
            axes = tuple(factors if axis == site.axis else None for axis in range(site.rank))
            gains |= dict.fromkeys(site.output.uses(), Gain(axes, frozenset((name,))))
        flow = Flow(self.model, {}, RULES, self.probe, gains, self.order)
        for site in sites:
            if site.output.is_graph_output():
                why = "returns heads; export the graph without this output"
                output = site.output.name or ""
                sites_ = frozenset((name,))
                flow.refusals.append(Refusal(sites_, "graph output", output, why, RefusalCode.GRAPH_OUTPUT, output))
        return flow

    def _neurons(self, products: Sequence[GraphProduct]) -> Iterator[_Candidate]:
        """The products whose inputs can be removed one by one; those that one module computes are one candidate."""
        calls: dict[Hashable, list[GraphProduct]] = {}
        for product in products:
            is_fixed = self.probe.fixed(product.node.inputs[product.position], product.axis)
            following = self.order.nodes[self.order.positions[product.node] + 1 :]
            if product.units > 1 and is_fixed and _joins_residual_sum(product.node, following):
                calls.setdefault((self.weights[product], product.units), []).append(product)
        for group in calls.values():
            gains = {}
            for product in group:
                rank = len(self.probe.shape(product.node.inputs[product.position]) or ())
                axes = tuple(_gate(product.units) if axis - rank == product.axis else None for axis in range(rank))
                gains[product.node, product.position] = Gain(axes, frozenset((self.names[group[0]],)))
            flow = Flow(self.model, {}, RULES, self.probe, gains, self.order)
            if flow.shared and not flow.refusals:
                self.obstacles += flow.shared[:1] if _follows_product(group[0]) else []
            elif not self._is_refused(flow) and self._cuts_weight(flow):
                yield _Candidate(tuple(group), 1)

    def _other_products(self) -> Iterator[Refusal]:
        """The obstacles of products with weights of other forms whose outputs join a residual sum."""
        for node in self.order.nodes:
            operands = node.inputs[:2]
            if node in self.products or node in self.ends or node.op_type not in PRODUCTS | {"Einsum"}:
                continue
            shapes = [self.probe.shape(value) or () for value in operands]
            weights = [shape for value, shape in zip(operands, shapes, strict=True) if not is_computed(value)]
            are_tokens = all(1 < len(shape) < 4 for shape in shapes)  # scores have heads, too
            following = itertools.islice(self.order.nodes, self.order.positions[node] + 1, None)
            if len(weights) == 1 and are_tokens and _joins_residual_sum(node, following):
                why = "is no matmul with a weight of two axes; neurons are found only before those"
                name = frozenset((module_path(node) or node.name or node.op_type,))
                yield Refusal(name, node.op_type, node.name or "", why, RefusalCode.UNSUPPORTED_FORM)

    def _is_refused(self, flow: Flow) -> bool:
        """Whether an operator prevents the removal, which is noted."""
        if flow.refusals:
            self.obstacles.append(_explained(flow.refusals[0]))
        return bool(flow.refusals)

    def _cuts_weight(self, flow: Flow) -> bool:
        """Whether a product before the units computes fewer of them, so that its weight is cut."""
        return any(
            node.op_type in _ENDS and node not in flow.sums and is_partial(need) and not is_computed(value)
            for node, demand in flow.demands.items()
            for value, need in zip(node.inputs, demand.inputs, strict=False)
            if value is not None and len(self.probe.shape(value) or ()) > 1
        )

    def _named(self, candidates: Sequence[_Candidate]) -> Iterator[GraphGroup]:
        sites = [candidate.attentions[0].name if candidate.attentions else None for candidate in candidates]
        linears = [self.names[candidate.products[0]] for candidate in candidates]
        for candidate, site, linear in zip(candidates, sites, linears, strict=True):
            is_unique = site is not None and sites.count(site) == 1 and site not in self.names.values()
            name = site if site is not None and (is_unique or site == linear) else linear
            first = candidate.products[0]
            yield GraphGroup(
                name=name,
                type=candidate.type,
                units=first.units // candidate.width,
                width=candidate.width,
                products=tuple(product.node for product in candidate.products),
                position=first.position,
                axis=first.axis,
                weight=first.weight.name or "",
                linear=linear,
                attentions=candidate.attentions,
                weights=tuple(dict.fromkeys(product.weight.name or "" for product in candidate.products)),
            )


def _gate(units: int) -> np.ndarray:
    """A gate that drops about half of the units, in no regular order, and at least one."""
    factors = np.random.default_rng(units).permutation(units) >= max(1, units // 2)
    return factors.astype(np.float64)


def _numbered_gate(units: int) -> np.ndarray:
    """The factors of `_gate`, of which those that are not zero say which unit they belong to."""
    return _gate(units) * np.arange(1, units + 1)


def _joins_residual_sum(node: ir.Node, following: Iterable[ir.Node]) -> bool:
    """Whether the output of a node is added to a tensor that is not computed from it; `following` it in the graph."""
    reached = {*node.outputs}
    for reader in following:
        if reached.isdisjoint(reader.inputs) or reader.op_type in _SIZES:
            continue
        if _adds(reader, reached):
            return True
        if reader.op_type not in _ENDS:
            reached.update(reader.outputs)
    return False


def _follows_product(product: GraphProduct) -> bool:
    """Whether the input of a product is computed from another product of its sublayer, e.g. through a norm."""
    stack, visited = [product.node.inputs[product.position]], set[ir.Value]()
    while stack:
        value = stack.pop()
        node = producer_of(value)
        if value is None or node is None or value in visited or not is_computed(value):
            continue
        visited.add(value)
        if node.op_type in _ENDS:
            return True
        if node.op_type not in _SUMS or sum(map(is_computed, node.inputs)) == 1:
            stack.extend(node.inputs)
    return False


def _adds(node: ir.Node, reached: set[ir.Value]) -> bool:
    """Whether a node that reads one of the tensors reached adds a computed tensor to it."""
    if node.op_type not in _SUMS:
        return False
    operands = node.inputs[:2] if node.op_type.startswith("Skip") else node.inputs
    return any(is_computed(operand) and operand not in reached for operand in operands)


def _same_weights(products: Sequence[GraphProduct]) -> dict[GraphProduct, ir.Value]:
    """Product -> the initializer that represents its weight.

    An exporter may store the weight of a module once for each call; calls of one module have one path.
    """
    by_path: dict[Hashable, list[ir.Value]] = {}
    weights: dict[GraphProduct, ir.Value] = {}
    for product in products:
        path = module_path(product.node)
        tensor = product.weight.const_value
        assert tensor is not None
        known = by_path.setdefault((path, tuple(tensor.shape.numpy())), [])
        same = (weight for weight in known if weight is product.weight or (path and are_equal(weight, product.weight)))
        weights[product] = next(same, product.weight)
        if weights[product] is product.weight:
            known.append(product.weight)
    return weights


def are_equal(first: ir.Value | None, second: ir.Value | None) -> bool:
    """Whether two initializers hold the same numbers, of which an exporter may store copies; or there are none."""
    if first is second or first is None or second is None:
        return first is second
    a, b = first.const_value, second.const_value
    return a is not None and b is not None and np.array_equal(a.numpy(), b.numpy())


def _names_of_products(
    products: Sequence[GraphProduct], weights: Mapping[GraphProduct, ir.Value]
) -> dict[GraphProduct, str]:
    """Product -> its name, which calls of one module share and no other product has."""
    calls: dict[ir.Value, list[GraphProduct]] = {}
    for product in products:
        calls.setdefault(weights[product], []).append(product)
    first = {weight: of_weight[0] for weight, of_weight in calls.items()}
    sources: tuple[Callable[[GraphProduct], str | None], ...] = (
        lambda product: _gate_before(product),
        lambda product: module_path(product.node),
        lambda product: _path_of_parameter(product.weight.name or ""),
        lambda product: _path_of_parameter(_bias_after(product.node)),
        lambda product: product.node.name,
    )
    names: dict[ir.Value, str] = {}
    for source in sources:
        proposed = {weight: source(product) for weight, product in first.items() if weight not in names}
        counts = [*proposed.values(), *names.values()]
        names |= {weight: name for weight, name in proposed.items() if name and counts.count(name) == 1}
    for weight, number in zip(first, itertools.count()):
        names.setdefault(weight, f"product_{number}")
    return {product: names[weights[product]] for product in products}


def _gate_before(product: GraphProduct) -> str | None:
    """The group whose gate multiplies the input of a product."""
    node = producer_of(product.node.inputs[product.position])
    gates = map(gated_group, node.inputs) if node is not None and node.op_type == "Mul" else iter(())
    return next((group for group in gates if group is not None), None)


def _path_of_parameter(name: str) -> str | None:
    """The module of a parameter, e.g. `encoder.fc1` of `encoder.fc1.weight`; None: the name is no path."""
    path = re.sub(r"(\.(weight|bias))?(_quantized)?$", "", name)
    return path if path != name and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", path) is not None else None


def _bias_after(node: ir.Node) -> str:
    """Name of the initializer that is added to the output of a product; empty if there is none."""
    added = list(node.inputs[2:3]) if node.op_type == "Gemm" else []
    for reader, _ in node.outputs[0].uses():
        added += reader.inputs if reader.op_type == "Add" else reader.inputs[4:5] if reader.op_type in _SUMS else ()
    return next((value.name or "" for value in added if value is not None and value.is_initializer()), "")


def _no_projection(site: GraphSite, flow: Flow) -> Refusal:
    """The obstacle of an attention whose heads no product with a weight sums over."""
    node = next((node for node in (*flow.sums, *flow.blocked)), site.output.producer())
    name = frozenset((site.name or site.projection or site.output.name or "",))
    why = "reads heads without a weight of two axes that sums over them in their order, and over nothing else"
    return Refusal(name, node.op_type if node else "", (node.name or "") if node else "", why, RefusalCode.NO_RULE)


def _explained(refusal: Refusal) -> Refusal:
    """A refusal; keys and values of earlier positions are named as such."""
    if refusal.op in ("graph input", "graph output") and _CACHE.search(refusal.node):
        what = "holds" if refusal.op == "graph input" else "returns"
        why = f"{what} keys and values of earlier positions; export the graph without them (use_cache=False)"
        return dataclasses.replace(refusal, why=why, code=RefusalCode.CACHE)
    return refusal


def integer_products(model: ir.Model) -> Iterator[Refusal]:
    """The obstacle of a graph whose products are of integers, at the first of them."""
    nodes = (node for node in model.graph if node.op_type in _INTEGER_PRODUCTS)
    for node in itertools.islice(nodes, 1):
        why = "has weights of integers, from which no unit can be removed; prune the float graph, then quantize it"
        name = module_path(node) or node.name or node.op_type
        yield Refusal(frozenset((name,)), node.op_type, node.name or "", why, RefusalCode.QUANTIZED)


def _products_in_bodies(model: ir.Model) -> Iterator[Refusal]:
    """The obstacles of products that are in the branches of a node, of which a runtime takes one."""
    for node in model.graph:
        bodies = [body for attribute in node.attributes.values() for body in bodies_of(attribute)]
        if any(inner.op_type in PRODUCTS for body in bodies for inner in body.all_nodes()):
            name = frozenset((node.name or node.op_type,))
            why = "has matmuls in its branches, which are not searched for units; export the graph without branches"
            yield Refusal(name, node.op_type, node.name or "", why, RefusalCode.NO_RULE)


def _end_of_shapes(model: ir.Model, probe: Probe) -> Refusal | None:
    """The obstacle of the first node whose outputs have no known shape although its inputs have."""
    products = [node for node in model.graph if node.op_type in _ENDS - _INTEGER_PRODUCTS]
    if all(probe.shape(node.inputs[0]) is not None for node in products):
        return None
    for node in model.graph:
        inputs_known = all(value is None or probe.shape(value) is not None for value in node.inputs)
        unknown = [value for value in node.outputs if value.uses() and probe.shape(value) is None]
        if inputs_known and unknown and node.op_type not in _INTEGER_PRODUCTS:
            why = "has outputs of unknown shape, after which no units are found"
            name = frozenset((unknown[0].name or "",))
            return Refusal(name, node.op_type, node.name or "", why, RefusalCode.UNKNOWN_SHAPE, unknown[0].name or "")
    return None
