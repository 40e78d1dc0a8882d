"""What is timed: a model on an inference server, or a graph loaded here. Both answer the same calls."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from compressor.config.check import CheckRequest
from compressor.errors import InputError
from compressor.latency.local_engine import LocalEngine
from compressor.latency.triton_client import TritonModel
from compressor.targets.base import Feeds, Precision
from compressor.targets.tensor_specs import TensorSpec


class Endpoint(Protocol):
    """Something that answers.

    Attributes:
        name: of the model, as it is told.
        host: where it runs: the machine's or the server's own words.
        precision: of its answers, as far as is known: a server's may be in half.
        at_once: calls that it is worth making side by side.
        inputs: what it takes.
    """

    name: str
    host: str
    precision: Precision
    at_once: int
    inputs: tuple[TensorSpec, ...]

    def draw(self, batch: int, seq: int, seed: int) -> Feeds:
        """A random batch; `seq` is the size of every free axis but the first."""
        ...

    def prepare(self, feeds: Feeds) -> Any:
        """A batch in the form that `call` takes; outside what is timed."""
        ...

    def call(self, encode_batches: Any) -> Any:
        """One call."""
        ...

    def answers(self, encode_batches: Any) -> dict[str, np.ndarray]:
        """One call's outputs, by name."""
        ...

    def rest(self) -> None:
        """Wait until what ran before is quiet."""
        ...


@contextlib.contextmanager
def open_endpoint(asked: CheckRequest, name: str) -> Iterator[Endpoint]:
    """A model of the server that is asked for, else a graph or an engine of this machine; let go of at the end.

    Raises:
        InputError: there is no such file, or it cannot be loaded.
        ServerError: the server does not answer or lacks the model.
    """
    if asked.server is not None:
        with contextlib.closing(TritonModel(asked.server, name, asked.deadline)) as server:
            yield server
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield LocalEngine(Path(name), Path(scratch), asked.threads, asked.kernel)


def cast_inputs(feeds: Feeds, inputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Arrays in the types that a model takes, where they are of the same kind: integers may be wider or narrower, and
    floats, as TensorRT 8.6 takes no int64. Others are left as they are."""
    found = dict(feeds)
    for tensor in inputs:
        array = found.get(tensor.name)
        if array is not None and array.dtype.kind == tensor.numpy.kind and array.dtype.kind in "iuf":
            found[tensor.name] = array.astype(tensor.numpy, copy=False)
    return found


def encode_batches(driver: Endpoint, feeds: Sequence[Feeds]) -> list[Any]:
    """Every batch as a model takes it.

    Raises:
        InputError: the model has other inputs than those that the batches are for.
    """
    fit = [cast_inputs(batch, driver.inputs) for batch in feeds]
    for tensor in driver.inputs:
        given = fit[0].get(tensor.name)
        if given is None or given.dtype != tensor.numpy:
            said = "is missing" if given is None else f"is {given.dtype}"
            raise InputError(
                f"{driver.name}: its input {tensor.name} ({tensor.numpy}) {said} in what the other model takes; the two"
                " must have the same inputs"
            )
    return [driver.prepare(batch) for batch in fit]
