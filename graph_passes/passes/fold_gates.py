"""Fold the gates of kept heads into the weights of the output projection, so that they cost nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.attention.gate_initializers import gate_contents
from graph_passes.attention.tracing import KEEPS_ELEMENTS
from graph_passes.flow.axis_flow import Flow
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.edit import InitializerCopies, scale_tensor
from graph_passes.flow.rules import RULES
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed


class FoldGates(GraphPass[Names]):
    """Multiply gates into the weights that the gated tensor is multiplied by, and set the gates to zeros and ones.

    Cases:
        1. Every path from the gate ends in a sum over the heads' axis against an initializer: the initializer is
           scaled along that axis, and the gates of kept heads become one.
        2. Anything else is on a path: the gate stays as it is.

    The report has the names of the sites whose gates are now zeros and ones.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        contents = gate_contents(model.graph).items()
        gates = {value: (site, content) for value, (site, content) in contents if not np.isin(content, (0, 1)).all()}
        if not gates:
            return changed(model, ())
        weights_of = _gated_weights(Flow(model, gates, RULES, Probe(model)))
        copies = InitializerCopies(model.graph, "scaled")
        for gate, (site, content) in gates.items():
            if site in weights_of:
                for weight in weights_of[site]:
                    _scale(weight, copies)
                gate.const_value = ir.Tensor((content != 0).astype(content.dtype), name=gate.name)
        copies.take_over_names()
        return changed(model, [site for site, _ in gates.values() if site in weights_of])


class _GatedWeight(NamedTuple):
    """A weight that gated heads are multiplied by: an input of a node, and the factors `[size]` of one of its axes."""

    node: ir.Node
    position: int
    axis: int
    factors: np.ndarray


def _gated_weights(flow: Flow) -> dict[str, list[_GatedWeight]]:
    """Site -> the weights that its gates are folded into, for the sites of case 1."""
    unfoldable = frozenset().union(*flow.blocked.values()) if flow.blocked else frozenset[str]()
    weights: dict[str, list[_GatedWeight]] = {}
    for node, sums in flow.sums.items():
        sites = frozenset().union(*(gain.sites for gain in sums.values()))
        weight = _weight_of_sum(node, flow)
        if weight is None or len(sites) != 1:
            unfoldable |= sites
            continue
        for site in sites:
            weights.setdefault(site, []).append(weight)
    return {site: of_site for site, of_site in weights.items() if site not in unfoldable}


def _weight_of_sum(node: ir.Node, flow: Flow) -> _GatedWeight | None:
    """The initializer that a node multiplies the gated tensor by, if there is one such factor."""
    sums = list(flow.sums[node].values())
    gated = [position for position, value in enumerate(node.inputs) if value in flow.gains]
    if len(sums) != 1 or len(node.inputs) < 2 or len(gated) != 1 or gated[0] > 1:
        return None
    position = 1 - gated[0]
    axis, value = sums[0].axes[position], node.inputs[position]
    if axis is None:
        return None
    reader = node
    while value is not None and not value.is_initializer():
        producer = value.producer()
        if producer is None or producer.op_type not in KEEPS_ELEMENTS or len(value.uses()) > 1:
            return None  # Another reader of the transposed weight would see it scaled too.
        if producer.op_type == "Transpose":
            rank = len(flow.shape(value))
            axis = producer.attributes.get_ints("perm", tuple(reversed(range(rank))))[axis]
        reader, position = producer, 0
        value = producer.inputs[0]
    if value is None:
        return None
    # Rows of a dropped head keep their values: they are removed later, or a gate of zero still precedes them.
    factors = sums[0].factors
    return _GatedWeight(reader, position, axis, np.where(factors == 0, 1.0, factors))


def _scale(weight: _GatedWeight, copies: InitializerCopies) -> None:
    """Let a node read its weight scaled."""
    value = weight.node.inputs[weight.position]
    if value is None or (tensor := value.const_value) is None:
        return
    copy = copies.copy(
        value,
        (weight.axis, weight.factors.tobytes()),
        lambda name: scale_tensor(tensor, weight.axis, weight.factors, name),
    )
    weight.node.replace_input_with(weight.position, copy)
