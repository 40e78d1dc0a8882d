"""Fold the gates of kept heads into the output projection, so that they cost nothing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.attention.gates import find_gates
from graph_passes.flow.axis_flow import Flow, Gain
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.edit import scale_tensor
from graph_passes.flow.rules import RULES

# What may stand between a weight and the product that reads it without changing its elements.
_PASSES_WEIGHT = frozenset(("Cast", "Identity", "Transpose"))


class FoldGates(ir.passes.InPlacePass):
    """Multiply gates into the weights that the gated tensor is multiplied by, and leave zeros and ones in the gate.

    Cases:
        1. Every way on from the gate ends in a sum over the heads' axis against an initializer: its rows are scaled,
           kept gates become one.
        2. Anything else is on the way: the gate stays as it is, and the site is listed in `kept`.
    """

    def __init__(self) -> None:
        self.folded: list[str] = []
        self.kept: list[str] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        gates = {
            value: (site, value.const_value.numpy())
            for site, value in find_gates(model.graph).items()
            if value.const_value is not None and not np.isin(value.const_value.numpy(), (0, 1)).all()
        }
        if not gates:
            return ir.passes.PassResult(model, False)
        flow = Flow(model, gates, RULES, Probe(model))
        ends = _ends(flow)
        scaled: dict[tuple[ir.Value, int, bytes], ir.Value] = {}
        for gate, (site, content) in gates.items():
            weights = ends.get(site)
            if weights is None:
                self.kept.append(site)
                continue
            for weight in weights:
                _scale(model.graph, *weight, scaled)
            ones = (content != 0).astype(content.dtype)
            gate.const_value = ir.Tensor(ones, name=gate.name)
            self.folded.append(site)
        for (value, _, _), new in scaled.items():
            name = value.name
            if name is not None and not value.uses() and name in model.graph.initializers:
                del model.graph.initializers[name]
                new.name = name
        return ir.passes.PassResult(model, bool(self.folded))


def _ends(flow: Flow) -> dict[str, list[tuple[ir.Node, int, int, np.ndarray]]]:
    """For each site that can be folded: (node, input, axis of the initializer, gain) of the weights it meets."""
    stuck = frozenset().union(*flow.blocked.values()) if flow.blocked else frozenset[str]()
    ends: dict[str, list[tuple[ir.Node, int, int, np.ndarray]]] = {}
    for node, sums in flow.sums.items():
        sites = frozenset().union(*(gain.sites for gain in sums.values()))
        found = _weight(node, sums, flow)
        if found is None or len(sites) != 1:
            stuck |= sites
            continue
        for site in sites:
            ends.setdefault(site, []).append(found)
    return {site: weights for site, weights in ends.items() if site not in stuck}


def _weight(node: ir.Node, sums: dict, flow: Flow) -> tuple[ir.Node, int, int, np.ndarray] | None:
    """The initializer behind the other operand of a sum of products, and its axis that is summed over."""
    if len(sums) != 1 or len(node.inputs) < 2:
        return None
    ((_, gain),) = sums.items()
    assert isinstance(gain, Gain)
    gated = [position for position, value in enumerate(node.inputs) if value in flow.gains]
    if len(gated) != 1 or gated[0] > 1:
        return None
    position = 1 - gated[0]
    rule = flow.rule(node)
    labels = rule.describe(node, flow)  # type: ignore[union-attr]
    ((label, _),) = sums.items()
    axis = labels.inputs[position].index(label)
    at, reads = node, position
    value = node.inputs[position]
    while value is not None and not value.is_initializer():
        producer = value.producer()
        if producer is None or producer.op_type not in _PASSES_WEIGHT or len(value.uses()) > 1:
            return None  # Another reader of the transposed weight would see it scaled too.
        if producer.op_type == "Transpose":
            rank = len(flow.shape(value))
            axis = producer.attributes.get_ints("perm", tuple(reversed(range(rank))))[axis]
        at, reads = producer, 0
        value = producer.inputs[0]
    factors = gain.axes[0]
    if value is None or factors is None:
        return None
    # A dropped head's rows are cut off later, or stay behind a zero gate: they keep their values.
    return at, reads, axis, np.where(factors == 0, 1.0, factors)


def _scale(
    graph: ir.Graph,
    node: ir.Node,
    position: int,
    axis: int,
    factors: np.ndarray,
    scaled: dict[tuple[ir.Value, int, bytes], ir.Value],
) -> None:
    """Let a node read its weight scaled along an axis; equal requests share one new initializer."""
    value = node.inputs[position]
    if value is None or value.const_value is None:
        return
    key = (value, axis, factors.tobytes())
    if key not in scaled:
        name = f"{value.name}.scaled{len(scaled)}"
        tensor = scale_tensor(value.const_value, axis, factors, value.name or name)
        new = ir.Value(name=name, const_value=tensor, type=value.type, shape=tensor.shape)
        graph.register_initializer(new)
        scaled[key] = new
    node.replace_input_with(position, scaled[key])
