"""Small edits that rules and passes share: cut, scale and copy tensors, and give nodes constant inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.indices import Index, Need
from graph_passes.tape import Tape, add_initializer, graph_of


def opset(node: ir.Node) -> int:
    """Version of the ONNX operator set that a node of a graph follows."""
    return node.version or graph_of(node).opset_imports.get("", 1)


def cut_value(value: ir.Value, axis: int, positions: Index, before: ir.Node) -> ir.Value:
    """A tensor that holds only some positions of an axis, computed by Slice if they are consecutive, else by Gather.

    Args:
        positions: positions among those that the tensor holds; None: all, and the tensor is returned as it is.
        before: the node before which the new nodes are inserted.
    """
    if positions is None or before.graph is None:
        return value
    op, positions = Tape(), np.asarray(positions)
    is_range = len(positions) and np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions)))
    if is_range and opset(before) >= 10:  # the bounds of an older Slice are attributes
        cut = op("Slice", value, *(op.ints([bound]) for bound in (positions[0], positions[-1] + 1, axis)))
    else:
        cut = op("Gather", value, op.ints(positions), axis=axis)
    return _inserted(op, cut, value, before)


def cut_value_of_rows(value: ir.Value, axis: int, positions: np.ndarray, width: int, before: ir.Node) -> ir.Value:
    """A tensor that holds only some positions of each row, on an axis that merges rows with what each row has.

    Args:
        positions: positions within a row, `[n]`.
        width: number of positions that a row holds.
        before: the node before which the new nodes are inserted.
    """
    op = Tape()
    size = op("Gather", op("Shape", value), op.ints(axis), axis=0)
    starts = op("Range", op.ints(0), size, op.ints(width))
    selected = op("Add", op("Reshape", starts, op.ints([-1, 1])), op.ints(positions))
    return _inserted(op, op("Gather", value, op("Reshape", selected, op.ints([-1])), axis=axis), value, before)


def _inserted(op: Tape, cut: ir.Value, value: ir.Value, before: ir.Node) -> ir.Value:
    """A tensor cut from a value of the same type, whose nodes are inserted."""
    op.insert_before(before)
    if value.dtype is not None:
        cut.dtype = value.dtype
    return cut


def positions_among(index: Index, held: Index) -> Index:
    """The positions of an index within an axis that holds only the positions `held` (None: all of them)."""
    return index if index is None or held is None else np.searchsorted(held, index)


def set_ints(node: ir.Node, position: int, values: Sequence[int] | np.ndarray) -> None:
    """Replace one input of a node by an int64 constant with the values and the rank of `values`."""
    op = Tape()
    constant = op.ints(values)
    op.insert_before(node)
    if position >= len(node.inputs):
        node.resize_inputs(position + 1)
    node.replace_input_with(position, constant)


def cut_tensor(tensor: ir.TensorProtocol, need: Need, name: str) -> ir.LazyTensor:
    """A tensor cut to the needed indices; its data are read only when it is written."""
    shape = [size if index is None else len(index) for size, index in zip(tensor.shape.numpy(), need, strict=True)]

    def read() -> ir.TensorProtocol:
        content = tensor.numpy()
        for axis, index in enumerate(need):
            if index is not None:
                content = np.take(content, index, axis=axis)
        return ir.Tensor(content, dtype=tensor.dtype, name=name)

    return ir.LazyTensor(read, tensor.dtype, ir.Shape(shape), name=name)


def scale_tensor(tensor: ir.TensorProtocol, axis: int, factors: np.ndarray, name: str) -> ir.LazyTensor:
    """A tensor multiplied along one axis by factors `[size]`; computed only when it is written."""

    def read() -> ir.TensorProtocol:
        shape = [1] * len(tensor.shape)
        shape[axis] = -1
        content = tensor.numpy()
        return ir.Tensor((content * factors.reshape(shape)).astype(content.dtype), dtype=tensor.dtype, name=name)

    return ir.LazyTensor(read, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=name)


class InitializerCopies:
    """Changed copies of a graph's initializers; nodes that need the same change share a copy.

    Args:
        suffix: what the names of copies end in, before a number.
    """

    def __init__(self, graph: ir.Graph, suffix: str) -> None:
        self._graph, self._suffix = graph, suffix
        self._copies: dict[tuple[ir.Value, Hashable], ir.Value] = {}

    def copy(self, value: ir.Value, change: Hashable, changed: Callable[[str], ir.LazyTensor]) -> ir.Value:
        """The copy of an initializer with a change.

        Args:
            change: identifies the change.
            changed: returns the changed content, as a tensor of a name; called for the first copy with this change.
        """
        key = (value, change)
        if key not in self._copies:
            names = (f"{value.name}.{self._suffix}{number}" for number in itertools.count())
            name = next(name for name in names if name not in self._graph.initializers)
            self._copies[key] = add_initializer(self._graph, name, changed(name))
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
