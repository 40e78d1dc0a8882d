"""Fold computed weights: compute the weight of a product that a graph computes from initializers, once and for all."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import onnx_ir as ir

from graph_passes.attention.gate_initializers import gated_group
from graph_passes.attention.products import weight_of
from graph_passes.attention.tracing import PRODUCTS
from graph_passes.flow.axis_flow import bodies_of
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.passes.fold_weights import fold
from graph_passes.passes.normalize import is_float
from graph_passes.tape import ancestors, producer_of

_KEEP = frozenset("Bernoulli DequantizeLinear Multinomial QuantizeLinear RandomNormalLike RandomUniformLike".split())
"""Operators that stay: those of quantized weights, and those whose results are random."""

_UNKNOWN = (NotImplementedError, RuntimeError, TypeError, ValueError, KeyError)
"""Exceptions of ONNX's reference evaluator for operators or types that it does not support, which stay."""


class FoldComputedWeights(GraphPass[Names]):
    """Replace the weight of a product that is computed from initializers by an initializer.

    Groups of units end in products with initializers, and refits change these. A graph may scale, join, select or
    reshape weights before it multiplies by them.

    Cases:
        1. An operand of two axes, by which a product multiplies what depends on an input, is computed from
           initializers by operators of ONNX: it becomes an initializer.
        2. The operators only convert or transpose one initializer, or some of them are random, of quantization or
           convert integers, whose size is that of the file: they stay.
        3. The product multiplies constants, as a table of positions and learned queries are: its operands stay, since
           their neurons and heads are units too. So do gates.

    The report has the names of the tensors that became initializers.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        constant = set[ir.Node]()
        for node in model.graph:
            if node.inputs and _is_foldable(node, constant):
                constant.add(node)

        def is_constant(value: ir.Value | None) -> bool:
            return value is None or value.is_initializer() or value.producer() in constant

        pairs = [node.inputs[:2] for node in model.graph if node.op_type in PRODUCTS and node not in constant]
        operands = [value for pair in pairs for value in pair if is_constant(value) and not all(map(is_constant, pair))]
        computed = [value for value in dict.fromkeys(operands) if value is not None and value.producer() in constant]
        computed = [value for value in computed if weight_of(value) is None]
        if not computed:
            return changed(model, ())
        probe = Probe(model)
        computed = [value for value in computed if len(probe.shape(value) or ()) == 2]
        names = [value.name for value in computed]
        needed = {value.producer() for value in ancestors(computed)}
        folded = 0
        for node in [node for node in model.graph if node in needed]:
            if all(value is None or value.is_initializer() for value in node.inputs):
                with contextlib.suppress(*_UNKNOWN):
                    fold(node)
                    folded += 1
        return changed(model, (name for name in names if name in model.graph.initializers), is_other=bool(folded))


def _is_foldable(node: ir.Node, constant: Collection[ir.Node]) -> bool:
    """Whether the only output of a node depends on initializers and constants alone."""
    if node.domain or node.op_type in _KEEP or len(node.outputs) != 1 or any(map(bodies_of, node.attributes.values())):
        return False
    if any(gated_group(value) is not None for value in node.inputs):
        return False
    if not all(value is None or value.is_initializer() or value.producer() in constant for value in node.inputs):
        return False
    if node.op_type != "Cast":
        return True
    value = node.inputs[0]
    while (before := producer_of(value)) is not None:
        value = before.inputs[0]
    return value is not None and is_float(value)  # the initializer behind the Cast, by the first input of each node
