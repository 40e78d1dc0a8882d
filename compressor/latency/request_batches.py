"""What models are asked: batches from a file of arrays, from rows of text, or drawn."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compressor.config.check import CheckRequest
from compressor.errors import InputError, UsageError
from compressor.latency.endpoints import Endpoint, cast_inputs
from compressor.targets.base import Feeds
from compressor.targets.tensor_specs import FREE, TensorSpec

_BATCHES = 16
"""Batches that calls take in turn, at most: enough for an even mixture, few enough to be compared beforehand."""


def batches(driver: Endpoint, asked: CheckRequest) -> tuple[list[Feeds], str]:
    """Batches for a model, and in words where they are from: `asked.inputs`, texts cut or padded to `asked.seq` tokens,
    or drawn; `asked.seq` also stands for every other free size that is drawn.

    Raises:
        InputError: the file lacks an input, or its type or sizes do not match.
        UsageError: texts without a tokenizer.
    """
    source, batch, seq = asked.inputs, asked.batch, asked.seq
    if source is None:
        return [driver.draw(batch, seq, asked.seed + number) for number in range(_BATCHES)], "drawn at random"
    if not source.exists():
        raise InputError(f"{source}: there is no such file; --inputs takes an .npz of arrays or a file of texts")
    if source.suffix == ".npz":
        rows = _arrays(source)
    elif asked.tokenizer is None:
        raise UsageError(f"--inputs {source.name}: texts need a tokenizer; --tokenizer OUT names a folder that has one")
    else:
        rows = _texts(source, asked, [tensor.name for tensor in driver.inputs])
    rows = _checked(rows, driver.inputs, source)
    count = len(next(iter(rows.values())))
    if count < batch:
        raise InputError(
            f"{source}: {count} rows, fewer than one batch of {batch}; give more rows or a smaller --batch"
        )
    starts = itertools.islice(range(0, count - batch + 1, batch), _BATCHES)
    made: list[Feeds] = [{name: array[start : start + batch] for name, array in rows.items()} for start in starts]
    return made, f"{len(made) * batch} rows of {source.name}"


def _arrays(source: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(source, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{source}: no archive of arrays ({error}); write it by numpy.savez") from error


def _texts(source: Path, asked: CheckRequest, names: Sequence[str]) -> dict[str, np.ndarray]:
    from compressor.tasks.raw_texts import read_texts, tokenizer_of

    assert asked.tokenizer is not None
    made = tokenizer_of(asked.tokenizer)
    if made is None:
        raise InputError(f"{asked.tokenizer}: has no tokenizer; name the model's folder (--tokenizer)")
    texts = zip(*read_texts(str(source), asked.text_columns, asked.batch * _BATCHES), strict=True)
    encoded = made(*map(list, texts), padding="max_length", truncation=True, max_length=asked.seq)
    return {name: np.array(encoded[name]) for name in encoded if name in names}


def _checked(rows: dict[str, np.ndarray], inputs: Sequence[TensorSpec], source: Path) -> dict[str, np.ndarray]:
    """The rows as the model takes them: its own inputs, in its own types."""
    known = ", ".join(tensor.name for tensor in inputs)
    rows = cast_inputs(rows, inputs)
    for tensor in inputs:
        if tensor.name not in rows:
            raise InputError(f"{source}: nothing for the input {tensor.name!r}; the model takes {known}")
        array = rows[tensor.name]
        if array.dtype.kind in "US" and tensor.numpy == np.object_:
            rows[tensor.name] = array = array.astype(np.object_)
        if array.dtype != tensor.numpy:
            raise InputError(f"{source}: {tensor.name} is {array.dtype}, the model takes {tensor.numpy}")
        fits = len(array.shape) == len(tensor.dims) and all(
            wanted in (FREE, size) for wanted, size in zip(tensor.dims[1:], array.shape[1:], strict=True)
        )
        if not fits:
            shape = ["any" if size == FREE else size for size in tensor.dims]
            raise InputError(f"{source}: {tensor.name} is {list(array.shape)}, the model takes {shape}")
    found = {tensor.name: rows[tensor.name] for tensor in inputs}
    if len({len(array) for array in found.values()}) > 1:
        raise InputError(f"{source}: its arrays have different numbers of rows")
    return found
