"""Example inputs from a file, for a forward whose inputs cannot be generated."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError, suggestion
from compressor.targets.example_rows import read_arrays


def read_example(path: str | Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The arrays of an .npz file as inputs of a model, `[row, ...]` each, with equally many rows.

    Floating-point arrays become float32, integers int64.

    Raises:
        InputError: the file is missing or damaged, an array is not an input of the model, or rows are missing.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; write the inputs of the model with numpy.savez",
            code=ErrorCode.FILE_MISSING,
            path=path,
            field="example_inputs",
        )
    arrays = read_arrays(path)
    parameters = list(inspect.signature(model.forward).parameters)
    for name, array in arrays.items():
        if name not in parameters:
            raise _mismatch(path, name, f"{type(model).__name__} has no such input; {suggestion(name, parameters)}")
        if array.dtype.kind not in "fiub" or not array.ndim or not array.size:
            raise _mismatch(path, name, f"{array.dtype} {list(array.shape)} has no rows of numbers; give them")
        if len(array) != len(next(iter(arrays.values()))):
            raise _mismatch(path, name, f"{len(array)} rows, others have another number; give equally many")
    if not arrays:
        raise _mismatch(path, "", "the file has no arrays; give one for each input of the model")
    return {name: torch.from_numpy(_usual(array)) for name, array in arrays.items()}


def _usual(array: np.ndarray) -> np.ndarray:
    kinds = {"f": np.float32, "b": np.bool_}
    return np.ascontiguousarray(array, kinds.get(array.dtype.kind, np.int64))


def _mismatch(path: Path, name: str, problem: str) -> InputError:
    return InputError(
        f"{path}: {name}: {problem}" if name else f"{path}: {problem}",
        code=ErrorCode.TENSOR_MISMATCH,
        path=path,
        field="example_inputs",
        tensor=name,
    )
