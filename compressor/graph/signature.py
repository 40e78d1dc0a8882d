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
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class OutputSpec:
    """An output of a graph.

    Attributes:
        dtype: its element type.
        shape: the size of each axis, rows first; None: any size.
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]
