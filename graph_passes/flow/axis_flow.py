"""Which indices of which axis of which tensor belong to the heads that go.

Dropping a head is dead-code elimination, index by index instead of node by node. A gate of zero makes some indices of
an axis zero. Where such an axis is summed over (the output projection), those indices contribute nothing and are not
asked for any more; walking back from there, every operator's rule says which indices of its inputs its outputs
need, until initializers are reached. Nothing in this names an architecture: biases, fused projections, grouped heads,
relative-position tables and rotary embeddings are all the same walk.

Two walks over the graph make a `Flow`:

1. forward, *gains*: by which constant each index of an axis is multiplied, from the gates to the sums;
2. backward, *needs*: which indices of an axis are needed, from the sums to the initializers.

An operator without a rule, or one that mixes the indices of an axis that heads occupy (a norm over all heads), ends the
walk with a `Refusal` of the sites concerned: half a head is never dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe, Shape

Index = np.ndarray | None
"""Positions along one axis `[n]`, ascending, of the sizes that the probe found; None: all of them."""

Need = tuple[Index, ...]
"""One index an axis."""


@dataclasses.dataclass(frozen=True, eq=False)
class Gain:
    """What a tensor's indices are multiplied by, one array an axis (None: by one), and the sites whose gates did it."""

    axes: tuple[np.ndarray | None, ...]
    sites: frozenset[str]


@dataclasses.dataclass(frozen=True, eq=False)
class SummedGain:
    """A gain along an axis that a node sums over.

    Attributes:
        factors: factor of each index of the axis, `[size]`.
        sites: names of the sites whose gates contribute to the factors.
        axes: the axis of each input of the node that is summed over; None where an input does not have it.
    """

    factors: np.ndarray
    sites: frozenset[str]
    axes: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why sites cannot be shrunk: the operator in the way.

    Attributes:
        sites: names of the sites whose heads meet it.
        op: operator type, or `graph output` / `graph input`.
        node: name of the node or value.
        why: what about it, in words.
    """

    sites: frozenset[str]
    op: str
    node: str
    why: str

    def __str__(self) -> str:
        return f"{self.op} {self.node}: {self.why}"


class _Use(NamedTuple):
    """One use of a tensor: by an input of a node (None: by the graph's outputs), and for which sites."""

    node: ir.Node | None
    position: int
    need: Need
    sites: frozenset[str]


class NoRuleError(Exception):
    """Raised by a rule that cannot pass heads through this node; the message says why."""


@dataclasses.dataclass(frozen=True)
class Demand:
    """A rule's answer: what each input must hold (None: no data is read) and what each output will then hold."""

    inputs: tuple[Need | None, ...]
    outputs: tuple[Need, ...]


class Rule(Protocol):
    """How one operator passes indices on. All needs are in positions of the untouched graph."""

    @property
    def selective(self) -> bool:
        """Whether `rewrite` takes what it needs from inputs that hold more, instead of having them cut before it."""

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        """What the inputs must hold so that the outputs hold at least `outputs`."""

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        """Gains of the outputs. Raises `NoRuleError` where a gain is not simply carried over."""

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        """Whether output indices depend on all indices of this axis of this input (and are not their sum)."""

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        """Change attributes and shape inputs so that the node computes `demand.outputs`.

        `held` says what each input holds by now. Inputs of a selective operator hold at least what it demands; those
        of any other have been cut to exactly that.
        """


def whole(rank: int) -> Need:
    """The need of every index of a tensor."""
    return (None,) * rank


def partial(need: Need | None) -> bool:
    """Whether some index of some axis is not needed."""
    return need is not None and any(index is not None for index in need)


def union(one: Index, other: Index) -> Index:
    """Positions in either."""
    return None if one is None or other is None else np.union1d(one, other)


def simplify(index: Index, size: int) -> Index:
    """None where an index covers the whole axis."""
    covers = index is not None and len(index) == size and np.array_equal(index, np.arange(size))
    return None if covers else index


def same(one: Index, other: Index) -> bool:
    """Whether two indices hold the same positions in the same order."""
    return (one is None and other is None) or (one is not None and other is not None and np.array_equal(one, other))


class Flow:
    """Gains and needs of one graph whose gates have the given values.

    Args:
        model: the graph; it is read, not changed.
        gates: the value of each gate initializer, by the initializer: (site name, array of the initializer's shape).
        rules: the rule of each operator, by (domain, type).
        probe: the graph's shapes.
    """

    def __init__(
        self,
        model: ir.Model,
        gates: Mapping[ir.Value, tuple[str, np.ndarray]],
        rules: Mapping[tuple[str, str], Rule],
        probe: Probe,
    ) -> None:
        self.graph = model.graph
        self.probe = probe
        self.refusals: list[Refusal] = []
        self.gains: dict[ir.Value, Gain] = {}
        self.sums: dict[ir.Node, dict[Hashable, SummedGain]] = {}
        """Gain along each label that a node sums over."""
        self.blocked: dict[ir.Node, frozenset[str]] = {}
        """Nodes at which a gain ends without being summed over, and the sites concerned."""
        self.needs: dict[ir.Value, Need] = {}
        """What each computed tensor will hold, where that is not everything."""
        self.demands: dict[ir.Node, Demand] = {}
        """The rule's answer for each node that changes, or whose inputs must be cut."""
        self._rules = rules
        self._sites: dict[ir.Value, frozenset[str]] = {}
        self._inner_uses = _captured(model.graph)
        for value, (site, content) in gates.items():
            axes = tuple(content.reshape(-1).astype(np.float64) if size > 1 else None for size in content.shape)
            if sum(axis is not None for axis in axes) == 1:
                self.gains[value] = Gain(axes, frozenset((site,)))
        self._forward()
        self._backward()

    def rule(self, node: ir.Node) -> Rule | None:
        """The rule of a node's operator."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        return self._rules.get((domain, node.op_type))

    def shape(self, value: ir.Value | None) -> Shape:
        """Probed shape of a tensor that a rule has to know."""
        shape = self.probe.shape(value)
        if shape is None:
            raise NoRuleError(f"the shape of {value.name if value is not None else 'an absent input'} is not known")
        return shape

    # -- forward: gains ------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        for node in self.graph:
            gains = [self.gains.get(value) if value is not None else None for value in node.inputs]
            if not any(gains):
                continue
            sites = frozenset().union(*(gain.sites for gain in gains if gain is not None))
            rule = self.rule(node)
            try:
                if rule is None:
                    raise NoRuleError("has no rule")
                outputs = rule.gain(node, gains, self)
            except NoRuleError as error:
                self.blocked[node] = sites
                if any(gain is not None and _drops(gain) for gain in gains):
                    self._refuse(sites, node, f"{error}, and gated heads reach it")
                continue
            for value, gain in zip(node.outputs, outputs, strict=False):
                if gain is not None:
                    self.gains[value] = gain
                    if value.is_graph_output():
                        self.blocked[node] = sites
                        if _drops(gain):
                            why = "gives gated heads out; export the graph without it"
                            self.refusals.append(Refusal(sites, "graph output", value.name or "", why))

    # -- backward: needs -----------------------------------------------------------------------------------------

    def _backward(self) -> None:
        asked: dict[ir.Value, list[_Use]] = {}
        for value in self.graph.outputs:
            asked.setdefault(value, []).append(_Use(None, 0, self._whole(value), frozenset()))
        for node in reversed(self.graph):
            outputs = [self._gather(value, asked) for value in node.outputs]
            sites = frozenset().union(*(self._sites.get(value, frozenset()) for value in node.outputs))
            demand, tags = self._ask(node, outputs, sites)
            for position, (source, wanted) in enumerate(zip(node.inputs, demand.inputs, strict=False)):
                if source is not None and wanted is not None:
                    asked.setdefault(source, []).append(_Use(node, position, wanted, tags))
        for value in self.graph.inputs:
            self._gather(value, asked)
            if value in self.needs:
                why = "it carries heads that the plan drops; export the graph without it"
                self.refusals.append(Refusal(self._sites[value], "graph input", value.name or "", why))

    def _ask(self, node: ir.Node, outputs: list[Need], sites: frozenset[str]) -> tuple[Demand, frozenset[str]]:
        rule = self.rule(node)
        sites |= frozenset().union(*(gain.sites for gain in self.sums.get(node, {}).values() if not gain.factors.all()))
        if rule is not None:
            try:
                for value in node.outputs:
                    if value.uses() or value.is_graph_output():
                        self.shape(value)
                demand = rule.demand(node, outputs, self)
            except NoRuleError as error:
                if sites:
                    self._refuse(sites, node, f"{error}, and heads that the plan drops reach it")
            else:
                self.demands[node] = demand
                for value, need in zip(node.outputs, demand.outputs, strict=False):
                    self._hold(value, need)
                return demand, sites
        elif sites:
            self._refuse(sites, node, "has no rule, and heads that the plan drops reach it")
        inputs = tuple(whole(len(self.probe.shape(v) or ())) if v is not None else None for v in node.inputs)
        return Demand(inputs, tuple(outputs)), frozenset()

    def _gather(self, value: ir.Value, asked: dict[ir.Value, list[_Use]]) -> Need:
        """Everything that is asked of a value, over all its uses."""
        shape = self.probe.shape(value) or ()
        uses = asked.pop(value, [])
        if value in self._inner_uses:
            uses = [*uses, _Use(self._inner_uses[value], 0, whole(len(shape)), frozenset())]
        sites = frozenset().union(*(use.sites for use in uses if partial(use.need)))
        if not sites:
            return whole(len(shape))
        need: list[Index] = []
        for axis, size in enumerate(shape):
            indices = [use.need[axis] for use in uses]
            index = indices[0]
            for other in indices[1:]:
                index = union(index, other)
            need.append(simplify(np.unique(index) if index is not None else None, size))
            if all(use.need[axis] is None or self._selects(use, axis) for use in uses):
                continue
            for use in uses:
                mixer = self._mixer(value, use, axis) if use.need[axis] is None else None
                if mixer is not None:
                    why = f"needs every head of {value.name}, so none can be dropped from it"
                    self.refusals.append(Refusal(sites, *mixer, why))
        if partial(tuple(need)):
            self.needs[value] = tuple(need)
            self._sites[value] = sites
        return tuple(need)

    def _hold(self, value: ir.Value, need: Need) -> None:
        """Record that a node's output will hold `need`, which may be more than was asked of it."""
        if partial(need):
            self.needs[value] = need
        else:
            self.needs.pop(value, None)

    def _selects(self, use: _Use, axis: int) -> bool:
        """Whether a use takes the same part of an axis when every head stays."""
        rule = self.rule(use.node) if use.node is not None else None
        if use.node is None or rule is None or not rule.selective:
            return False
        before = rule.demand(use.node, [self._whole(value) for value in use.node.outputs], self).inputs[use.position]
        return before is not None and same(before[axis], use.need[axis])

    def _mixer(self, value: ir.Value, use: _Use, axis: int) -> tuple[str, str] | None:
        """What needs an axis whole, at one use or wherever that use carries it: (operator, name), or None."""
        if use.node is None:
            return "graph output", value.name or ""
        stack, seen = [(use.node, use.position, axis)], {(value, axis)}
        while stack:
            node, position, at = stack.pop()
            if self._mixes(node, position, at):
                return node.op_type, node.name or ""
            for out, along in self._carried(node, position, at):
                if out.is_graph_output():
                    return "graph output", out.name or ""
                if (out, along) not in seen:
                    seen.add((out, along))
                    stack += [(reader, place, along) for reader, place in out.uses()]
        return None

    def _mixes(self, node: ir.Node, position: int, axis: int) -> bool:
        rule = self.rule(node)
        try:
            return rule is None or rule.mixes(node, position, axis, self)
        except NoRuleError:
            return True

    def _carried(self, node: ir.Node, position: int, axis: int) -> Iterator[tuple[ir.Value, int]]:
        """Output axes whose indices are those of an input's axis: asking for the first alone asks for fewer there."""
        rule = self.rule(node)
        assert rule is not None
        everything = [self._whole(value) for value in node.outputs]
        for place, value in enumerate(node.outputs):
            for along, size in enumerate(self.probe.shape(value) or ()):
                first = list(everything)
                first[place] = tuple(np.zeros(1, np.int64) if at == along else None for at in range(len(first[place])))
                with contextlib.suppress(NoRuleError):
                    asked, before = (rule.demand(node, needs, self).inputs[position] for needs in (first, everything))
                    if size > 1 and asked and before and not same(asked[axis], before[axis]):
                        yield value, along

    def _whole(self, value: ir.Value) -> Need:
        return whole(len(self.probe.shape(value) or ()))

    def _refuse(self, sites: frozenset[str], node: ir.Node, why: str) -> None:
        self.refusals.append(Refusal(sites, node.op_type, node.name or "", why))


def _drops(gain: Gain) -> bool:
    return any(axis is not None and not axis.all() for axis in gain.axes)


def _captured(graph: ir.Graph) -> dict[ir.Value, ir.Node]:
    """Tensors of the main graph that bodies of `If`, `Loop` and `Scan` read, and the node that has the body."""
    found: dict[ir.Value, ir.Node] = {}
    for outer in graph:
        bodies = [body for attr in outer.attributes.values() for body in _bodies(attr)]
        for node in (node for body in bodies for node in body.all_nodes()):
            for value in node.inputs:
                if value is not None and value.graph is graph:
                    found.setdefault(value, outer)
    return found


def _bodies(attr: ir.Attr) -> Sequence[ir.Graph]:
    if attr.is_ref():
        return ()
    return (
        (attr.as_graph(),)
        if attr.type == ir.AttributeType.GRAPH
        else (attr.as_graphs() if attr.type == ir.AttributeType.GRAPHS else ())
    )
