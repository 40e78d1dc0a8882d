"""What is timed: a model on an inference server, or a graph loaded here. Both answer the same calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError, MismatchError, ServerError, TargetMissingError, UsageError
from compressor.measure.timing import settle
from compressor.targets import Engine, target
from compressor.targets.base import Feeds, Precision
from compressor.targets.feeds import random_feeds
from compressor.targets.session import one_line
from graph_passes import load

_PLANS = (".plan", ".engine")
_REST_SECONDS = 0.05
"""How long a server is left alone between blocks: its runtimes' threads spin on after a call."""


@dataclass(frozen=True)
class Tensor:
    """One input or output: its name, its type as numpy has it (`object` for text), and its sizes, -1 where free."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Driver(Protocol):
    """Something that answers.

    Attributes:
        name: of the model, as it is told.
        host: where it runs: the machine's or the server's own words.
        precision: of its answers, as far as is known: a server's may be in half.
        inputs: what it takes.
    """

    name: str
    host: str
    precision: Precision
    inputs: tuple[Tensor, ...]

    def draw(self, batch: int, seq: int, seed: int) -> Feeds:
        """A random batch; `seq` is the size of every free axis but the first."""
        ...

    def prepare(self, feeds: Feeds) -> Any:
        """A batch in the form that `call` takes; outside what is timed."""
        ...

    def call(self, prepared: Any) -> Any:
        """One call."""
        ...

    def answers(self, prepared: Any) -> dict[str, np.ndarray]:
        """One call's outputs, by name."""
        ...

    def rest(self) -> None:
        """Wait until what ran before is quiet."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Local:
    """An ONNX file, built for this machine and loaded; or a TensorRT engine.

    Args:
        path: the file; one that `compress` built for ONNX Runtime (`engine.onnx`) is loaded as it is.
        scratch: folder of its own for what the build writes.
        threads: of one call; None: one a core.

    Attributes:
        graph: the graph whose function it has to compute.
    """

    def __init__(self, path: Path, scratch: Path, threads: int | None = None) -> None:
        if not path.is_file():
            raise InputError(f"{path}: there is no such file; give an ONNX file, or a model's name with --server")
        self.name, self.graph = str(path), path
        self._turn: AbstractContextManager[Any] = nullcontext()
        self._engine: Engine
        if path.suffix in _PLANS:
            from compressor.targets import trt

            plan = trt.load(path)
            papers = plan.metadata
            self.precision: Precision = papers.precision
            self._engine, self.graph = plan, path.with_name("model.onnx")
            self._turn = threading.Lock()  # it has one context, which one thread at a time may use
            self.inputs = tuple(
                Tensor(name, np.dtype(papers.inputs[name]), _free(least, most))
                for name, (least, _, most) in papers.profiles.items()
            )
            self.host = str(plan.session["runtime"])
        else:
            model = load(path)
            half = any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.initializers.values())
            self.precision = "fp16" if half else "fp32"
            self._engine = target("ort")(path, scratch / "engine.onnx", threads=threads)
            self.inputs = tuple(_tensor(value) for value in model.graph.inputs if not value.is_initializer())
            self.host = f"{self._engine.session['runtime']}, {self._engine.session['intra_op_threads']} threads"

    def draw(self, batch: int, seq: int, seed: int) -> Feeds:
        feeds = random_feeds(load(self.graph), batch, seq, seed=seed)
        return {tensor.name: feeds[tensor.name].astype(tensor.dtype) for tensor in self.inputs}

    def prepare(self, feeds: Feeds) -> Feeds:
        return feeds

    def call(self, prepared: Feeds) -> dict[str, np.ndarray]:
        with self._turn:
            return self._engine.run(prepared)

    answers = call

    def rest(self) -> None:
        settle()

    def close(self) -> None:
        pass


def _free(least: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    return tuple(-1 if low != high else low for low, high in zip(least, most, strict=True))


def _tensor(value: ir.Value) -> Tensor:
    sizes = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape or ())
    return Tensor(value.name or "", np.dtype(value.dtype.numpy() if value.dtype else np.float32), sizes)


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
        self.inputs = tuple(_described(entry) for entry in facts["inputs"])

    def draw(self, batch: int, seq: int, seed: int) -> Feeds:
        # A graph of which no more is known than its inputs.
        inputs = ir.Graph([_value(tensor) for tensor in self.inputs], [], nodes=[])
        return random_feeds(ir.Model(inputs, ir_version=10), batch, seq, seed=seed)

    def prepare(self, feeds: Feeds) -> Any:
        inputs = []
        for tensor in self.inputs:
            made = self._protocol.module.InferInput(tensor.name, list(feeds[tensor.name].shape), _TYPES[tensor.dtype])
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


_TYPES: Mapping[np.dtype[Any], str] = {
    np.dtype(kind): name
    for kind, name in {
        np.bool_: "BOOL",
        np.int8: "INT8",
        np.int16: "INT16",
        np.int32: "INT32",
        np.int64: "INT64",
        np.uint8: "UINT8",
        np.uint16: "UINT16",
        np.uint32: "UINT32",
        np.uint64: "UINT64",
        np.float16: "FP16",
        np.float32: "FP32",
        np.float64: "FP64",
        np.object_: "BYTES",
    }.items()
}
_KINDS = {name: kind for kind, name in _TYPES.items()}


def _described(entry: Mapping[str, Any]) -> Tensor:
    if entry["datatype"] not in _KINDS:
        raise InputError(f"input {entry['name']}: its type {entry['datatype']} has no numpy type; it cannot be driven")
    return Tensor(entry["name"], _KINDS[entry["datatype"]], tuple(int(size) for size in entry["shape"]))


def _value(tensor: Tensor) -> ir.Value:
    if tensor.dtype.kind not in "iufb":
        raise UsageError(f"input {tensor.name} is text, which cannot be drawn or read from a file; it cannot be driven")
    shape = ir.Shape([size if size >= 0 else None for size in tensor.shape])
    return ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(ir.DataType.from_numpy(tensor.dtype)))


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
