"""The signature of a bare ONNX graph: the element types and axes of its inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class InputSpec:
    """An input of a graph.

    Attributes:
        dtype: its element type.
        shape: the size of each axis, rows first; None: any size.
        ids: number of ids in the table of embeddings that it is looked up in; None: it is no input of ids.
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]
    ids: int | None = None


@dataclass(frozen=True)
class OutputSpec:
    """An output of a graph.

    Attributes:
        dtype: its element type.
        shape: the size of each axis, rows first; None: any size.
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]
