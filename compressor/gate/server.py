"""A model on an inference server, as a driver."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError, MismatchError, ServerError, TargetMissingError, UsageError
from compressor.targets.base import Feeds, Precision
from compressor.targets.feeds import random_feeds
from compressor.targets.session import one_line
from compressor.targets.tensors import described

_REST_SECONDS = 0.05
"""How long a server is left alone between blocks: its runtimes' threads spin on after a call."""


class Server:
    """One model of a Triton inference server, or of any that speaks its protocol (KServe v2).

    Args:
        url: `grpc://host:port` or `http://host:port`.
        model: its name there.
        deadline: seconds that any one call may take.

    Raises:
        ServerError: it does not answer in time, has no such model, or has not loaded it.
    """

    precision: Precision = "fp16"

    def __init__(self, url: str, model: str, deadline: float) -> None:
        scheme, _, address = url.partition("://")
        if scheme not in ("grpc", "http") or not address:
            raise UsageError(f"--server {url}: give grpc://HOST:PORT or http://HOST:PORT")
        self.name, self.url, self._deadline = model, url, deadline
        self._protocol = _protocol(scheme)
        self._client = self._protocol.client(address, deadline)
        self._ask("it does not answer", lambda: self._protocol.live(self._client, deadline))
        if not self._ask("", lambda: self._protocol.ready(self._client, model, deadline)):
            raise ServerError(f"{url}: it has no model {model!r} that is ready; look at the server's log")
        facts = self._ask("", lambda: self._protocol.metadata(self._client, model, deadline))
        about = self._ask("", lambda: self._protocol.server(self._client, deadline))
        self.host = f"{about['name']} {about['version']} at {address}, over {scheme}"
        self.inputs = tuple(described(one["name"], one["datatype"], one["shape"]) for one in facts["inputs"])

    def draw(self, batch: int, seq: int, seed: int) -> Feeds:
        # A graph of which no more is known than its inputs.
        for tensor in self.inputs:
            if tensor.dtype == ir.DataType.STRING:
                raise UsageError(f"input {tensor.name} is text, which cannot be drawn or read from a file")
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
        return self._ask("", lambda: self._protocol.infer(self._client, self.name, prepared, self._deadline))

    def answers(self, prepared: Any) -> dict[str, np.ndarray]:
        found = self.call(prepared)
        outputs = {}
        for name in self._protocol.outputs(found):
            try:
                array = found.as_numpy(name)
            except (ValueError, TypeError) as error:  # fewer bytes than the shape says, or none
                raise MismatchError(f"{self.name}: output {name} is no array ({one_line(error)}); not timed") from error
            if array is None:
                raise MismatchError(f"{self.name}: output {name} came without content; it was not timed")
            outputs[name] = np.asarray(array)
        return outputs

    def rest(self) -> None:
        time.sleep(_REST_SECONDS)

    def close(self) -> None:
        self._client.close()

    def _ask(self, why: str, question: Any) -> Any:
        try:
            return question()
        except self._protocol.errors as error:
            said = one_line(error)
            if "INVALID_ARGUMENT" in said or said.startswith("[400]"):
                raise InputError(f"{self.url}: {self.name} refuses the request: {said}") from error
            if "deadline" in said.lower() or "timed out" in said.lower():
                mend = f"no answer within {self._deadline:g} s; --deadline allows longer"
            else:
                mend = "is the server up, and is the port that of this protocol?"
            raise ServerError(f"{self.url}: {self.name}: {f'{why}, ' if why else ''}{said}; {mend}") from error


class _Grpc:
    """Triton's client over gRPC: every call takes a deadline."""

    def __init__(self) -> None:
        import tritonclient.grpc as module

        self.module, self.errors = module, (module.InferenceServerException,)

    def client(self, address: str, deadline: float) -> Any:
        return self.module.InferenceServerClient(address)

    def live(self, client: Any, deadline: float) -> None:
        client.is_server_live(client_timeout=deadline)

    def ready(self, client: Any, model: str, deadline: float) -> bool:
        return bool(client.is_model_ready(model, client_timeout=deadline))

    def metadata(self, client: Any, model: str, deadline: float) -> Mapping[str, Any]:
        found = client.get_model_metadata(model, client_timeout=deadline)
        return {"inputs": [{"name": i.name, "datatype": i.datatype, "shape": i.shape} for i in found.inputs]}

    def server(self, client: Any, deadline: float) -> Mapping[str, Any]:
        found = client.get_server_metadata(client_timeout=deadline)
        return {"name": found.name, "version": found.version}

    def infer(self, client: Any, model: str, inputs: Sequence[Any], deadline: float) -> Any:
        return client.infer(model, inputs, client_timeout=deadline)

    def outputs(self, result: Any) -> list[str]:
        return [output.name for output in result.get_response().outputs]


class _Http:
    """Triton's client over HTTP: the connection has the deadlines."""

    def __init__(self) -> None:
        import tritonclient.http as module

        self.module = module
        # geventhttpclient raises what the sockets raise.
        # No HTTP, no JSON or other JSON: something else listens there.
        self.errors = (module.InferenceServerException, OSError, HTTPException, ValueError, KeyError)

    def client(self, address: str, deadline: float) -> Any:
        return self.module.InferenceServerClient(address, connection_timeout=deadline, network_timeout=deadline)

    def live(self, client: Any, deadline: float) -> None:
        client.is_server_live()

    def ready(self, client: Any, model: str, deadline: float) -> bool:
        return bool(client.is_model_ready(model))

    def metadata(self, client: Any, model: str, deadline: float) -> Mapping[str, Any]:
        return dict(client.get_model_metadata(model))

    def server(self, client: Any, deadline: float) -> Mapping[str, Any]:
        return dict(client.get_server_metadata())

    def infer(self, client: Any, model: str, inputs: Sequence[Any], deadline: float) -> Any:
        return client.infer(model, inputs)

    def outputs(self, result: Any) -> list[str]:
        return [output["name"] for output in result.get_response()["outputs"]]


def _protocol(scheme: Literal["grpc", "http"] | str) -> _Grpc | _Http:
    try:
        return _Grpc() if scheme == "grpc" else _Http()
    except ImportError as error:
        raise TargetMissingError(
            f"--server: Triton's client is not installed ({error}); pip install 'compressor[serving]'"
        ) from error
