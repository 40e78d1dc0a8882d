"""The batches of a check: from a file of arrays, from rows of text or images, from example rows, or random."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.config.check import CheckRequest
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.latency.endpoints import Endpoint, cast_inputs
from compressor.targets.base import Feeds
from compressor.targets.example_rows import read_arrays
from compressor.targets.tensor_specs import FREE, PIXELS, TensorSpec
from compressor.targets.trial_inputs import require_ids

MAX_BATCHES = 16
"""Number of batches that calls take in turn; the outputs of all of them are compared before timing."""


@dataclass(frozen=True)
class Batches:
    """The batches that are sent to both models of a check.

    Attributes:
        feeds: the batches, arrays `[batch, ...]` by name of the input.
        source: their origin.
        random: whether ids are drawn at random.
    """

    feeds: tuple[Feeds, ...]
    source: str
    random: bool = False

    def length(self, default: int) -> int:
        """Tokens per row: the longest second axis of inputs with two axes, 0 without them, `default` without inputs."""
        arrays = self.feeds[0].values()
        return max((array.shape[1] for array in arrays if array.ndim == 2), default=0 if arrays else default)


def load_batches(endpoint: Endpoint, request: CheckRequest) -> Batches:
    """The batches for a model: from `request.inputs`, with texts cut or padded to `request.seq` tokens.

    Without `request.inputs`, they are made from the example rows that the graph carries, or at random; `request.seq` is
    then the size of all free axes but the first, or its half, its quarter and so on if it was not requested and the
    model does not run with it.

    Raises:
        InputError: the file lacks an input, or its type or sizes do not match; or the model does not run with the
            requested number of tokens.
        UsageError: texts or images are given without a tokenizer or image processor.
    """
    path, batch = request.inputs, request.batch
    if path is None:
        seq = endpoint.fitting_length(batch, request.seq)
        if seq < request.seq and "seq" in request.model_fields_set:
            text = f"does not run with {request.seq} tokens, but with {seq}; request at most {seq} (--seq {seq})"
            raise InputError.of_file(
                endpoint.name, text, ErrorCode.OUT_OF_RANGE, field="seq", value=request.seq, maximum=seq
            )
        feeds = (endpoint.trial_batch(batch, seq, request.seed + number) for number in range(MAX_BATCHES))
        is_random = endpoint.has_random_inputs
        return Batches(tuple(feeds), "random" if is_random else "example rows of the graph", random=is_random)
    if not path.exists():
        text = "no such file; --inputs takes an .npz of arrays, a file of texts or a folder of images"
        raise InputError.of_file(path, text, ErrorCode.FILE_MISSING, field="inputs")
    rows = read_arrays(path) if path.suffix == ".npz" else _encode_rows(path, request, endpoint.inputs)
    rows = _check_rows(rows, endpoint.inputs, path)
    require_ids(rows, endpoint.id_limits, str(path))
    count = len(next(iter(rows.values())))
    if count < batch:
        text = f"{count} rows, fewer than one batch of {batch}; give more rows or a smaller --batch"
        raise InputError.of_file(path, text, ErrorCode.TOO_FEW_ROWS, count=count, needed=batch)
    starts = itertools.islice(range(0, count - batch + 1, batch), MAX_BATCHES)
    batches = tuple({name: array[start : start + batch] for name, array in rows.items()} for start in starts)
    return Batches(batches, f"{len(batches) * batch} rows of {path.name}")


def _encode_rows(path: Path, request: CheckRequest, inputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    reads_images = any(tensor.name == PIXELS for tensor in inputs)
    if request.tokenizer is None:
        what = "images need an image processor" if reads_images else "texts need a tokenizer"
        raise UsageError(
            f"--inputs {path.name}: {what}; name a folder that has one (--tokenizer)",
            code=ErrorCode.MISSING_VALUE,
            field="tokenizer",
        )
    if reads_images:
        from compressor.tasks.images import read_pixels

        maximum = request.batch * MAX_BATCHES
        return {PIXELS: read_pixels(str(path), request.tokenizer, maximum, requested=request.image_column)}
    return _encode_texts(path, request, request.tokenizer, inputs)


def _encode_texts(
    path: Path, request: CheckRequest, folder: Path, inputs: Sequence[TensorSpec]
) -> dict[str, np.ndarray]:
    from compressor.model_folder.sentence_texts import read_sentence_texts
    from compressor.tasks.raw_texts import model_texts, read_texts, tokenize, tokenizer_of

    tokenizer = tokenizer_of(folder)
    if tokenizer is None:
        text = "this folder has no tokenizer; name the model's folder (--tokenizer)"
        raise InputError.of_file(folder, text, ErrorCode.FILE_MISSING, field="tokenizer")
    sentence, maximum = read_sentence_texts(folder), request.batch * MAX_BATCHES
    texts = model_texts(read_texts(str(path), request.text_columns, maximum, sentence), sentence)[:maximum]
    encoded = tokenize(tokenizer, texts, sentence, shortest=request.seq, longest=request.seq)
    names = {tensor.name for tensor in inputs}
    return {name: np.array(encoded[name]) for name in encoded if name in names}


def _check_rows(rows: Mapping[str, np.ndarray], inputs: Sequence[TensorSpec], path: Path) -> dict[str, np.ndarray]:
    """The arrays of a model's inputs, each in the type of its input."""
    arrays = cast_inputs(rows, inputs)
    for tensor in inputs:
        if tensor.name not in arrays:
            names = ", ".join(tensor.name for tensor in inputs)
            raise _mismatch(path, tensor.name, f"there is no array for this input; the model takes {names}")
        array = arrays[tensor.name]
        if array.dtype.kind in "US" and tensor.numpy == np.object_:
            arrays[tensor.name] = array = array.astype(np.object_)
        if array.dtype != tensor.numpy:
            raise _mismatch(path, tensor.name, f"the type is {array.dtype}, the model takes {tensor.numpy}")
        if not _fits(array.shape, tensor.dims):
            shape = ["any" if size == FREE else size for size in tensor.dims]
            raise _mismatch(path, tensor.name, f"the shape is {list(array.shape)}, the model takes {shape}")
    arrays = {tensor.name: arrays[tensor.name] for tensor in inputs}
    single = next((name for name, array in arrays.items() if not array.ndim), None)
    if single is not None:
        text = f"{single} is a single number; give arrays with an axis of rows"
        raise InputError.of_file(path, text, ErrorCode.INVALID_VALUE, field="inputs")
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        text = f"the arrays have different numbers of rows ({lengths}); give as many rows for every input"
        raise InputError.of_file(path, text, ErrorCode.TENSOR_MISMATCH)
    return arrays


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether an array has the axes of an input; the first axis may have any size, since it is divided into batches."""
    return len(shape) == len(dims) and all(dim in (FREE, size) for dim, size in zip(dims[1:], shape[1:], strict=True))


def _mismatch(path: Path, name: str, text: str) -> InputError:
    return InputError.of_file(path, f"{name}: {text}", ErrorCode.TENSOR_MISMATCH, tensor=name)
