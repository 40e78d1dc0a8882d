"""New nodes and initializers of a graph, and what its tensors are computed from."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir


class Tape(ir.tape.Tape):
    """Records nodes of the ONNX standard in order, to be inserted into a graph."""

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add a node with one output, and return the output."""
        return self.op(op_type, inputs, attributes)

    def constant(self, content: np.ndarray) -> ir.Value:
        """The output of a `Constant` node."""
        return self("Constant", value=ir.tensor(content))

    def ints(self, content: Any) -> ir.Value:
        """An int64 constant."""
        return self.constant(np.asarray(content, np.int64))

    def size(self, value: ir.Value | None, axis: int) -> ir.Value:
        """The size of an axis of a tensor, `[1]`."""
        return self("Gather", self("Shape", value), self.ints([axis]), axis=0)

    def insert_before(self, node: ir.Node) -> None:
        """Insert the recorded nodes before a node of a graph."""
        graph_of(node).insert_before(node, self.nodes)

    def replace(self, node: ir.Node, *values: ir.Value) -> None:
        """Put the recorded nodes in place of a node, whose first outputs are these values now."""
        self.insert_before(node)
        for old, new in zip(node.outputs, values, strict=False):
            take_over(old, new)
        graph_of(node).remove(node, safe=True)


def add_initializer(graph: ir.Graph, name: str, content: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Register an initializer, whose type and shape are those of its content."""
    tensor = ir.Tensor(content, name=name) if isinstance(content, np.ndarray) else content
    return ir.tape.Tape(graph).initializer(tensor, name)


def remove_unread(graph: ir.Graph, names: Iterable[str | None]) -> None:
    """Remove those of some initializers that nothing reads and the graph does not return."""
    for name in names:
        value = graph.initializers.get(name or "")
        if value is not None and not value.uses() and not value.is_graph_output():
            del graph.initializers[name or ""]


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Give a new tensor the name, type, shape and readers of an old one, and its position among the graph's outputs."""
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.name = None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def content_of(value: ir.Value | None) -> np.ndarray:
    """The content of an initializer or of a `Constant` node."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    assert tensor is not None
    return tensor.numpy()


def graph_of(node: ir.Node) -> ir.Graph:
    """The graph that has a node."""
    assert node.graph is not None
    return node.graph


def input_of(node: ir.Node, position: int) -> ir.Value | None:
    """An input of a node; None where the node omits it."""
    return node.inputs[position] if position < len(node.inputs) else None


def shape_axes(node: ir.Node, rank: int) -> range:
    """The axes of a tensor with `rank` axes whose sizes a `Shape` returns."""
    return range(rank)[slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", rank))]


def producer_of(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a tensor; None for an input, an initializer, and an absent input of a node."""
    return None if value is None else value.producer()


def source_before(value: ir.Value | None, op_types: Collection[str]) -> ir.Value | None:
    """The tensor that a tensor is computed from by operators of some types alone, each from its first input."""
    while (node := producer_of(value)) is not None and node.op_type in op_types:
        value = node.inputs[0]
    return value


def ancestors(values: Iterable[ir.Value | None]) -> set[ir.Value]:
    """The tensors that some tensors are computed from, and these themselves."""
    stack, visited = list(values), set[ir.Value]()
    while stack:
        value = stack.pop()
        if value is not None and value not in visited:
            visited.add(value)
            producer = value.producer()
            stack += producer.inputs if producer is not None else ()
    return visited
