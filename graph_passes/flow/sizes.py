"""Sizes of the free dimensions of a graph for walks that infer its shapes.

If a graph runs with any sizes, they are placeholders. If placeholders do not suit it (an image smaller than a patch, or
with a wrong number of patches), the sizes are those of the example that the graph was exported with, and in the second
walk multiples or parts of them; without an example, the placeholders are raised until every window fits and none merges
two sizes.

An exporter records the sizes of its example, since an image of 3 x 5 has none of the patches of 16 x 16 that a model
cuts it into, and many models accept one size of image only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from graph_passes.errors import GraphError, GraphErrorCode
from graph_passes.flow.node_calls import Shape

EXAMPLE_SIZES = "graph_passes.example_sizes"
"""Metadata key of a graph: name of a free dimension -> its size, as JSON."""

# Free dimensions take these sizes in order of appearance. All pairs differ, so that two symbols are never confused, and
# lengths differ by more than a factor of two, so that a quotient of them (blocks of 4 positions) is no constant. The
# differences of the pairs are twice different primes, so that a length with some special tokens is no other length, nor
# a multiple of the batch: s + 2 is never t, and s + 13 never 6 * b.
_PLACEHOLDERS = ((3, 5, 7, 11, 13, 17, 19, 23), (13, 19, 29, 37, 47, 79, 101, 61))
SCALES = tuple(2**power for power in range(2, 14))
"""Factors by which placeholder sizes are raised. Powers of two stay divisible by strides."""

_SELECTED = (1009, 2003)
"""Number of elements that a `NonZero` selects under each assignment, which no axis of a usual example has."""

BATCH = (_PLACEHOLDERS[0][0], _PLACEHOLDERS[1][0])
"""Size of the batch under each assignment."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of one walk.

    Attributes:
        placeholders: sizes of free dimensions in order of appearance, the batch first.
        scale: factor of these sizes, except the batch.
        example: sizes of dimensions that have no placeholder, by symbol.
        selected: number of elements that a `NonZero` selects, which depends on the data; None: it is unknown.
    """

    placeholders: Shape
    scale: int = 1
    example: Mapping[str, int] = dataclasses.field(default_factory=dict)
    selected: int | None = None


SizePair = tuple[Sizes, Sizes]
"""The sizes of both walks."""


def placeholder_sizes(scale: int = 1) -> SizePair:
    """Small sizes that differ from each other, raised by a factor."""
    return Sizes(_PLACEHOLDERS[0], scale), Sizes(_PLACEHOLDERS[1], scale)


def sizes_of_example(example: Mapping[str, int]) -> Iterator[SizePair]:
    """The sizes of an example, with other sizes in the second walk that such a graph may accept; at last with the same.

    In the second walk every dimension has another factor, so that height and width are not confused.
    """
    numbered = [(number, symbol, size) for number, (symbol, size) in enumerate(example.items())]
    multiples = {symbol: size * (2 + number) for number, symbol, size in numbered}
    parts = {symbol: max(1, size // 2 ** (1 + number)) for number, symbol, size in numbered}
    for second in (multiples, parts, example):
        yield Sizes(_PLACEHOLDERS[0], example=example), Sizes(_PLACEHOLDERS[1], example=second)


def with_selection(pair: SizePair) -> SizePair:
    """The sizes of both walks with a placeholder for the number of elements that every `NonZero` selects.

    One number serves all: a model that combines two selections needs them to be equal.
    """
    first, second = (dataclasses.replace(sizes, selected=count) for sizes, count in zip(pair, _SELECTED, strict=True))
    return first, second


def is_selection(first: int, second: int) -> bool:
    """Whether the sizes of an axis under both assignments are a multiple of those of a selection: it may be empty."""
    return 0 < first < second and first * _SELECTED[1] == second * _SELECTED[0]


def bind(graph: ir.Graph, sizes: Sizes, aliases: dict[str, str]) -> dict[str, int]:
    """Give every symbol of the graph's inputs its own size; a nameless dimension is bound by its axis.

    All leading dimensions share one size: they are the batch, which exporters often name differently for every input.
    Symbols in `aliases` share the size of another symbol.
    """
    placeholders = sizes.placeholders
    supply = itertools.chain(placeholders[1:], itertools.count(placeholders[-1] + 2, 2))
    bindings: dict[str, int] = dict(sizes.example)
    free = [
        (axis, dim) for value in graph.inputs for axis, dim in enumerate(value.shape or ()) if not isinstance(dim, int)
    ]
    # Plain symbols first; others are sums of symbols (`past + length`), or only look like one (`batch-size`).
    for axis, dim in sorted(free, key=lambda pair: not (pair[1].value or "").isidentifier()):
        symbol = symbol_of(axis, dim)
        if symbol not in bindings and (_size(dim, bindings) or 0) < 1:
            bindings[symbol] = placeholders[0] if axis == 0 else sizes.scale * next(supply)
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


def concrete(shape: ir.Shape | None, bindings: dict[str, int], *, is_input: bool = False) -> Shape | None:
    """A shape of the file with its symbols replaced by sizes, None where one of them is unknown.

    Nameless dimensions have a size only in the graph's inputs, where `bind` binds them by axis.
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


def record_example_sizes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> None:
    """Store the sizes that the free dimensions of images, sounds and other inputs of real numbers have in an example.

    The batch and the lengths of token ids are left out, since a graph runs with any.

    Args:
        model: the graph, whose metadata are changed.
        shapes: shape of the example for each input of the graph, by name.
    """
    sizes: dict[str, int] = {}
    for value in model.graph.inputs:
        is_real = value.dtype is not None and value.dtype.is_floating_point()
        shape = shapes.get(value.name or "", ()) if is_real else ()
        for axis, (dim, size) in enumerate(zip(value.shape or (), shape, strict=False)):
            if axis and isinstance(dim, ir.SymbolicDim) and (dim.value or "_").isidentifier():
                sizes[symbol_of(axis, dim)] = int(size)
    if sizes:
        model.metadata_props[EXAMPLE_SIZES] = json.dumps(sizes)


def example_sizes(model: ir.Model) -> dict[str, int]:
    """The sizes that `record_example_sizes` stored; empty where there are none.

    Raises:
        GraphError: the metadata of the graph hold something else.
    """
    text = model.metadata_props.get(EXAMPLE_SIZES, "{}")
    try:
        sizes = json.loads(text)
        if all(isinstance(size, int) and size > 0 for size in sizes.values()):
            return dict(sizes)
    except (ValueError, AttributeError):
        pass
    raise GraphError(
        f"metadata {EXAMPLE_SIZES} of the graph: {text:.80} does not map names of dimensions to sizes; remove the"
        ' entry, or write e.g. {"height": 224}',
        code=GraphErrorCode.FILE_UNREADABLE,
        value=text,
    )


def symbol_of(axis: int, dim: ir.SymbolicDim) -> str:
    """The name of a free dimension; a nameless one is named by its axis."""
    return f"axis {axis}" if dim.value is None else dim.value
