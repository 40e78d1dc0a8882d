"""The file of weights beside a plan."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from graph_passes.errors import GraphErrorCode, PlanError

WEIGHTS = "model.safetensors"
"""Name of the file of weights in the output folder of a run."""


class WeightFile(Mapping[str, np.ndarray]):
    """The parameters in a safetensors file, by name. The file is opened when a name or a parameter is read.

    Args:
        path: the file, e.g. `out/model.safetensors`.

    Raises (from any access):
        PlanError: the file is missing, damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._open().keys())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        array: np.ndarray = self._open().get_tensor(name)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="numpy")
        except FileNotFoundError as error:
            what = "it has the weights of the plan; put it into the plan's folder"
            message = f"{self.path}: there is no such file; {what}"
            raise PlanError(message, code=GraphErrorCode.FILE_MISSING, path=self.path) from error
        except (OSError, SafetensorError) as error:
            message = f"{self.path}: is damaged or truncated ({error}); copy it again"
            raise PlanError(message, code=GraphErrorCode.FILE_UNREADABLE, path=self.path) from error
