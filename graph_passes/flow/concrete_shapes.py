"""Infer the shape of every tensor of a graph by walking it twice with concrete sizes for the free dimensions.

Exporters record shapes incompletely: dimensions are symbols, targets of `Reshape` are computed from `Shape`, and
nothing is inferred beyond operators of other domains. With every free dimension set to a number, shapes become
arithmetic on small constants. Two walks with different numbers distinguish fixed sizes (equal in both) from those that
depend on the graph's inputs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.node_calls import Known, Shape
from graph_passes.flow.node_inference import (
    LARGEST_CONSTANT,
    evaluate,
    has_window,
    infer,
    leaves_nothing,
    spatial_sizes,
)
from graph_passes.flow.sizes import (
    SCALES,
    SizePair,
    Sizes,
    bind,
    concrete,
    example_sizes,
    is_selection,
    placeholder_sizes,
    sizes_of_example,
    with_selection,
)
from graph_passes.tape import source_before

Shapes = tuple[Shape | None, Shape | None]
"""Shapes of a tensor under both assignments of sizes; None where it is unknown."""

# Operators whose inputs must agree in size, or have size one.
_BROADCASTS = frozenset("Add And Div Equal Expand Greater GreaterOrEqual Less LessOrEqual Mul Or Sub Where".split())

_ROUNDING = frozenset(("Add", "Div"))
"""Arithmetic that rounds lengths: a quotient, and the sum of a length and its padding to whole blocks."""


_CLIPS = ("Slice", "Min", "TopK")
"""Operators whose outputs may have one size for several input sizes: `[:4]` has four elements of ten, and three of
three."""


class Probe:
    """Concrete shapes and small constants of one graph in its present state; after an edit, construct a new one."""

    def __init__(self, model: ir.Model) -> None:
        self._walks = _suitable_walks(model)

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Shape under the first assignment of sizes, or None where it is unknown."""
        return None if value is None else self._walks[0].shapes.get(value)

    def shapes(self, value: ir.Value | None) -> Shapes:
        """Shapes under both assignments, None where they are unknown."""
        return self.shape(value), None if value is None else self._walks[1].shapes.get(value)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """Type of a tensor's elements, or None where it is unknown."""
        return None if value is None else self._walks[0].types.get(value)

    def exchanged(self) -> Probe:
        """The same shapes, with the second assignment of sizes as the first; both objects share later additions."""
        exchanged = copy.copy(self)
        exchanged._walks = self._walks[::-1]
        return exchanged

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

    def is_zero(self, value: ir.Value | None) -> bool:
        """Whether a tensor holds zeros, whatever its size is."""
        content = self.constant(source_before(value, ("Expand", "Identity")))
        return content is not None and not content.any()

    @property
    def known(self) -> Collection[ir.Value]:
        """The tensors whose content is known under the first assignment."""
        return self._walks[0].constants.keys()

    def contents(self, value: ir.Value | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Content of a small tensor under both assignments, None where it is unknown."""
        if value is None:
            return None, None
        return self._walks[0].constants.get(value), self._walks[1].constants.get(value)


class _UnsuitableError(Exception):
    """Sizes with which a graph cannot run."""


class _TooSmallError(_UnsuitableError):
    """Sizes with which a window is larger than its input."""


class _ClashError(Exception):
    """Two symbols of the file (`args`) that must have one size for some operator."""


def _suitable_walks(model: ir.Model) -> tuple[Known, Known]:
    """Walks with the first sizes that suit a graph. Where none do, shapes are left unknown at what does not fit.

    Sizes that some operator merges, e.g. a division of lengths below the divisor, are replaced by larger ones: what it
    returns would pass for a fixed size. If some node merges every candidate, the sizes that the fewest nodes merge are
    taken.
    """
    example = example_sizes(model)
    fallback = placeholder_sizes()
    merged: tuple[Known, Known] | None = None
    fewest = 0
    attempts = itertools.chain([fallback], sizes_of_example(example) if example else map(placeholder_sizes, SCALES))
    for pair in attempts:
        if merged is not None and pair[0].example == pair[1].example and example:
            break  # with the same sizes in both walks, nothing is merged and everything passes for fixed
        try:
            walks = _strict_walks(model, pair)
        except _UnsuitableError as error:
            if example:
                fallback = pair
            elif not isinstance(error, _TooSmallError):
                break  # larger sizes do not help
            continue
        merges = sum(_merges_sizes(node, *walks) for node in model.graph)
        if not merges:
            return walks
        if merged is None or merges < fewest:
            merged, fewest = walks, merges
    return merged or _walks(model, fallback, strict=False)


def _strict_walks(model: ir.Model, pair: SizePair) -> tuple[Known, Known]:
    """Both walks; what a `NonZero` selects has a placeholder size where the graph can run with it, and else none."""
    if any(node.op_type == "NonZero" for node in model.graph):
        with contextlib.suppress(_UnsuitableError):
            walks = _walks(model, with_selection(pair), strict=True)
            if not any(_clips_selection(node, walks) for node in model.graph):
                return walks
    return _walks(model, pair, strict=True)


def _merges_sizes(node: ir.Node, first: Known, second: Known) -> bool:
    """Whether a node gives one size for two: a window with a stride, or arithmetic of sizes."""
    if _window_merges_sizes(node, first, second):
        return True
    if node.op_type == "Pad":
        ends = [value for value in (node.inputs[0], node.outputs[0]) if value is not None]
        sizes = [walk.shapes.get(value, ()) for value in ends for walk in (first, second)]
        return any(a != b and c == d for a, b, c, d in zip(*sizes, strict=False))
    values = [*node.inputs, *node.outputs]
    if node.op_type not in _ROUNDING or any(v not in first.constants or v not in second.constants for v in values):
        return False
    numbers = [[walk.constants[value] for value in values if value is not None] for walk in (first, second)]
    if any(array.dtype.kind != "i" or array.size != 1 or array.min() < 0 for array in itertools.chain(*numbers)):
        return False
    if node.op_type == "Div" and all(int(n.item()) % max(int(d.item()), 1) == 0 for n, d, _ in numbers):
        return False  # nothing is rounded: a width that is computed from two lengths, say
    differ = [int(a.item()) != int(b.item()) for a, b in zip(*numbers, strict=True)]
    return any(differ[:-1]) and not differ[-1]


def _clips_selection(node: ir.Node, walks: Sequence[Known]) -> bool:
    """Whether a node gives one size for those of a selection, which passes for fixed: fewer elements have another."""
    if node.op_type not in _CLIPS:
        return False
    before = [pair for value in node.inputs for pair in _numbers(value, walks)]
    return any(is_selection(*pair) for pair in before) and any(a == b for a, b in _numbers(node.outputs[0], walks))


def _numbers(value: ir.Value | None, walks: Sequence[Known]) -> list[tuple[int, int]]:
    """The sizes of a tensor, and its whole numbers where its content is known, under both assignments."""
    if value is None:
        return []
    sizes = [walk.shapes.get(value, ()) for walk in walks]
    contents = [walk.constants.get(value) for walk in walks]
    numbers = [array.reshape(-1).tolist() for array in contents if array is not None and array.dtype.kind == "i"]
    return [*zip(*sizes, strict=False), *(zip(*numbers, strict=False) if len(numbers) == len(walks) else ())]


def _window_merges_sizes(node: ir.Node, first: Known, second: Known) -> bool:
    """Whether the window of a convolution or a pooling gives one size for inputs of two sizes.

    Strides do so to small sizes, e.g. a stride of two to sizes of one and two; the size would pass for a fixed one.
    """
    if not has_window(node):
        return False
    before, after = (
        [spatial_sizes(value, walk.shapes) for walk in (first, second)] for value in (node.inputs[0], node.outputs[0])
    )
    pairs = zip(zip(*before, strict=False), zip(*after, strict=False), strict=False)
    return any(sizes[0] != sizes[1] and windows[0] == windows[1] for sizes, windows in pairs)


def _walks(model: ir.Model, pair: SizePair, *, strict: bool) -> tuple[Known, Known]:
    """Both walks, with one size for symbols that an operator needs to be equal."""
    aliases: dict[str, str] = {}
    coincidences: set[tuple[str, str]] = set()
    while True:
        walks: list[Known] = []
        clashes: list[tuple[str, ...]] = []
        for sizes in pair:
            try:
                walks.append(_walk(model, sizes, aliases, coincidences, strict=strict))
            except _ClashError as clash:
                clashes.append(clash.args)
        if not clashes:
            return walks[0], walks[1]
        if len(clashes) == 2 and clashes[0] == clashes[1]:
            aliases[clashes[0][0]] = clashes[0][1]
        else:  # a fixed size is that of a symbol under one assignment
            coincidences.update((symbol, equal) for symbol, equal in clashes)


def _walk(
    model: ir.Model, sizes: Sizes, aliases: dict[str, str], coincidences: Collection[tuple[str, str]], *, strict: bool
) -> Known:
    """Infer every node under one assignment of sizes.

    `strict` stops where the graph cannot run with these sizes. `aliases` have the size of another symbol, and
    `coincidences` are pairs of symbols that need not have one size, although an operator cannot broadcast theirs.
    """
    bindings, known = bind(model.graph, sizes, aliases), Known()

    def record(value: ir.Value, shape: Shape | None, dtype: ir.DataType | None) -> None:
        if shape is not None:
            known.shapes[value] = shape
        if dtype is not None:
            known.types[value] = dtype

    for value in model.graph.inputs:
        record(value, concrete(value.shape, bindings, is_input=True), value.dtype)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        record(value, tuple(tensor.shape.numpy()), tensor.dtype)
        if tensor.size <= LARGEST_CONSTANT and tensor.dtype != ir.DataType.STRING:
            known.constants[value] = tensor.numpy()
    for node in model.graph:
        if strict and leaves_nothing(node, known.shapes):
            raise _TooSmallError
        for value, shape, dtype in infer(node, model, known):
            if node.op_type == "NonZero" and sizes.selected is not None:
                shape = _selected_shape(node.inputs[0], sizes.selected, known)
            fits = shape is not None or _can_broadcast(node, known, bindings, aliases, coincidences)
            shape = shape if shape is not None else concrete(value.shape, bindings)
            if strict and not (fits and _keeps_elements(node, shape, known.shapes)):
                raise _UnsuitableError
            record(value, shape, dtype or value.dtype)
        evaluate(node, model, known)
    return known


def _selected_shape(source: ir.Value | None, selected: int, known: Known) -> Shape | None:
    """Shape of the positions `[axis, n]` of a tensor's nonzero elements; None: the shape of the tensor is unknown.

    Where its content is unknown, it has `selected` nonzero elements.
    """
    if source is None or source not in known.shapes:
        return None
    content = known.constants.get(source)
    return len(known.shapes[source]), selected if content is None else int(np.count_nonzero(content))


def _keeps_elements(node: ir.Node, shape: Shape | None, shapes: dict[ir.Value, Shape]) -> bool:
    """Whether a node with an output of some shape is no `Reshape` of another number of elements.

    The number differs if a `Slice` before the node reaches past the end of a table and returns fewer elements.
    """
    source = node.inputs[0] if node.op_type == "Reshape" else None
    if shape is None or source is None or source not in shapes:
        return True
    elements, expected = (int(np.prod(sizes, dtype=np.int64)) for sizes in (shape, shapes[source]))
    return elements == expected


def _can_broadcast(
    node: ir.Node,
    known: Known,
    bindings: dict[str, int],
    aliases: dict[str, str],
    coincidences: Collection[tuple[str, str]],
) -> bool:
    """Whether a node can broadcast its inputs; true if it is no operator that broadcasts.

    Exporters may give the length of ids and that of their mask two names, although the model needs them to be equal: a
    `_ClashError` names both.
    """
    if node.op_type not in _BROADCASTS:
        return True
    operands = [known.shapes[value] for value in node.inputs if value in known.shapes]
    if node.op_type == "Expand":
        content = known.constants.get(node.inputs[1]) if node.inputs[1] is not None else None
        operands = [*operands[:1], tuple(int(size) for size in content)] if content is not None else []
    symbols = {size: symbol for symbol, size in bindings.items() if symbol not in aliases}
    columns = list(itertools.zip_longest(*(reversed(shape) for shape in operands), fillvalue=1))
    for sizes in columns:
        clashing = sorted(symbols[size] for size in set(sizes) if size in symbols)
        if len(clashing) == 2 and (clashing[1], clashing[0]) not in coincidences:
            raise _ClashError(clashing[1], clashing[0])
    return all(len(set(sizes) - {1}) <= 1 for sizes in columns)
