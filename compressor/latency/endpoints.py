"""The interface to a model of a check, which is on an inference server or an engine on this machine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from compressor.config.check import CheckRequest
from compressor.errors import ErrorCode, InputError
from compressor.latency.event_streams import EventSource
from compressor.latency.local_engine import load_engine
from compressor.latency.streams import CheckedModel, TokenSource
from compressor.latency.triton import TritonModel
from compressor.targets.base import Feeds
from compressor.targets.tensor_specs import TensorSpec


class Endpoint(CheckedModel, Protocol):
    """A model that computes its outputs at once.

    Attributes:
        concurrency: maximum number of concurrent calls that is useful.
        inputs: the inputs that it takes.
        has_random_inputs: whether `trial_batch` draws ids at random, because no example rows of the model are known.
        id_limits: name of an input -> number of ids that its table has; empty without the graph.
    """

    concurrency: int
    inputs: tuple[TensorSpec, ...]

    @property
    def id_limits(self) -> Mapping[str, int]: ...

    @property
    def has_random_inputs(self) -> bool: ...

    def trial_batch(self, batch: int, seq: int, seed: int) -> Feeds:
        """A batch that is not from the user's inputs; `seq` is the size of every free axis but the first."""

    def fitting_length(self, batch: int, longest: int) -> int:
        """The length at which `trial_batch` makes batches that the model takes, at most `longest`."""

    def encode(self, feeds: Feeds) -> Any:
        """A batch in the form that `call` and `infer` take. Encoding is not timed."""

    def call(self, request: Any) -> object:
        """Send one encoded batch and wait for the response."""


@contextlib.contextmanager
def open_endpoint(request: CheckRequest, name: str) -> Iterator[Endpoint]:
    """A model of a check, on the server or on this machine, which is closed at the end of the context.

    Raises:
        InputError: the file is missing or cannot be loaded.
        ServerError: the server does not respond or lacks the model.
    """
    if request.server is not None:
        with contextlib.closing(TritonModel(request, name)) as model:
            yield model
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield load_engine(Path(name), Path(scratch), request.threads, request.kernel)


def open_source(request: CheckRequest, name: str) -> TokenSource:
    """A model of a check that generates, on a server or on this machine.

    Raises:
        InputError: the folder is missing, or has no graphs that generate.
        ServerError: the server does not respond, or not with a stream.
        UsageError: the URL is not that of an endpoint that streams text.
    """
    if request.is_url:
        return EventSource(request, name)
    from compressor.latency.local_generator import LocalGenerator  # needs ONNX Runtime

    return LocalGenerator(request, Path(name))


def cast_inputs(feeds: Mapping[str, np.ndarray], inputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Arrays in the types of a model's inputs, where both are of the same kind (signed, unsigned or float).

    An array may be wider or narrower than its input: TensorRT 8.6, for instance, takes no int64.
    """
    arrays = dict(feeds)
    for tensor in inputs:
        array = arrays.get(tensor.name)
        if array is not None and array.dtype.kind == tensor.numpy.kind and array.dtype.kind in "iuf":
            arrays[tensor.name] = array.astype(tensor.numpy, copy=False)
    return arrays


def encode_batches(endpoint: Endpoint, batches: Sequence[Feeds]) -> list[Any]:
    """Every batch in the form that a model takes.

    Raises:
        InputError: the batches lack an input of the model, or have it in another type.
    """
    arrays = [cast_inputs(batch, endpoint.inputs) for batch in batches]
    for tensor in endpoint.inputs:
        array = arrays[0].get(tensor.name)
        if array is None or array.dtype != tensor.numpy:
            fault = "is missing" if array is None else f"is {array.dtype}"
            raise InputError(
                f"{endpoint.name}: the input {tensor.name} ({tensor.numpy}) {fault} in the batches for the other model;"
                " both models must have the same inputs",
                code=ErrorCode.TENSOR_MISMATCH,
                tensor=tensor.name,
                dtype=None if array is None else str(array.dtype),
            )
    return [endpoint.encode(batch) for batch in arrays]
