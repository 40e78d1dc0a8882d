"""A model on an inference server, as a driver."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError, MismatchError, ServerError, TargetMissingError, UsageError
from compressor.targets.base import Feeds, Precision
from compressor.targets.onnxruntime.ort_session import one_line
from compressor.targets.random_inputs import random_feeds
from compressor.targets.tensor_specs import described

T = TypeVar("T")
Described = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of an input, as a server tells them."""
_REST_SECONDS = 0.05
"""How long a server is left alone between blocks: its runtimes' threads spin on after a call."""


class TritonModel:
    """One model of a Triton inference server, or of any that speaks its protocol (KServe v2).

    Args:
        url: `grpc://host:port` or `http://host:port`.
        model: its name there, or `NAME:VERSION`; else the server takes the newest version.
        deadline: seconds that any one call may take.

    Raises:
        ServerError: it does not answer in time, has no such model, or has not loaded it.
    """

    precision: Precision = "fp16"
    at_once = 64
    """Enough for a server to form large batches on several GPUs."""

    def __init__(self, url: str, model: str, deadline: float) -> None:
        scheme, address = _parts(url)
        name, versioned, version = model.partition(":")
        if versioned and not (name and version.isdecimal()):
            raise UsageError(f"{model}: is no model of a server; give NAME or NAME:VERSION, a number")
        self.name, self.url, self._deadline = model, url, deadline
        self._protocol = _protocol(scheme, address, name, version, deadline)
        self._ask(self._protocol.live, "it does not answer")
        if not self._ask(self._protocol.ready):
            raise ServerError(f"{url}: it has no model {model!r} that is ready; look at the server's log")
        self.inputs = tuple(described(*one) for one in self._ask(self._protocol.inputs))
        software, release = self._ask(self._protocol.about)
        self.host = f"{software} {release} at {address}, over {scheme}"

    def draw(self, batch: int, seq: int, seed: int) -> Feeds:
        # A graph of which no more is known than its inputs.
        for tensor in self.inputs:
            if tensor.dtype == ir.DataType.STRING:
                raise UsageError(f"input {tensor.name} is text, which cannot be drawn; give an .npz of it (--inputs)")
        inputs = ir.Graph([tensor.value for tensor in self.inputs], [], nodes=[])
        return random_feeds(ir.Model(inputs, ir_version=10), batch, seq, seed=seed)

    def prepare(self, feeds: Feeds) -> Any:
        inputs = []
        for tensor in self.inputs:
            made = self._protocol.module.InferInput(tensor.name, list(feeds[tensor.name].shape), tensor.type)
            made.set_data_from_numpy(np.ascontiguousarray(feeds[tensor.name]))
            inputs.append(made)
        return inputs

    def call(self, prepared: Any) -> Any:
        return self._ask(lambda: self._protocol.infer(prepared))

    def answers(self, prepared: Any) -> dict[str, np.ndarray]:
        found = self.call(prepared)
        outputs = {}
        for name in self._ask(lambda: self._protocol.outputs(found)):
            try:
                array = found.as_numpy(name)
            except (ValueError, TypeError, KeyError, struct.error) as error:  # fewer bytes than the shape says, or none
                raise MismatchError(f"{self.name}: output {name} is no array ({_why(error)})") from error
            if array is None:
                raise MismatchError(f"{self.name}: output {name} came without content")
            outputs[name] = np.asarray(array)
        return outputs

    def rest(self) -> None:
        time.sleep(_REST_SECONDS)

    def close(self) -> None:
        self._protocol.client.close()

    def _ask(self, question: Callable[[], T], why: str = "") -> T:
        try:
            with self._protocol.limit():
                return question()
        except self._protocol.errors as error:
            said = _why(error)
            if "INVALID_ARGUMENT" in said or said.startswith("[400]"):
                raise InputError(f"{self.url}: {self.name} refuses the request: {said}") from error
            if "deadline" in said.lower() or "timed out" in said.lower():
                mend = f"no answer within {self._deadline:g} s; --deadline allows longer"
            elif "UNAVAILABLE" in said or isinstance(error, (OSError, *_GARBLED)):
                mend = "is the server up, and is the port that of this protocol?"
            else:
                mend = "look at the server's log"
            if isinstance(error, _GARBLED) and "connection closed" not in said:
                said = f"its answer is not of the protocol ({said})"
            raise ServerError(f"{self.url}: {self.name}: {f'{why}, ' if why else ''}{said}; {mend}") from error


def _parts(url: str) -> tuple[str, str]:
    """The protocol, and where to find the server."""
    with contextlib.suppress(ValueError):  # the port is none
        parts = urlsplit(url)
        if parts.scheme in ("grpc", "http") and parts.hostname and parts.port != 0:
            return parts.scheme, url.partition("://")[2]
    raise UsageError(f"--server {url}: give grpc://HOST:PORT or http://HOST:PORT")


def _why(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else one_line(error)


class _Grpc:
    """Triton's client over gRPC: every call takes a deadline."""

    def __init__(self, address: str, model: str, version: str, deadline: float) -> None:
        import tritonclient.grpc as module

        self.module, self.errors = module, (module.InferenceServerException,)
        self.client, self._deadline = module.InferenceServerClient(address), deadline
        self._model, self._version = model, version

    def limit(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def live(self) -> None:
        self.client.is_server_live(client_timeout=self._deadline)

    def ready(self) -> bool:
        return bool(self.client.is_model_ready(self._model, self._version, client_timeout=self._deadline))

    def inputs(self) -> list[Described]:
        found = self.client.get_model_metadata(self._model, self._version, client_timeout=self._deadline)
        return [(one.name, one.datatype, tuple(one.shape)) for one in found.inputs]

    def about(self) -> tuple[str, str]:
        found = self.client.get_server_metadata(client_timeout=self._deadline)
        return found.name, found.version

    def infer(self, inputs: Sequence[Any]) -> Any:
        return self.client.infer(self._model, inputs, self._version, client_timeout=self._deadline)

    def outputs(self, result: Any) -> list[str]:
        return [output.name for output in result.get_response().outputs]


_GARBLED = (ValueError, KeyError, TypeError, AttributeError, HTTPException)
"""No HTTP, no JSON or other JSON: something else listens there."""


class _Http:
    """Triton's client over HTTP: its own timeouts are those of a connection and of a single read, and an answer may
    come in many."""

    def __init__(self, address: str, model: str, version: str, deadline: float) -> None:
        import gevent
        import tritonclient.http as module

        self.module, self._timeout, self._deadline = module, gevent.Timeout, deadline
        # geventhttpclient raises what the sockets raise.
        self.errors = (module.InferenceServerException, OSError, *_GARBLED)
        self.client = module.InferenceServerClient(address, connection_timeout=deadline, network_timeout=deadline)
        self._model, self._version = model, version

    def limit(self) -> contextlib.AbstractContextManager[Any]:
        limit: contextlib.AbstractContextManager[Any] = self._timeout(self._deadline, TimeoutError("timed out"))
        return limit

    def live(self) -> None:
        self.client.is_server_live()

    def ready(self) -> bool:
        return bool(self.client.is_model_ready(self._model, self._version))

    def inputs(self) -> list[Described]:
        found = self.client.get_model_metadata(self._model, self._version)["inputs"]
        return [(str(one["name"]), str(one["datatype"]), tuple(map(int, one["shape"]))) for one in found]

    def about(self) -> tuple[str, str]:
        found = self.client.get_server_metadata()
        return found["name"], found["version"]

    def infer(self, inputs: Sequence[Any]) -> Any:
        return self.client.infer(self._model, inputs, self._version)

    def outputs(self, result: Any) -> list[str]:
        return [output["name"] for output in result.get_response().get("outputs", [])]


def _protocol(scheme: str, address: str, model: str, version: str, deadline: float) -> _Grpc | _Http:
    try:
        return (_Grpc if scheme == "grpc" else _Http)(address, model, version, deadline)
    except ImportError as error:
        raise TargetMissingError(
            f"--server: Triton's client is not installed ({error}); pip install 'compressor[serving]'"
        ) from error
