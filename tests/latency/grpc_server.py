"""An inference server of the KServe v2 protocol over gRPC, in this process, with configurable faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from compressor.latency import CheckRequest

grpc = pytest.importorskip("grpc")
service = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")
messages = pytest.importorskip("tritonclient.grpc.service_pb2")
serialize_byte_tensor = pytest.importorskip("tritonclient.utils").serialize_byte_tensor

WEIGHT = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
Model = Callable[..., np.ndarray]
"""Takes arrays by the names of the inputs."""
InputMetadata = tuple[str, tuple[int, ...], type]
"""The protocol's type, the shape and NumPy's type of an input."""
X: Mapping[str, InputMetadata] = MappingProxyType({"x": ("FP32", (-1, 4), np.float32)})
TOKENS: InputMetadata = ("INT64", (-1, -1), np.int64)


def linear(x: np.ndarray) -> np.ndarray:
    """`x W`, the function of the default models."""
    return x @ WEIGHT


MODELS: Mapping[str, Model] = MappingProxyType({"small": linear, "dense": linear})


class InferenceService(service.GRPCInferenceServiceServicer):  # type: ignore[name-defined]
    """Serves models that are functions.

    Args:
        models: functions by name; versions 1 and 2 of each exist.
        inputs: the inputs of every model by name.
        output: name of the output of every model.
        dies_after: number of inferences after which none succeeds.
        delay: seconds of every inference.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        inputs: Mapping[str, InputMetadata],
        output: str,
        dies_after: int,
        delay: float,
    ) -> None:
        self.models, self.inputs, self.output, self.delay = models, inputs, output, delay
        self.remaining = dies_after

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ServerLiveResponse(live=True)

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ServerMetadataResponse(name="fake", version="1")

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ModelReadyResponse(ready=request.name in self.models and request.version in ("", "1", "2"))

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        tensor = messages.ModelMetadataResponse.TensorMetadata
        inputs = [tensor(name=name, datatype=kind, shape=shape) for name, (kind, shape, _) in self.inputs.items()]
        return messages.ModelMetadataResponse(name=request.name, inputs=inputs)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        time.sleep(self.delay)
        self.remaining -= 1
        if self.remaining < 0:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        feeds = {
            tensor.name: np.frombuffer(content, self.inputs[tensor.name][2]).reshape(tensor.shape)
            for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        if request.model_name not in self.models:  # unloaded since the server started
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such model")
        y = self.models[request.model_name](**feeds)
        if y.dtype == np.object_:
            kind, content = "BYTES", serialize_byte_tensor(y).item()
        else:
            kind, content = "FP32", y.astype(np.float32).tobytes()
        shape = (1, 3) if y.size == 0 else y.shape  # an empty array becomes a response without content
        output = messages.ModelInferResponse.InferOutputTensor(name=self.output, datatype=kind, shape=shape)
        return messages.ModelInferResponse(outputs=[output], raw_output_contents=[content])


class RequireHeaders(grpc.ServerInterceptor):  # type: ignore[name-defined]
    """Denies calls without the headers."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        if self.headers.items() <= dict(details.invocation_metadata).items():
            return continuation(details)

        def deny(request: Any, context: Any) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")

        return grpc.unary_unary_rpc_method_handler(deny)


@contextmanager
def serving(
    models: Mapping[str, Model] = MODELS,
    inputs: Mapping[str, InputMetadata] = X,
    output: str = "y",
    dies_after: int = 10**9,
    delay: float = 0.0,
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    certificate: Path | None = None,
) -> Iterator[str]:
    """A running server; its URL. See `InferenceService` for the other arguments.

    Args:
        headers: headers, in lower case, without which a call is denied.
        certificate: certificate of the server, beside its `key.pem`; None: it is not encrypted.
    """
    server = grpc.server(futures.ThreadPoolExecutor(4), interceptors=[RequireHeaders(headers)])
    service.add_GRPCInferenceServiceServicer_to_server(
        InferenceService(models, inputs, output, dies_after, delay), server
    )
    if certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (certificate.with_name("key.pem").read_bytes(), certificate.read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield f"{'grpc' if certificate is None else 'grpcs'}://127.0.0.1:{port}"
    finally:
        server.stop(None)


def request_for(url: str, **fields: Any) -> CheckRequest:
    """A quick check of `small` against `dense` with a limit that any machine keeps."""
    defaults = {"model": "small", "baseline": "dense", "server": url, "seconds": 0.1, "max_slowdown": "100000%"}
    return CheckRequest(**{**defaults, **fields})
