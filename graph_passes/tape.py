"""New nodes and initializers of a graph, and what its tensors are computed from."""

from __future__ import annotations

from collections.abc import Iterable
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
        assert node.graph is not None
        node.graph.insert_before(node, self.nodes)


def add_initializer(graph: ir.Graph, name: str, content: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Register an initializer, whose type and shape are those of its content."""
    tensor = ir.Tensor(content, name=name) if isinstance(content, np.ndarray) else content
    return ir.tape.Tape(graph).initializer(tensor, name)


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Give a new tensor the name, type, shape and readers of an old one, and its position among the graph's outputs."""
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.name = None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


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
