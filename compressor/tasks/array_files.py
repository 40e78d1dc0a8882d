"""Read the rows of a bare graph: arrays `[row, ...]` by the names of its inputs, from .npz and .npy files."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from compressor.config.values import ARRAYS
from compressor.errors import ErrorCode, InputError, RowError, suggestion
from compressor.graph.program import InputSpec
from compressor.silence_libraries import one_line
from compressor.tasks.splits import files_by_split

MASK = "attention_mask"
_SINGLE = ".npy"
_CHUNK_BYTES = 2**24
"""Size of the rows whose values are checked at once."""
_DAMAGED = (ValueError, EOFError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Errors of numpy and `zipfile` for files that are damaged, encrypted, or no arrays."""


@dataclass(frozen=True, eq=False)
class RowArrays:
    """The arrays of a .npz file, or of a folder of .npy files, which are memory-mapped.

    Attributes:
        path: the file or the folder.
        arrays: the inputs, and labels if there are any, `[row, ...]` each.
    """

    path: Path
    arrays: Mapping[str, np.ndarray]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.arrays.values())))


def names_arrays(source: str) -> bool:
    """Whether rows are arrays: a .npz file, or a folder of .npz or .npy files."""
    path = Path(source)
    if path.is_dir():
        return any(any(path.glob(f"*{suffix}")) for suffix in (ARRAYS, _SINGLE))
    return path.suffix.lower() == ARRAYS


def read_arrays(source: str) -> dict[str, list[RowArrays]]:
    """The arrays of a .npz file, a folder of .npy files, or a folder of .npz files, by the name of their split.

    The files of a folder of .npz are of one split named `""`, unless their names begin with those of splits, such as
    `train-0.npz` and `dev.npz`.

    Args:
        source: path of the file or the folder.

    Raises:
        InputError: there is no such file, it is damaged, has objects that would be unpickled, or is something else.
    """
    path = Path(source)
    if not path.is_dir():
        if path.exists() and path.suffix.lower() != ARRAYS:
            raise _no_arrays(path, ErrorCode.INVALID_VALUE)
        return {"": [_read_archive(path)]}
    files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    archives, singles = ([file for file in files if file.suffix.lower() == end] for end in (ARRAYS, _SINGLE))
    if archives and singles:
        text = f"{path}: has {archives[0].name} and {singles[0].name}; keep files of one kind in the folder"
        raise InputError(text, code=ErrorCode.CONTRADICTION, path=path)
    if singles:
        return {"": [RowArrays(path, {file.stem: _map_single(file) for file in singles})]}
    if not archives:
        raise _no_arrays(path, ErrorCode.FILE_MISSING)
    return {split: [_read_archive(file) for file in named] for split, named in files_by_split(archives, source).items()}


def check_arrays(part: RowArrays, inputs: Mapping[str, InputSpec], labels: Collection[str]) -> None:
    """Check that arrays are what a graph reads, so that `cast` converts them without a loss of rows or range.

    Args:
        part: the arrays.
        inputs: the inputs of the graph.
        labels: names of arrays that are no inputs.

    Raises:
        InputError: an input has no array, an array belongs to no input, or has another number of rows, type or axes.
        RowError: a row has a number that its type cannot hold, an id below zero, no token, or NaN or infinity.
    """
    arrays, path = part.arrays, part.path
    for name in (name for name in inputs if name not in arrays):
        text = f"{path}: no array is named {name!r}, an input of the graph; add it"
        raise InputError(text, code=ErrorCode.COLUMN_MISSING, path=path, input=name, columns=tuple(arrays))
    for name in (name for name in arrays if name not in inputs and name not in labels):
        text = f"{path}: the array {name!r} is no input of the graph, and no label; {suggestion(name, list(inputs))}"
        raise InputError(text, code=ErrorCode.UNKNOWN_NAME, path=path, array=name, known=tuple(inputs))
    for name, array in arrays.items():
        if not array.ndim:
            raise _mismatch(part, name, "is a single number", "[row, ...]", shape=())
        if len(array) != part.rows:
            first = next(iter(arrays))
            text = f"{path}: {name!r} has {len(array)} rows, {first!r} has {part.rows}; give each array the same rows"
            details = {"path": path, "array": name, "rows": len(array), "expected": part.rows}
            raise InputError(text, code=ErrorCode.INVALID_ROWS, **details)
    if not part.rows:
        text = f"{path}: has no rows; give at least one"
        raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, path=path, rows=0)
    for name, spec in inputs.items():
        _check_type(part, name, spec)
        for start, rows in _chunks(arrays[name]):
            _check_values(part, name, spec, start, rows, are_ids=_are_ids(name, inputs))


def needed_casts(part: RowArrays, inputs: Mapping[str, InputSpec]) -> list[str]:
    """`name (int32 to int64)` of every array that has another type than its input."""
    types = {name: (part.arrays[name].dtype, spec.dtype) for name, spec in inputs.items()}
    return [f"{name} ({before} to {after})" for name, (before, after) in types.items() if before != after]


def _are_ids(name: str, inputs: Mapping[str, InputSpec]) -> bool:
    """Whether an input holds ids of tokens or the like: integers named so, or the only integers of the graph."""
    integers = [other for other, spec in inputs.items() if spec.dtype.kind in "iu"]
    return name in integers and ("ids" in name.lower() or len(integers) == 1)


def _no_arrays(path: Path, code: ErrorCode) -> InputError:
    text = (
        f"{path}: no arrays; the rows of a graph without a tokenizer are a {ARRAYS} file with an array per input, a"
        f" folder of them, or a folder with a {_SINGLE} file per input"
    )
    return InputError(text, code=code, path=path)


def _read_archive(path: Path) -> RowArrays:
    """The arrays of a .npz file, in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(_SINGLE) for name in archive.namelist() if name.endswith(_SINGLE)]
            for name in names:
                with archive.open(f"{name}{_SINGLE}") as member:
                    _require_numbers(path, name, member)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names}
    except OSError as error:
        raise _unreadable(path, error) from error
    except _DAMAGED as error:
        raise _damaged(path, one_line(error)) from error
    if not arrays:
        raise _no_arrays(path, ErrorCode.FILE_UNREADABLE)
    return RowArrays(path, arrays)


def _map_single(path: Path) -> np.ndarray:
    """The array of a .npy file, memory-mapped."""
    try:
        with path.open("rb") as file:
            shape = _require_numbers(path, path.stem, file)
        array: np.ndarray = np.load(path, mmap_mode=None if 0 in shape else "r", allow_pickle=False)
    except OSError as error:
        raise _unreadable(path, error) from error
    except _DAMAGED as error:
        raise _damaged(path, one_line(error)) from error
    return array


def _require_numbers(path: Path, name: str, file: IO[bytes]) -> tuple[int, ...]:
    """The shape that the header of an array declares; raise InputError unless it holds numbers, ValueError if damaged.

    Nothing of an array of objects is unpickled.
    """
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.kind not in "biuf":
        kind = "objects" if dtype.hasobject else str(dtype)
        text = f"{path}: the array {name!r} holds {kind}, not numbers; save it with a type of integers or floats"
        raise InputError(text, code=ErrorCode.INVALID_ROWS, path=path, array=name, dtype=str(dtype))
    return tuple(shape)


def _unreadable(path: Path, error: OSError) -> InputError:
    code = ErrorCode.FILE_MISSING if isinstance(error, FileNotFoundError) else ErrorCode.FILE_UNREADABLE
    text = f"{path}: cannot be read ({error.strerror or one_line(error)}); check the path"
    return InputError(text, code=code, path=path)


def _damaged(path: Path, reason: str) -> InputError:
    text = f"{path}: is damaged, or no file of numpy ({reason}); save it again"
    return InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path, reason=reason)


def _mismatch(part: RowArrays, name: str, problem: str, needed: str, **details: Any) -> InputError:
    text = f"{part.path}: the array {name!r} {problem}; the graph reads {needed}"
    return InputError(text, code=ErrorCode.TENSOR_MISMATCH, path=part.path, array=name, **details)


def _check_type(part: RowArrays, name: str, spec: InputSpec) -> None:
    """Raise InputError unless an array has the axes of its input, and integers for integers or floats for floats."""
    array = part.arrays[name]
    if (array.dtype.kind == "f") != (spec.dtype.kind == "f"):
        raise _mismatch(part, name, f"is {array.dtype}", str(spec.dtype), dtype=array.dtype, expected=spec.dtype)
    fits = array.ndim == len(spec.shape) and all(
        size > 0 and wanted in (None, size) for size, wanted in zip(array.shape[1:], spec.shape[1:], strict=True)
    )
    if not fits:
        details = {"shape": array.shape, "expected": spec.shape}
        raise _mismatch(part, name, f"is {_axes(array.shape[1:])}", _axes(spec.shape[1:]), **details)


def _axes(sizes: Sequence[int | None]) -> str:
    """Axes after that of the rows, e.g. `[row, 3, any]`."""
    return f"[{', '.join(['row', *('any' if size is None else str(size) for size in sizes)])}]"


def _chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Consecutive rows of an array, each chunk with the number of rows before it."""
    count = max(1, _CHUNK_BYTES * len(array) // max(1, array.nbytes))
    for start in range(0, len(array), count):
        yield start, array[start : start + count]


def _check_values(part: RowArrays, name: str, spec: InputSpec, start: int, rows: np.ndarray, *, are_ids: bool) -> None:
    """Raise RowError for the first of these rows with a number that the graph cannot read."""
    if spec.dtype.kind == "f":
        with np.errstate(over="ignore"):
            wrong, problem = ~np.isfinite(rows.astype(spec.dtype, copy=False)), f"is not finite as {spec.dtype}"
        code = ErrorCode.NOT_FINITE
    else:
        info = None if spec.dtype.kind == "b" else np.iinfo(spec.dtype)
        lowest, highest = (0, 1) if info is None else (int(info.min), int(info.max))
        lowest = max(0, lowest) if are_ids or spec.ids is not None else lowest
        highest = highest if spec.ids is None else spec.ids - 1
        wrong, problem = (rows < lowest) | (rows > highest), f"is no number from {lowest} to {highest}"
        code = ErrorCode.INVALID_ROWS if spec.ids is None else ErrorCode.ID_OUTSIDE_TABLE
    flat = wrong.reshape(len(rows), -1)
    if flat.any():
        row = int(flat.any(1).argmax())
        value = rows[row].reshape(-1)[int(flat[row].argmax())].item()
        text = f"{value} in {name!r} {problem}; correct it or remove the row"
        raise RowError.of(str(part.path), start + row + 1, text, code=code, file=part.path, array=name, value=value)
    if name == MASK and rows.ndim > 1 and not (kept := rows.reshape(len(rows), -1).any(1)).all():
        row = int(kept.argmin())
        text = f"every number in {name!r} is zero; give the row a token or remove it"
        raise RowError.of(str(part.path), start + row + 1, text, file=part.path, array=name, value=0)
