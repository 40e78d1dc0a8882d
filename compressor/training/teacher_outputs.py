"""Outputs of a teacher, computed once for each row and kept in a memory-mapped file."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compressor.answers import DECODER_IDS, LABELS, MASK, SPAN_ENDS
from compressor.processes import process_count
from compressor.store import Store
from graph_passes.files import atomic_replace

logger = logging.getLogger(__name__)

Outputs = dict[str, Tensor]
"""Outputs of a model by name, `[batch, ...]` each."""
_NAME, _VALUES, _INDEX = "teacher", "outputs.float16", "outputs.npz"
_DISK_SHARE = 0.5
"""Share of the free disk that the file may take at most."""


class _NotKeptError(Exception):
    """Outputs cannot be kept; the message says why."""


@dataclass(frozen=True)
class _Layout:
    """How the outputs of a row lie in the file, one after another.

    Attributes:
        shapes: name -> shape of the output of a row, without its axis of positions.
        by_position: names of the outputs with an axis of positions, which comes first.
    """

    shapes: Mapping[str, tuple[int, ...]]
    by_position: frozenset[str]

    @classmethod
    def of(cls, outputs: Outputs, inputs: Mapping[str, Tensor]) -> _Layout:
        """The layout of the outputs of a batch; raise _NotKeptError if one does not consist of rows and positions."""
        shapes, by_position, masks = dict[str, tuple[int, ...]](), set[str](), _masks(inputs)
        for name, value in outputs.items():
            if MASK in inputs and (value.dim() > 2 or name in SPAN_ENDS):
                by_position.add(name)
            axes = 2 if name in by_position else 1
            if value.shape[:axes] != masks.shape[:axes]:
                raise _NotKeptError(f"{name} does not have the rows and positions of the inputs as axes")
            shapes[name] = tuple(value.shape[axes:])
        return cls(shapes, frozenset(by_position))

    def numbers(self, positions: int) -> list[int]:
        """Numbers of each output of a row with as many positions."""
        return [
            math.prod(shape) * (positions if name in self.by_position else 1) for name, shape in self.shapes.items()
        ]


class KeptOutputs:
    """Outputs of a model by row, from a file where they are known, else computed and added to it.

    Rows are recognized by their inputs, without padding. Numbers are stored as float16 and rounded to float16 on their
    first use too, so stored and computed outputs are equal. If the teacher computes in bfloat16, the outputs of a row
    depend on the batch in which it was read first. Outputs that cannot be kept are computed for every batch.

    Args:
        compute: outputs of the model on a batch.
        store: folder of the file, and the key of the outputs: the model and the names of the outputs.
        rows: maximum number of rows to keep.
        tokens: number of tokens in these rows.

    Attributes:
        refusal: why outputs are not kept; None while they are.
    """

    def __init__(
        self, compute: Callable[[Mapping[str, Tensor]], Outputs], store: Store, rows: int, tokens: int
    ) -> None:
        self._compute, self._store, self._rows, self._tokens = compute, store, rows, tokens
        self._folder = store.path
        self.refusal: str | None = None
        self._layout: _Layout | None = None
        self._index: dict[bytes, tuple[int, int]] = {}
        self._values: np.memmap | None = None
        self._end = 0
        self._lock = contextlib.ExitStack()

    def __call__(self, batch: Mapping[str, Tensor]) -> Outputs:
        """The outputs of a batch; outputs of padding are zero if they are kept, else arbitrary."""
        if self.refusal is None:
            try:
                return self._kept(batch)
            except _NotKeptError as error:
                self.refusal = str(error)
                logger.info("the teacher's outputs are computed in every step: %s", error)
        return self._compute(batch)

    def obstacle(self, batch: Mapping[str, Tensor]) -> str | None:
        """Why the outputs of rows like those of a batch cannot be kept; None: they can."""
        try:
            self._layout_for(batch, self._compute(batch))
        except _NotKeptError as error:
            return str(error)
        return None

    def _layout_for(self, inputs: Mapping[str, Tensor], outputs: Outputs) -> _Layout:
        """The layout of the outputs of all rows, from those of a batch; raise _NotKeptError unless it can be kept."""
        if process_count() > 1:
            raise _NotKeptError(f"{process_count()} processes train, and only one can write the file")
        if DECODER_IDS in inputs:
            raise _NotKeptError("the outputs of a decoder have different positions than the inputs of the encoder")
        layout = _Layout.of(outputs, inputs)
        size, file = self._bytes(layout), self._store.unfinished(_NAME) / _VALUES
        folder = next(path for path in file.parents if path.is_dir())
        free = shutil.disk_usage(folder).free + (file.stat().st_size if file.is_file() else 0)
        if size > _DISK_SHARE * free:
            raise _NotKeptError(
                f"the file takes {size / 2**30:.1f} GiB, more than half of the free disk ({free / 2**30:.1f} GiB)"
            )
        return layout

    def _bytes(self, layout: _Layout) -> int:
        """Size of the file."""
        per_row = sum(layout.numbers(0))
        per_token = sum(layout.numbers(1)) - per_row
        return np.dtype(np.float16).itemsize * (self._rows * per_row + self._tokens * per_token)

    def _kept(self, batch: Mapping[str, Tensor]) -> Outputs:
        inputs = {name: value for name, value in batch.items() if name != LABELS}
        masks = _masks(inputs)
        keys = [row_key(inputs, row, mask) for row, mask in enumerate(masks)]
        missing = [row for row, key in enumerate(keys) if key not in self._index]
        if missing:
            rows = {name: value[missing] for name, value in inputs.items()}
            computed = self._compute(rows)
            if self._layout is None:
                self._layout = self._layout_for(rows, computed)
                self._values = self._open(self._layout)
            self._add(computed, [keys[row] for row in missing], masks[missing])
        return self._gather(keys, masks, next(iter(inputs.values())).device)

    def close(self) -> None:
        """Store the index, for later runs, which may use the folder from now on."""
        self.save()
        self._lock.close()

    def save(self) -> None:
        """Store the index beside the values: a run that is interrupted afterwards reads these outputs again."""
        if self._values is not None:
            self._values.flush()
            spans = np.array(list(self._index.values()), np.int64).reshape(-1, 2)
            names = np.frombuffer(b"".join(self._index), np.uint8).reshape(-1, hashlib.sha1().digest_size)
            with atomic_replace(self._folder / _INDEX) as temporary, temporary.open("wb") as file:
                np.savez(file, keys=names, spans=spans)

    def _add(self, outputs: Outputs, keys: Sequence[bytes], masks: Tensor) -> None:
        """Append the outputs of rows to the file."""
        assert self._layout is not None
        assert self._values is not None
        for row, key in enumerate(keys):
            if key in self._index:  # twice in one batch
                continue
            mask = masks[row].to(next(iter(outputs.values())).device)
            parts = [
                value[row][mask].reshape(-1) if name in self._layout.by_position else value[row].reshape(-1)
                for name, value in outputs.items()
            ]
            record = torch.cat(parts).to("cpu", torch.float16).numpy()
            if not np.isfinite(record).all():
                raise _NotKeptError("a number of its outputs exceeds the range of float16")
            if self._end + len(record) > len(self._values):  # the file has outputs of rows of another run too
                self._values = self._mapped(2 * record.itemsize * (self._end + len(record)))
            self._values[self._end : self._end + len(record)] = record
            self._index[key] = (self._end, len(record))
            self._end += len(record)

    def _open(self, layout: _Layout) -> np.memmap:
        """The file, with the index of an earlier run where there is one; raise _NotKeptError if another run uses it."""
        try:
            self._folder = self._lock.enter_context(self._store.growing(_NAME, self._compute))
        except BlockingIOError as error:
            raise _NotKeptError(f"another run writes into {self._folder}") from error
        except OSError as error:  # a share without locks
            raise _NotKeptError(f"{self._folder} cannot be locked or written ({error.strerror})") from error
        file, index = self._folder / _VALUES, self._folder / _INDEX
        if file.is_file() and (stored := _read_index(index)) is not None:
            end = max((start + length for start, length in stored.values()), default=0)
            if end * np.dtype(np.float16).itemsize <= file.stat().st_size:
                self._index, self._end = stored, end
        if not self._index:
            for part in (file, index):
                part.unlink(missing_ok=True)
        return self._mapped(self._bytes(layout))

    def _mapped(self, size: int) -> np.memmap:
        """The file, extended to at least as many bytes; raise _NotKeptError if the disk is too small."""
        file = self._folder / _VALUES
        try:
            with file.open("ab") as reserved:  # writing into a map of a full disk would end the process
                size = max(size, reserved.tell())
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(reserved.fileno(), 0, size)
                else:
                    reserved.truncate(size)
        except OSError as error:
            if not self._index:
                file.unlink(missing_ok=True)
            raise _NotKeptError(f"{self._folder}: {error.strerror}") from error
        return np.memmap(file, np.float16, "r+")

    def _gather(self, keys: Sequence[bytes], masks: Tensor, device: torch.device) -> Outputs:
        assert self._layout is not None
        assert self._values is not None
        layout, parts = self._layout, dict[str, list[Tensor]]()
        for key, count in zip(keys, masks.sum(1).tolist(), strict=True):
            start, length = self._index[key]
            record = torch.from_numpy(self._values[start : start + length])
            for name, part in zip(layout.shapes, record.split(layout.numbers(count)), strict=True):
                parts.setdefault(name, []).append(part)
        outputs = dict[str, Tensor]()
        for name, shape in layout.shapes.items():
            values = torch.cat(parts[name]).float().reshape(-1, *shape)
            if name in layout.by_position:
                outputs[name] = torch.zeros(*masks.shape, *shape)
                outputs[name][masks] = values
            else:
                outputs[name] = values
        return {name: value.to(device) for name, value in outputs.items()}


def _read_index(path: Path) -> dict[bytes, tuple[int, int]] | None:
    """Key of each row -> where its numbers are, and how many; None where there is no index that can be read."""
    try:
        with np.load(path) as stored:
            spans = [(int(start), int(length)) for start, length in stored["spans"]]
            return dict(zip((bytes(key) for key in stored["keys"]), spans, strict=True))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def _masks(inputs: Mapping[str, Tensor]) -> Tensor:
    """The positions of each row that are not padding, bool `[batch, position]`, on the CPU; one without a mask."""
    if MASK in inputs:
        return inputs[MASK].bool().cpu()
    return torch.ones(len(next(iter(inputs.values()))), 1, dtype=torch.bool)


def row_key(inputs: Mapping[str, Tensor], row: int, mask: Tensor | None = None) -> bytes:
    """Hash of the inputs of a row.

    Args:
        inputs: `[batch, ...]` each.
        mask: the positions that are hashed, `[positions]`; None: all, with padding.
    """
    sha = hashlib.sha1(usedforsecurity=False)
    for name in sorted(inputs):
        value = inputs[name][row].cpu()
        sha.update(name.encode())
        if mask is not None and value.shape[:1] == mask.shape:
            value = value[mask]
        sha.update(value.contiguous().numpy().tobytes())
    return sha.digest()
