"""Gram matrices in a file, which together may take more memory than the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from compressor.selection.pruners.layerwise.gram import Gram
from graph_passes.files import atomic_replace


class StoredGrams(Mapping[str, Gram]):
    """Module path of a linear -> Gram matrix of its inputs, read from the file at each access.

    Args:
        path: the file; it must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with safetensors.safe_open(path, "numpy") as file:
            keys: list[str] = list(file.keys())
        self._linears = [key.removesuffix(".matrix") for key in keys if key.endswith(".matrix")]

    @classmethod
    def read(cls, path: Path) -> Mapping[str, Gram]:
        """The matrices of a file; none without the file, or where it is damaged."""
        try:
            return cls(path)
        except (OSError, safetensors.SafetensorError):
            return {}

    @classmethod
    def write(cls, path: Path, grams: Mapping[str, Gram]) -> StoredGrams:
        """Write the matrices; the file is complete or not there."""
        tensors = {f"{name}.matrix": gram.matrix for name, gram in grams.items()}
        tensors |= {f"{name}.has_ones": np.array(gram.has_ones) for name, gram in grams.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as temporary:
            safetensors.numpy.save_file(tensors, temporary)
        return cls(path)

    def __getitem__(self, linear: str) -> Gram:
        if linear not in self._linears:
            raise KeyError(linear)
        with safetensors.safe_open(self._path, "numpy") as file:
            return Gram(file.get_tensor(f"{linear}.matrix"), bool(file.get_tensor(f"{linear}.has_ones")))

    def __iter__(self) -> Iterator[str]:
        return iter(self._linears)

    def __len__(self) -> int:
        return len(self._linears)
