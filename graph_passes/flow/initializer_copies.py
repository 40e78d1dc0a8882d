"""Changed copies of initializers, which nodes read in place of the originals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

import onnx_ir as ir


class InitializerCopies:
    """Changed copies of a graph's initializers; nodes that need the same change share a copy.

    Args:
        graph: the graph.
        suffix: what the names of copies end in, before a number.
    """

    def __init__(self, graph: ir.Graph, suffix: str) -> None:
        self._graph, self._suffix = graph, suffix
        self._copies: dict[tuple[ir.Value, Hashable], ir.Value] = {}

    def copy(self, value: ir.Value, change: Hashable, changed: Callable[[str], ir.LazyTensor]) -> ir.Value:
        """The copy of an initializer with a change.

        Args:
            value: the initializer.
            change: identifies the change.
            changed: returns the changed content, as a tensor of a name; called for the first copy with this change.
        """
        key = (value, change)
        if key not in self._copies:
            names = (f"{value.name}.{self._suffix}{number}" for number in itertools.count())
            name = next(name for name in names if name not in self._graph.initializers)
            tensor = changed(name)
            copy = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
            self._graph.register_initializer(copy)
            self._copies[key] = copy
        return self._copies[key]

    def take_over_names(self) -> None:
        """Remove each original that no node reads any more, and give its name to its first copy."""
        for (value, _), copy in self._copies.items():
            name = value.name
            if name is None or copy.name == name:
                continue
            is_unused = not (value.uses() or value.is_graph_input() or value.is_graph_output())
            if is_unused and self._graph.initializers.get(name) is value:
                del self._graph.initializers[name]
            if name not in self._graph.initializers:
                copy.name = name
                if copy.const_value is not None:
                    copy.const_value.name = name
