"""Gram matrices in a file, which together may take more memory than the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from compressor.selection.pruners.layerwise.gram import Gram


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

    def __getitem__(self, linear: str) -> Gram:
        if linear not in self._linears:
            raise KeyError(linear)
        with safetensors.safe_open(self._path, "numpy") as file:
            return Gram(file.get_tensor(f"{linear}.matrix"), bool(file.get_tensor(f"{linear}.has_ones")))

    def __iter__(self) -> Iterator[str]:
        return iter(self._linears)

    def __len__(self) -> int:
        return len(self._linears)


class GramFiles:
    """Gram matrices, as a file of a store."""

    _NAME = "grams.safetensors"

    def save(self, grams: Mapping[str, Gram], folder: Path) -> None:
        """Write the matrices."""
        tensors = {f"{name}.matrix": gram.matrix for name, gram in grams.items()}
        tensors |= {f"{name}.has_ones": np.array(gram.has_ones) for name, gram in grams.items()}
        safetensors.numpy.save_file(tensors, folder / self._NAME)

    def load(self, folder: Path) -> Mapping[str, Gram]:
        """The matrices, of which each is read when it is needed."""
        try:
            return StoredGrams(folder / self._NAME)
        except safetensors.SafetensorError as error:
            raise ValueError(str(error)) from error
