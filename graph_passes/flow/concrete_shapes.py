"""Infer the shape of every tensor of a graph by walking it twice with concrete sizes for the free dimensions.

Exporters record shapes incompletely: dimensions are symbols, targets of `Reshape` are computed from `Shape`, and
nothing is inferred beyond operators of other domains. With every free dimension set to a number, shapes become
arithmetic on small constants. Two walks with different numbers distinguish fixed sizes (equal in both) from those that
depend on the graph's inputs.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx
import onnx_ir as ir

from graph_passes.flow.node_inference import LARGEST_CONSTANT, Shape, evaluate, infer

Shapes = tuple[Shape | None, Shape | None]
"""Shapes of a tensor under both assignments of sizes; None where it is unknown."""

# Free dimensions take these sizes in order of appearance. All pairs differ, so that two symbols are never confused.
_SIZES = ((3, 5, 7, 11, 13, 17, 19, 23), (5, 7, 11, 13, 17, 19, 23, 29))

# Operators whose inputs must agree in size, or have size one.
_BROADCASTS = frozenset("Add And Div Equal Expand Greater GreaterOrEqual Less LessOrEqual Mul Or Sub Where".split())

BATCH = (_SIZES[0][0], _SIZES[1][0])
"""Size of the batch under each assignment."""


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The result of one walk: shapes, types, and the content of small tensors."""

    shapes: dict[ir.Value, Shape]
    types: dict[ir.Value, onnx.TypeProto]
    constants: dict[ir.Value, np.ndarray]


class Probe:
    """Concrete shapes and small constants of one graph in its present state; after an edit, construct a new one.

    Args:
        model: the graph, which is not changed.
    """

    def __init__(self, model: ir.Model) -> None:
        aliases: dict[str, str] = {}
        while True:
            try:
                self._walks = tuple(_walk(model, sizes, aliases) for sizes in _SIZES)
            except _ClashError as clash:
                aliases[clash.symbol] = clash.equal_symbol
            else:
                return

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Shape under the first assignment of sizes, or None where it is unknown."""
        return None if value is None else self._walks[0].shapes.get(value)

    def shapes(self, value: ir.Value | None) -> Shapes:
        """Shapes under both assignments, None where they are unknown."""
        return self.shape(value), None if value is None else self._walks[1].shapes.get(value)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """Type of a tensor's elements, or None where it is unknown."""
        proto = None if value is None else self._walks[0].types.get(value)
        return None if proto is None else ir.DataType(proto.tensor_type.elem_type)

    def copy_shape(self, target: ir.Value, source: ir.Value) -> None:
        """Give a new tensor the shapes of the tensor that it replaces: positions are those of the unpruned graph."""
        for walk in self._walks:
            if source in walk.shapes:
                walk.shapes[target] = walk.shapes[source]

    def fixed(self, value: ir.Value | None, axis: int) -> bool:
        """Whether the size of an axis is known and the same for all inputs of the graph."""
        first, second = self.shapes(value)
        return first is not None and second is not None and first[axis] == second[axis]

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Content of a small tensor that is the same for all inputs of the graph, or None."""
        first, second = self.contents(value)
        if first is None or second is None or first.shape != second.shape or not np.array_equal(first, second):
            return None
        return first

    def contents(self, value: ir.Value | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Content of a small tensor under both assignments, None where it is unknown."""
        if value is None:
            return None, None
        return self._walks[0].constants.get(value), self._walks[1].constants.get(value)


class _ClashError(Exception):
    """Two symbols of the file that must have one size for some operator."""

    def __init__(self, symbol: str, equal_symbol: str) -> None:
        super().__init__(symbol, equal_symbol)
        self.symbol = symbol
        self.equal_symbol = equal_symbol


def _walk(model: ir.Model, sizes: Shape, aliases: dict[str, str]) -> _Walk:
    """Infer every node under one assignment of sizes.

    Args:
        model: the graph.
        sizes: the sizes of free dimensions, the batch first.
        aliases: symbols that have the size of another symbol.

    Raises:
        _ClashError: an operator needs two symbols to have one size.
    """
    bindings = _bind(model.graph, sizes, aliases)
    shapes: dict[ir.Value, Shape] = {}
    types: dict[ir.Value, onnx.TypeProto] = {}
    constants: dict[ir.Value, np.ndarray] = {}

    def record(value: ir.Value, shape: Shape | None, dtype: ir.DataType | None) -> None:
        if shape is not None:
            shapes[value] = shape
        if dtype is not None:
            types[value] = onnx.helper.make_tensor_type_proto(dtype.value, shape)

    for value in model.graph.inputs:
        record(value, _concrete(value.shape, bindings, is_input=True), value.dtype)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        record(value, tuple(tensor.shape.numpy()), tensor.dtype)
        if tensor.size <= LARGEST_CONSTANT and tensor.dtype != ir.DataType.STRING:
            constants[value] = tensor.numpy()
    for node in model.graph:
        for value, shape, dtype in infer(node, model, shapes, types, constants):
            if shape is None:
                _check_clash(node, shapes, constants, bindings, aliases)
            record(value, shape if shape is not None else _concrete(value.shape, bindings), dtype or value.dtype)
        evaluate(node, model, shapes, constants)
    return _Walk(shapes, types, constants)


def _check_clash(
    node: ir.Node,
    shapes: dict[ir.Value, Shape],
    constants: dict[ir.Value, np.ndarray],
    bindings: dict[str, int],
    aliases: dict[str, str],
) -> None:
    """Check that a node does not fail to broadcast its inputs because two symbols have two sizes.

    Exporters may give the length of ids and that of their mask two names, although the model needs them to be equal.

    Args:
        node: the node whose output shape is unknown.
        shapes: shapes of the tensors before it.
        constants: contents of small tensors before it.
        bindings: the size of each symbol.
        aliases: symbols that have the size of another symbol already.

    Raises:
        _ClashError: it fails; the error names both symbols.
    """
    if node.op_type not in _BROADCASTS:
        return
    operands = [shapes[value] for value in node.inputs if value in shapes]
    if node.op_type == "Expand":
        content = constants.get(node.inputs[1]) if node.inputs[1] is not None else None
        operands = [*operands[:1], tuple(int(size) for size in content)] if content is not None else []
    symbols = {size: symbol for symbol, size in bindings.items() if symbol not in aliases}
    for sizes in itertools.zip_longest(*(reversed(shape) for shape in operands), fillvalue=1):
        clashing = sorted(symbols[size] for size in set(sizes) if size in symbols)
        if len(clashing) == 2:
            raise _ClashError(clashing[1], clashing[0])


def _bind(graph: ir.Graph, sizes: Shape, aliases: dict[str, str]) -> dict[str, int]:
    """Give every symbol of the graph's inputs its own size; a nameless dimension is bound by its axis.

    All leading dimensions share one size: they are the batch, which exporters often name differently for every input.
    Symbols in `aliases` share the size of another symbol.
    """
    supply = itertools.chain(sizes[1:], itertools.count(sizes[-1] + 2, 2))
    bindings: dict[str, int] = {}
    free = [
        (axis, dim) for value in graph.inputs for axis, dim in enumerate(value.shape or ()) if not isinstance(dim, int)
    ]
    # Plain symbols first; others are sums of symbols (`past + length`), or only look like one (`batch-size`).
    for axis, dim in sorted(free, key=lambda pair: not (pair[1].value or "").isidentifier()):
        symbol = f"axis {axis}" if dim.value is None else dim.value
        if symbol not in bindings and (_size(dim, bindings) or 0) < 1:
            bindings[symbol] = sizes[0] if axis == 0 else next(supply)
    for symbol, equal_symbol in aliases.items():
        while equal_symbol in aliases:
            equal_symbol = aliases[equal_symbol]
        bindings[symbol] = bindings[equal_symbol]
    return bindings


def _size(dim: ir.SymbolicDim, bindings: dict[str, int]) -> int | None:
    """Size of a free dimension, None where its symbols are not bound."""
    if dim.value is None:
        return None
    if dim.value in bindings:
        return bindings[dim.value]
    try:
        size = dim.evaluate(bindings)
    except ValueError:  # the name is not an expression
        return None
    return size if isinstance(size, int) else None


def _concrete(shape: ir.Shape | None, bindings: dict[str, int], *, is_input: bool = False) -> Shape | None:
    """A shape of the file with its symbols replaced by sizes, None where one of them is unknown.

    Nameless dimensions have a size only in the graph's inputs, where `_bind` binds them by axis.
    """
    if shape is None:
        return None
    sizes: list[int] = []
    for axis, dim in enumerate(shape):
        if isinstance(dim, int):
            size: int | None = dim
        elif dim.value is None:
            size = bindings[f"axis {axis}"] if is_input else None
        else:
            size = _size(dim, bindings)
        if size is None:
            return None
        sizes.append(size)
    return tuple(sizes)
