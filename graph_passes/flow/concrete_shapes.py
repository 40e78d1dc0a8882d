"""What shape has every tensor? Found by walking the graph twice with concrete sizes for the free dimensions.

Exporters leave shapes half known: dimensions are symbols, targets of `Reshape` are computed from `Shape`, and nothing
is inferred past operators of other domains. With every free dimension set to a number, all of that becomes arithmetic
on small constants. Two walks with different numbers tell what is fixed (equal in both) from what follows the input.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx
import onnx_ir as ir

from graph_passes.flow.node_inference import LARGEST_CONSTANT, Shape, evaluate, infer

# Free dimensions take these sizes in order of appearance. All pairs differ, so that two symbols are never confused.
_SIZES = ((3, 5, 7, 11, 13, 17, 19, 23), (5, 7, 11, 13, 17, 19, 23, 29))

# Operators whose inputs have to agree in size, where neither is one.
_BROADCASTS = frozenset("Add And Div Equal Expand Greater GreaterOrEqual Less LessOrEqual Mul Or Sub Where".split())

BATCH = (_SIZES[0][0], _SIZES[1][0])
"""Size of the batch in each walk."""


@dataclasses.dataclass(frozen=True)
class _Walk:
    shapes: dict[ir.Value, Shape]
    types: dict[ir.Value, onnx.TypeProto]
    constants: dict[ir.Value, np.ndarray]


class Probe:
    """Concrete shapes and small constants of one graph, as it is now: make a new one after an edit."""

    def __init__(self, model: ir.Model) -> None:
        alike: dict[str, str] = {}
        while True:
            try:
                self._walks = tuple(_walk(model, sizes, alike) for sizes in _SIZES)
            except _ClashError as clash:
                alike[clash.symbol] = clash.other
            else:
                return

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Shape under the first assignment of sizes, or None where it cannot be told."""
        return None if value is None else self._walks[0].shapes.get(value)

    def other_shape(self, value: ir.Value | None) -> Shape | None:
        """Shape under the second assignment."""
        return None if value is None else self._walks[1].shapes.get(value)

    def shapes(self, value: ir.Value | None) -> tuple[Shape | None, Shape | None]:
        """Shapes under both assignments."""
        return self.shape(value), self.other_shape(value)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """Type of a tensor's elements, or None where it cannot be told."""
        told = None if value is None else self._walks[0].types.get(value)
        return None if told is None else ir.DataType(told.tensor_type.elem_type)

    def stand_in(self, new: ir.Value, old: ir.Value) -> None:
        """Know a tensor that replaces another by the other's shape: positions stay those of the untouched graph."""
        for walk in self._walks:
            if old in walk.shapes:
                walk.shapes[new] = walk.shapes[old]

    def fixed(self, value: ir.Value | None, axis: int) -> bool:
        """Whether the size of an axis is the same for every input."""
        one, other = self.shapes(value)
        return one is not None and other is not None and one[axis] == other[axis]

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Content of a small tensor that is the same for every input, or None."""
        one, other = self.contents(value)
        same = one is not None and other is not None and one.shape == other.shape and np.array_equal(one, other)
        return one if same else None

    def contents(self, value: ir.Value | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Content of a small tensor under both assignments, None where it cannot be told."""
        if value is None:
            return None, None
        return self._walks[0].constants.get(value), self._walks[1].constants.get(value)


class _ClashError(Exception):
    """Two symbols of the file, which some operator needs to be one size."""

    def __init__(self, symbol: str, other: str) -> None:
        super().__init__(symbol, other)
        self.symbol, self.other = symbol, other


def _walk(model: ir.Model, sizes: Shape, alike: dict[str, str]) -> _Walk:
    bindings = _bind(model.graph, sizes, alike)
    shapes: dict[ir.Value, Shape] = {}
    types: dict[ir.Value, onnx.TypeProto] = {}
    constants: dict[ir.Value, np.ndarray] = {}

    def learn(value: ir.Value, shape: Shape | None, dtype: ir.DataType | None) -> None:
        if shape is not None:
            shapes[value] = shape
        if dtype is not None:
            types[value] = onnx.helper.make_tensor_type_proto(dtype.value, shape)

    for position, value in enumerate(model.graph.inputs):
        learn(value, _concrete(value.shape, bindings, position), value.dtype)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        learn(value, tuple(tensor.shape.numpy()), tensor.dtype)
        if tensor.size <= LARGEST_CONSTANT and tensor.dtype != ir.DataType.STRING:
            constants[value] = tensor.numpy()
    for node in model.graph:
        for value, shape, dtype in infer(node, model, shapes, types, constants):
            if shape is None:
                _look_for_clash(node, shapes, constants, bindings, alike)
            learn(value, shape if shape is not None else _concrete(value.shape, bindings), dtype or value.dtype)
        evaluate(node, model, shapes, constants)
    return _Walk(shapes, types, constants)


def _look_for_clash(
    node: ir.Node,
    shapes: dict[ir.Value, Shape],
    constants: dict[ir.Value, np.ndarray],
    bindings: dict[str, int],
    alike: dict[str, str],
) -> None:
    """Raise where a node cannot broadcast its inputs because two symbols have two sizes.

    Exporters may give the length of ids and of their mask two names, though the model needs them to be equal.
    """
    if node.op_type not in _BROADCASTS:
        return
    operands = [shapes[value] for value in node.inputs if value in shapes]
    if node.op_type == "Expand":
        content = constants.get(node.inputs[1]) if node.inputs[1] is not None else None
        operands = [*operands[:1], tuple(int(size) for size in content)] if content is not None else []
    names = {size: name for name, size in bindings.items() if name not in alike}
    for sizes in itertools.zip_longest(*(reversed(shape) for shape in operands), fillvalue=1):
        known = sorted(names[size] for size in set(sizes) if size in names)
        if len(known) == 2:
            raise _ClashError(known[1], known[0])


def _bind(graph: ir.Graph, sizes: Shape, alike: dict[str, str]) -> dict[str, int]:
    """Give every symbol of the graph's inputs a size of its own; a nameless dimension is bound by its position.

    All leading dimensions share one size: they are the batch, which exporters often name anew for every input. So do
    the symbols that `alike` names.
    """
    supply = itertools.chain(sizes[1:], itertools.count(sizes[-1] + 2, 2))
    bindings: dict[str, int] = {}
    free = [
        (axis, dim) for value in graph.inputs for axis, dim in enumerate(value.shape or ()) if not isinstance(dim, int)
    ]
    # Plain symbols first; what is left is a sum of them (`past + length`), or only looks like one (`batch-size`).
    for axis, dim in sorted(free, key=lambda pair: not (pair[1].value or "").isidentifier()):
        name = f"axis {axis}" if dim.value is None else dim.value
        if name not in bindings and (_size(dim, bindings) or 0) < 1:
            bindings[name] = sizes[0] if axis == 0 else next(supply)
    for name, other in alike.items():
        while other in alike:
            other = alike[other]
        bindings[name] = bindings[other]
    return bindings


def _size(dim: ir.SymbolicDim, bindings: dict[str, int]) -> int | None:
    """Size of a free dimension, None where its symbols are not bound."""
    if dim.value is None:
        return None
    if dim.value in bindings:
        return bindings[dim.value]
    try:
        size = dim.evaluate(bindings)
    except ValueError:  # The name is no expression.
        return None
    return size if isinstance(size, int) else None


def _concrete(shape: ir.Shape | None, bindings: dict[str, int], position: int | None = None) -> Shape | None:
    if shape is None:
        return None
    dims: list[int] = []
    for axis, dim in enumerate(shape):
        if isinstance(dim, int):
            dims.append(dim)
        elif dim.value is None:
            if position is None:
                return None
            dims.append(bindings[f"axis {axis}"])
        else:
            size = _size(dim, bindings)
            if size is None:
                return None
            dims.append(size)
    return tuple(dims)
