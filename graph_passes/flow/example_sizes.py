"""Sizes of a graph's free dimensions with which it certainly runs, stored in the graph.

Shapes are inferred with placeholder sizes where any size works. An image of 3 x 5 has none of the patches of 16 x 16
that a model cuts it into, and many models accept one size of image only, so the exporter records the sizes of its
example.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graph_passes.errors import GraphError, GraphErrorCode

EXAMPLE_SIZES = "graph_passes.example_sizes"
"""Metadata key of a graph: name of a free dimension -> its size, as JSON."""


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
        f"metadata {EXAMPLE_SIZES} of the graph: {text:.80} does not map names of dimensions to sizes; remove it, or"
        ' write e.g. {"height": 224}',
        code=GraphErrorCode.FILE_UNREADABLE,
        value=text,
    )


def symbol_of(axis: int, dim: ir.SymbolicDim) -> str:
    """The name of a free dimension; a nameless one is named by its axis."""
    return f"axis {axis}" if dim.value is None else dim.value
