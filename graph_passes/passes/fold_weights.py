"""Fold weights: compute the layout operators between a weight and the node that reads it, once and for all."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.node_calls import run_constant
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import add_initializer, content_of, graph_of, remove_unread

_LAYOUT = frozenset(("Cast", "Concat", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators that only move, join or convert the elements of their inputs."""


class FoldWeights(GraphPass[Names]):
    """Replace `Transpose(weight)` and other layout operators on constants by their results.

    An exported linear layer transposes its weight in the graph. Runtimes fold that themselves, but quantizers look for
    the initializer at the product, and leave a product in floats whose weight is behind an operator.

    Cases:
        1. An operator of layout whose inputs are all constants: its output becomes an initializer, also where it reads
           the output of another one.
        2. Anything else stays.

    The report has the names of the tensors that became initializers.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        tensors = []
        for node in list(model.graph):
            if _is_foldable(node):
                tensors.append(str(node.outputs[0].name))
                fold(node)
        return changed(model, (name for name in tensors if name in model.graph.initializers), is_other=bool(tensors))


def _is_foldable(node: ir.Node) -> bool:
    is_layout = node.domain == "" and node.op_type in _LAYOUT
    return is_layout and all(value is None or _constant(value) is not None for value in node.inputs)


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """The content of an initializer that callers cannot replace, or of a `Constant` node."""
    return None if value.is_graph_input() else ir.convenience.get_const_tensor(value)


def fold(node: ir.Node) -> None:
    """Replace a node on constants by an initializer, and remove its inputs if nothing else reads them."""
    graph, output = graph_of(node), node.outputs[0]
    inputs = [value for value in node.inputs if value is not None]
    array = run_constant(node, {str(value.name): content_of(value) for value in inputs})
    name, output.name = str(output.name), None
    value = add_initializer(graph, name, array)
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    for value in set(inputs):
        if (producer := value.producer()) is None:
            remove_unread(graph, [value.name])
        elif not value.uses() and not value.is_graph_output():
            graph.remove(producer, safe=True)
