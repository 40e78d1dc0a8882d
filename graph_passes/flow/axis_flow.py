"""Find the indices of each axis of each tensor that belong to the units that a plan drops.

A unit is a head or a neuron. Dropping one is dead-code elimination, index by index instead of node by node. A gate of
zero makes some indices of an axis zero. Where such an axis is summed over (the output projection), those indices
contribute nothing, so they are not needed any more. From there the analysis walks back: the rule of each operator
returns the indices of its inputs that its outputs need, until initializers are reached. No code is specific to an
architecture: the same walk covers biases, fused projections, grouped heads, relative-position tables and rotary
embeddings.

A `Flow` walks over the graph twice:

1. forward, *gains*: the factor by which each index of an axis is multiplied, from the gates to the sums;
2. backward, *needs*: the indices of an axis that are needed, from the sums to the initializers.

An operator without a rule, or one that mixes the indices of an axis that units occupy, ends the walk with a `Refusal`
of the affected groups: a unit is never dropped in part. The exception are norms over the queries or keys of all heads:
their inputs stay whole, their outputs are cut, and `shared` names them.

A cache is an output that the next call of the graph reads as an input (`caches`). The same indices are needed of both,
so the second walk is repeated until they agree.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.flow.caches import cache_writers, read_caches
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.cut import Cuts, can_cut
from graph_passes.flow.indices import Index, Need, all_indices, is_partial, same_index, simplify, union
from graph_passes.flow.refusal import Refusal, RefusalCode
from graph_passes.flow.rule import Demand, Gain, NoRuleError, Rule
from graph_passes.flow.sizes import BATCH

_logger = logging.getLogger(__name__)


class _Use(NamedTuple):
    """One use of a tensor.

    Attributes:
        node: the node that reads it; None: the graph returns it.
        position: position of the tensor among the node's inputs.
        need: the indices that the node needs.
        sites: names of the sites because of which some indices are not needed.
    """

    node: ir.Node | None
    position: int
    need: Need
    sites: frozenset[str]


class GraphOrder:
    """The nodes of a graph in their order, and the tensors that bodies read: what several flows of a graph share.

    Attributes:
        nodes: its nodes.
        positions: position of each node.
        captures: see `captured_by_bodies`.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes = list(graph)
        self.positions = {node: position for position, node in enumerate(self.nodes)}
        self.captures = captured_by_bodies(graph)


class _Queue:
    """Nodes of a graph that are visited in its order or in reverse, each once, while visits add nodes further on."""

    def __init__(self, order: GraphOrder, nodes: Iterable[ir.Node], *, reverse: bool = False) -> None:
        self._order, self._sign = order, -1 if reverse else 1
        self._heap: list[int] = []
        self._added = set[ir.Node]()
        self.add(nodes)

    def add(self, nodes: Iterable[ir.Node]) -> None:
        """Add nodes, without those that were added before and those in bodies."""
        for node in nodes:
            if node in self._order.positions and node not in self._added:
                self._added.add(node)
                heapq.heappush(self._heap, self._sign * self._order.positions[node])

    def __iter__(self) -> Iterator[ir.Node]:
        while self._heap:
            yield self._order.nodes[self._sign * heapq.heappop(self._heap)]


class Flow(Cuts):
    """Gains and needs of one graph whose gates have the given values.

    Args:
        model: the graph, which is not changed.
        gates: gate initializer -> (name of its site, values in the initializer's shape).
        rules: (domain, operator type) -> rule.
        gated_inputs: inputs of nodes, as (node, position), that are read as if a gate multiplied them -> their gain.
        order: the order of the graph; None: it is computed.
        returned: name of an output -> the indices that the graph which reads it as a cache needs.

    Attributes:
        gains: the gain of each tensor that gates multiply.
        blocked: nodes at which a gain ends without being summed over, and the sites concerned.
        refusals: why sites cannot be shrunk, in the order in which the walks meet the obstacles.
        shared: norms that read dropped units of sites that are shrunk.
    """

    def __init__(
        self,
        model: ir.Model,
        gates: Mapping[ir.Value, tuple[str, np.ndarray]],
        rules: Mapping[tuple[str, str], Rule],
        probe: Probe,
        gated_inputs: Mapping[tuple[ir.Node, int], Gain] | None = None,
        order: GraphOrder | None = None,
        returned: Mapping[str, Need] | None = None,
    ) -> None:
        super().__init__(probe, rules)
        self.graph = model.graph
        self._gated_inputs = gated_inputs or {}
        self.gains: dict[ir.Value, Gain] = {}
        self.blocked: dict[ir.Node, frozenset[str]] = {}
        self.refusals: list[Refusal] = []
        self.shared: list[Refusal] = []
        self._sites: dict[ir.Value, frozenset[str]] = {}
        self._answers: dict[ir.Node, tuple[Demand, frozenset[str]]] = {}
        self._order = order or GraphOrder(model.graph)
        self._captures = self._order.captures
        self._caches = read_caches(model)
        self._pasts = {present: past for past, present in self._caches.items() if present is not None}
        self._cached: dict[ir.Value, tuple[Need, frozenset[str]] | None] = dict.fromkeys(self._pasts)
        self._returned = {
            value: (need, frozenset((value.name or "",)))
            for value in self.graph.outputs
            if is_partial(need := (returned or {}).get(value.name or "", ()))
        }
        self._cached.update(self._returned)
        for value, (site, content) in gates.items():
            axes = tuple(content.reshape(-1).astype(np.float64) if size > 1 else None for size in content.shape)
            if sum(axis is not None for axis in axes) == 1:
                self.gains[value] = Gain(axes, frozenset((site,)))
        self._forward()
        self._walk_back()

    def _forward(self) -> None:
        queue = _Queue(self._order, (node for node, _ in self._gated_inputs))
        for value in self.gains:
            queue.add(node for node, _ in value.uses())
        for node in queue:
            gains = [
                self._gated_inputs.get((node, position)) or (self.gains.get(value) if value is not None else None)
                for position, value in enumerate(node.inputs)
            ]
            sites = frozenset().union(*(gain.sites for gain in gains if gain is not None))
            rule = self.rule(node)
            try:
                if rule is None:
                    raise NoRuleError(RefusalCode.NO_RULE, "has no pruning rule")
                outputs = rule.gain(node, gains, self)
            except NoRuleError as error:
                self.blocked[node] = sites
                if any(gain is not None and _drops(gain) for gain in gains):
                    self._refuse_node(sites, node, error.code, f"{error.why}, and gated units reach it")
                continue
            for value, gain in zip(node.outputs, outputs, strict=False):
                if gain is None:
                    continue
                self.gains[value] = gain
                queue.add(reader for reader, _ in value.uses())
                if value in self._captures:  # a body reads it, and sums over nothing that this walk sees
                    reader = self._captures[value]
                    self.blocked[reader] = self.blocked.get(reader, frozenset()) | gain.sites
                if value.is_graph_output():
                    self.blocked[node] = sites
                    if _drops(gain):
                        why = "returns gated units; export the graph without this output"
                        self._refuse_value(sites, RefusalCode.GRAPH_OUTPUT, "graph output", value, why)

    def _walk_back(self) -> None:
        """Walk back until each cache's output has what its input needs: at first, the output needs nothing."""
        refusals = list(self.refusals)
        self.unread = self._cached.keys() - self._returned.keys()
        self._followers = cache_writers(self._order.nodes, self.unread, self._captures)
        while True:
            self._backward()
            cached = {
                present: (self.held(past), self._sites.get(past, frozenset())) for present, past in self._pasts.items()
            }
            if not self.needs or all(_same_need(need, self._cached[value]) for value, (need, _) in cached.items()):
                return
            self._cached.update(cached)
            self._followers, self.unread = frozenset(), frozenset()
            self.refusals = list(refusals)
            for state in (self.needs, self.demands, self.shared, self._sites, self._answers):
                state.clear()

    def _backward(self) -> None:
        """Visit the nodes before which something is not needed; all of the others need everything."""
        partial: set[ir.Value] = {
            present for present, cached in self._cached.items() if cached is not None and is_partial(cached[0])
        }
        queue = _Queue(self._order, self.sums, reverse=True)
        queue.add(node for node in (present.producer() for present in partial) if node is not None)
        for node in queue:
            demand, sites = self._answer(node, [self._total_need(value, partial) for value in node.outputs])
            for source, need in zip(node.inputs, demand.inputs, strict=False):
                if source is not None and sites and is_partial(need):
                    partial.add(source)
                    producer = source.producer()
                    queue.add(() if producer is None else (producer,))
        for value in self.graph.inputs:
            self._total_need(value, partial)
            if value in self.needs and value not in self._caches:
                why = "carries units that the plan drops; export the graph without this input"
                self._refuse_value(self._sites[value], RefusalCode.GRAPH_INPUT, "graph input", value, why)

    def _answer(self, node: ir.Node, outputs: list[Need]) -> tuple[Demand, frozenset[str]]:
        """What a node needs of its inputs, see `_demand`, computed once."""
        if node not in self._answers:
            sites = frozenset().union(*(self._sites.get(value, frozenset()) for value in node.outputs))
            self._answers[node] = self._demand(node, outputs, sites)
        return self._answers[node]

    def _uses(self, value: ir.Value) -> list[_Use]:
        """The uses of a tensor, the last one first.

        Readers that were not visited yet need everything that they need for all of their outputs.
        """
        uses = [_Use(None, 0, self.full_need(value), frozenset()) for output in self.graph.outputs if output is value]
        if value in self._cached:
            cached = self._cached[value]
            uses = [] if cached is None else [_Use(None, 0, *cached)]
        readers = [
            (node, position)
            for node, position in value.uses()
            if node in self._order.positions and node not in self._followers
        ]
        for node, position in sorted(readers, key=lambda use: (-self._order.positions[use[0]], use[1])):
            demand, sites = self._answer(node, [self.full_need(output) for output in node.outputs])
            need = demand.inputs[position] if position < len(demand.inputs) else None
            if need is not None:
                uses.append(_Use(node, position, need, sites))
        return uses

    def _demand(self, node: ir.Node, outputs: list[Need], sites: frozenset[str]) -> tuple[Demand, frozenset[str]]:
        """What a node needs of its inputs, and the names of the sites because of which that may not be everything."""
        rule = self.rule(node)
        sums = self.sums.get(node, {}).values()
        sites |= frozenset().union(*(gain.sites for gain in sums if not gain.factors.all()))
        if rule is not None:
            try:
                for value in node.outputs:
                    if value.uses() or value.is_graph_output():
                        self.shape(value)
                demand = rule.demand(node, outputs, self)
            except NoRuleError as error:
                if sites and error.code is RefusalCode.MIXES_HEADS and rule.is_norm:
                    self.shared.append(Refusal(sites, node.op_type, node.name or "", error.why, error.code))
                    for value in node.outputs:
                        self.hold(value, self.full_need(value))
                elif sites:
                    why = f"{error.why}, and units that the plan drops reach it"
                    self._refuse_node(sites, node, error.code, why)
            else:
                self.demands[node] = demand
                for value, need in zip(node.outputs, demand.outputs, strict=False):
                    self.hold(value, need)
                return demand, sites
        elif sites:
            why = "has no pruning rule, and units that the plan drops reach it"
            self._refuse_node(sites, node, RefusalCode.NO_RULE, why)
        inputs = tuple(self.full_need(value) if value is not None else None for value in node.inputs)
        return Demand(inputs, tuple(outputs)), frozenset()

    def _total_need(self, value: ir.Value, partial: Collection[ir.Value]) -> Need:
        """The need of a tensor over all of its uses; of `partial` tensors, some node needs less than everything."""
        shape = self.probe.shape(value) or ()
        if value not in partial:
            return all_indices(len(shape))
        uses = self._uses(value)
        if value in self._captures:
            uses = [*uses, _Use(self._captures[value], 0, all_indices(len(shape)), frozenset())]
        sites = frozenset().union(*(use.sites for use in uses if is_partial(use.need)))
        need: list[Index] = []
        for axis, size in enumerate(shape):
            index = uses[0].need[axis]
            for use in uses[1:]:
                index = union(index, use.need[axis])
            need.append(simplify(np.unique(index) if index is not None else None, size))
            if not all(can_cut(value, axis, need[-1], use.need[axis], self) for use in uses):
                why = "holds heads and rows on one axis, of which its readers need different heads"
                self._refuse_value(sites, RefusalCode.FREE_SIZE, "tensor", value, why)
            if all(use.need[axis] is None or self._selects(use, axis) for use in uses):
                continue
            for use in uses:
                mixer = self._find_mixer(value, use, axis) if use.need[axis] is None else None
                if mixer is None:
                    continue
                op, rule = ("graph output", None) if isinstance(mixer, ir.Value) else (mixer.op_type, self.rule(mixer))
                why = f"needs every unit of {value.name}, so none can be removed from it"
                refusal = Refusal(sites, op, mixer.name or "", why, RefusalCode.EVERY_HEAD_NEEDED, value.name or "")
                if rule is not None and rule.is_norm:
                    self.shared.append(refusal)
                else:
                    self._refuse(refusal)
        if is_partial(tuple(need)):
            self.needs[value] = tuple(need)
            self._sites[value] = sites
        return tuple(need)

    def _selects(self, use: _Use, axis: int) -> bool:
        """Whether a use reads the same part of an axis when no head is dropped."""
        rule = self.rule(use.node) if use.node is not None else None
        if use.node is None or rule is None or axis not in rule.selected_axes(use.node, self):
            return False
        unpruned = rule.demand(use.node, [self.full_need(value) for value in use.node.outputs], self).inputs[
            use.position
        ]
        return unpruned is not None and same_index(unpruned[axis], use.need[axis])

    def _find_mixer(self, value: ir.Value, use: _Use, axis: int) -> ir.Node | ir.Value | None:
        """The first node or output of the graph that needs all of an axis of a tensor, at a use or after it, if any.

        The readers of a cache that the graph returns are those of the input that has it in the next call.
        """
        if use.node is None and value not in self._pasts:
            return value
        first = self._pasts[value].uses() if use.node is None else [(use.node, use.position)]
        stack, visited = [(node, position, axis) for node, position in first], {(value, axis)}
        while stack:
            reader, input_position, input_axis = stack.pop()
            if _mixes(reader, input_position, input_axis, self):
                return reader
            for output, output_axis in _carriers(reader, input_position, input_axis, self):
                if output.is_graph_output() and output not in self._pasts:
                    return output
                if (output, output_axis) not in visited:
                    visited.add((output, output_axis))
                    held = (output, self._pasts[output]) if output in self._pasts else (output,)
                    stack += [(user, position, output_axis) for part in held for user, position in part.uses()]
        return None

    def _refuse_node(self, sites: frozenset[str], node: ir.Node, code: RefusalCode, why: str) -> None:
        self._refuse(Refusal(sites, node.op_type, node.name or "", why, code))

    def _refuse_value(self, sites: frozenset[str], code: RefusalCode, op: str, value: ir.Value, why: str) -> None:
        self._refuse(Refusal(sites, op, value.name or "", why, code, value.name or ""))

    def _refuse(self, refusal: Refusal) -> None:
        _logger.debug("%s refused: %s", ", ".join(sorted(refusal.sites)), refusal)
        self.refusals.append(refusal)


def _same_need(need: Need, cached: tuple[Need, frozenset[str]] | None) -> bool:
    """Whether a cache's input needs what was assumed to be needed of its output."""
    return cached is not None and all(map(same_index, need, cached[0]))


def _mixes(node: ir.Node, position: int, axis: int, cuts: Cuts) -> bool:
    rule = cuts.rule(node)
    try:
        return rule is None or rule.mixes(node, position, axis, cuts)
    except NoRuleError:
        return True


def _carriers(node: ir.Node, position: int, axis: int, cuts: Cuts) -> Iterator[tuple[ir.Value, int]]:
    """Output axes with more than one index that carry the heads of an input's axis.

    An axis of rows carries none of them, although a reshape makes it from an axis of rows and heads.
    """
    rule = cuts.rule(node)
    assert rule is not None
    with contextlib.suppress(NoRuleError):
        for output, output_axis in rule.carries(node, position, axis, cuts):
            value = node.outputs[output]
            first, second = cuts.probe.shapes(value)
            if first is None or first[output_axis] == 1:
                continue
            if second is None or (first[output_axis], second[output_axis]) != BATCH:
                yield value, output_axis


def _drops(gain: Gain) -> bool:
    """Whether a gain is zero anywhere."""
    return any(axis is not None and not axis.all() for axis in gain.axes)


def captured_by_bodies(graph: ir.Graph) -> dict[ir.Value, ir.Node]:
    """Tensors of the main graph that bodies of `If`, `Loop` and `Scan` read, and the node that has the body."""
    captured: dict[ir.Value, ir.Node] = {}
    for outer in graph:
        bodies = [body for attribute in outer.attributes.values() for body in bodies_of(attribute)]
        for node in (node for body in bodies for node in body.all_nodes()):
            for value in node.inputs:
                if value is not None and value.graph is graph:
                    captured.setdefault(value, outer)
    return captured


def bodies_of(attribute: ir.Attr) -> Sequence[ir.Graph]:
    """The graphs that an attribute holds: the branches of an `If`, the body of a `Loop`."""
    if attribute.is_ref():
        return ()
    if attribute.type == ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else ()
