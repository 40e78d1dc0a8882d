"""Example rows of a model's inputs, from which inputs of any size are made, and which an exported graph carries.

Some models run only on rows with certain ids, such as the end token that a classifier reads, or tokens that stand for
images. These ids are markers: a row that is resized keeps them, and its ordinary tokens are repeated or left out.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line

EXAMPLE_ROWS = "compressor.example_rows"
"""Metadata key of a graph: its example rows, as JSON."""
_TOKENS = "input_ids"
"""End of the name of an input with one id for each token."""
_LARGEST_ROW = 1024
"""Maximum number of floats in a row that a graph stores; longer rows are images and sounds, which may be any
numbers."""
_PADDED_SHARE = 4
"""A padded row has one padding token in this many tokens."""


@dataclass(frozen=True)
class ExampleRows:
    """Rows of a model's inputs.

    Attributes:
        inputs: arrays `[row, ...]` by name of the input, with equally many rows.
        markers: ids that belong to the layout of a row, such as its end token.
        padding: the id that rows are padded with.
        image_positions: number of `input_ids` that stand for an image; the length of the text does not count them.
    """

    inputs: Mapping[str, np.ndarray]
    markers: frozenset[int] = frozenset()
    padding: int = 0
    image_positions: int = 0

    def sized(
        self,
        batch: int,
        seq: int | Mapping[str, int],
        *,
        first: int = 0,
        padded: Collection[int] | None = None,
    ) -> dict[str, np.ndarray]:
        """The inputs with another number of rows, which are taken in turn, and another number of tokens.

        The tokens are the last axis of an input whose name ends in `input_ids`. Inputs of the same shape whose names
        have the same prefix, such as masks, are resized with it; other axes keep their sizes.

        Args:
            seq: number of tokens of a row, or that of each input of ids by its name.
            first: index of the first row that is taken.
            padded: indices of padded rows. A quarter of such a row is padding, at least one token, where there is a
                mask; other rows have no padding. None: each row keeps its share of padding.
        """
        rows = {name: array[(np.arange(batch) + first) % len(array)] for name, array in self.inputs.items()}
        for name, companions in _aligned(rows):
            length = seq if isinstance(seq, int) else seq[name]
            aligned = {key: rows[key] for key in (name, *companions)}
            if length == rows[name].shape[-1] and padded is None:
                continue
            rows |= self._resized(name, aligned, length, padded)
        return rows

    def _resized(
        self, name: str, arrays: Mapping[str, np.ndarray], length: int, padded: Collection[int] | None
    ) -> dict[str, np.ndarray]:
        """An input of ids, and those that are aligned with it, with another number of tokens."""
        ids = arrays[name]
        prefix = name.removesuffix(_TOKENS)
        mask = arrays.get(f"{prefix}attention_mask")
        kinds = arrays.get(f"{prefix}token_type_ids", np.zeros_like(ids))
        resized = {
            key: np.full(
                (*ids.shape[:-1], length, *array.shape[ids.ndim :]), self.padding if key == name else 0, array.dtype
            )
            for key, array in arrays.items()
        }
        for index in np.ndindex(ids.shape[:-1]):
            real = np.flatnonzero(mask[index]) if mask is not None and mask[index].any() else np.arange(ids.shape[-1])
            count = length
            if mask is not None:
                if padded is None:
                    count = max(1, round(length * len(real) / ids.shape[-1]))
                elif index[0] in padded:
                    count = max(1, length - max(1, length // _PADDED_SHARE))
            positions = _positions(ids[index], kinds[index], real, self.markers, count)
            start = length - count if real[0] > 0 else 0
            for key, array in arrays.items():
                resized[key][index][start : start + count] = array[index][positions]
        return resized


def _aligned(inputs: Mapping[str, np.ndarray]) -> Iterator[tuple[str, list[str]]]:
    """The inputs of ids, each with the names of the inputs that have values for each of its tokens."""
    tokens = [name for name, array in inputs.items() if name.endswith(_TOKENS) and array.ndim > 1]
    ids_of: dict[str, str] = {}
    for name in inputs:
        ids = max((ids for ids in tokens if name.startswith(ids.removesuffix(_TOKENS))), key=len, default=None)
        if ids is not None and inputs[name].shape[: inputs[ids].ndim] == inputs[ids].shape:
            ids_of[name] = ids
    for ids in tokens:
        yield ids, [name for name in ids_of if ids_of[name] == ids != name]


def _positions(
    ids: np.ndarray, kinds: np.ndarray, real: np.ndarray, markers: Collection[int], length: int
) -> np.ndarray:
    """Indices of the tokens of a row that make a row of another length, with every marker.

    Each span of ordinary tokens of one type keeps its share of the row, and is repeated or cut. A row that is too short
    for its markers keeps those after its last ordinary token first, such as the end token.

    Args:
        ids: ids of the row, `[token]`.
        kinds: token types, `[token]`.
        real: indices of the tokens that are not padding.
    """
    if len(real) == length:
        return real
    is_marker = np.isin(ids[real], list(markers))
    if is_marker.all():
        is_marker[:] = False
    ordinary = np.flatnonzero(~is_marker)
    room = length - int(is_marker.sum())
    if room < 0:
        marks = np.flatnonzero(is_marker)
        last = ordinary[-1]
        kept = [*marks[marks > last], *marks[marks < last][::-1]][:length]
        return real[sorted(kept)]
    keys = np.where(is_marker, -1 - np.arange(len(real)), kinds[real])
    starts = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    ends = [*starts[1:], len(real)]
    parts, read, before = [], 0, 0
    for start, end in zip(starts, ends, strict=True):
        if is_marker[start]:
            parts.append(real[start:end])
            continue
        read += end - start
        after = round(room * read / len(ordinary))
        parts.append(real[start + np.arange(after - before) % (end - start)])
        before = after
    return np.concatenate(parts)


def record_example_rows(model: ir.Model, example: ExampleRows) -> None:
    """Store example rows in a graph, so that trials, proofs and timings run on inputs that the model accepts.

    Memories and large inputs of real numbers, such as images, are left out, because they may be any numbers.

    Args:
        model: the graph, whose metadata are changed.
    """
    inputs = {
        name: array.tolist()
        for name, array in example.inputs.items()
        if not name.startswith("memory_") and (array.dtype.kind != "f" or array[0].size <= _LARGEST_ROW)
    }
    numbers = {"padding": example.padding, "image_positions": example.image_positions}
    content = {"inputs": inputs, "markers": sorted(example.markers), **numbers}
    model.metadata_props[EXAMPLE_ROWS] = json.dumps(content)


def read_example_rows(model: ir.Model) -> ExampleRows | None:
    """The rows that `record_example_rows` stored in a graph; None where there are none.

    Raises:
        InputError: the metadata of the graph have no valid rows under the key.
    """
    text = model.metadata_props.get(EXAMPLE_ROWS)
    if text is None:
        return None
    try:
        content = json.loads(text)
        inputs = {str(name): np.array(rows) for name, rows in content["inputs"].items()}
        if all(array.ndim and array.size and array.dtype.kind in "biuf" for array in inputs.values()):
            markers, numbers = frozenset(map(int, content["markers"])), (content["padding"], content["image_positions"])
            return ExampleRows(inputs, markers, *map(int, numbers))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    problem = (
        f"metadata {EXAMPLE_ROWS} of the graph: {text:.80} is no description of rows; remove the entry, or export the"
        " graph again"
    )
    raise InputError(problem, code=ErrorCode.FILE_UNREADABLE, value=text)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name.

    Raises:
        InputError: the file is not an archive of arrays, or holds pickled objects.
    """
    try:
        # np.load would leave the file open where its content is damaged, and returns a bare array for an .npy file.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        text = f"{path}: not a readable archive of arrays ({one_line(error)}); write it with numpy.savez"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path) from error
