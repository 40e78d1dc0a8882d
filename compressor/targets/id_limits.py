"""The tables of a graph that its inputs index, and the check that arrays hold no other ids."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, RowError
from compressor.targets.random_inputs import table_sizes

_BOUNDING = frozenset(("Clip", "Where"))
"""Operators that may replace ids outside of a table."""


def id_limits(model: ir.Model) -> dict[str, int]:
    """Number of ids of the smallest table that each input indexes; inputs that index none are left out."""
    sizes = {str(value.name): min(table_sizes(value, without=_BOUNDING), default=0) for value in model.graph.inputs}
    return {name: size for name, size in sizes.items() if size}


def require_ids(arrays: Mapping[str, np.ndarray], limits: Mapping[str, int], source: str) -> None:
    """Check that every id has a row in the table of its input; runtimes read other memory in its place, or fail.

    Args:
        arrays: input name -> array `[row, ...]`.
        limits: those of `id_limits`.
        source: name of the rows in error messages.

    Raises:
        InputError: an id has none; a negative one counts from the end of the table.
    """
    for name, size in limits.items():
        array = arrays.get(name)
        if array is None or not array.size or array.dtype.kind not in "iu":
            continue
        outside = (array >= size) | (array < -size)
        if outside.any():
            position = np.argwhere(outside)[0]
            number = int(array[tuple(position)])
            raise RowError.of(
                source,
                int(position[0]) + 1 if array.ndim else 1,
                f"{name} has the id {number}, outside of the graph's table of {size} rows; give ids of the tokenizer"
                " that the model was trained with, or export the model with a table for all of its tokens",
                code=ErrorCode.ID_OUTSIDE_TABLE,
                input=name,
                id=number,
                size=size,
            )
