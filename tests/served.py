"""An inference server of the KServe v2 protocol in this process, over gRPC, that misbehaves as it is told to."""

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
from graph_passes import save
from tests import folders
from tests.engines import parsed

grpc = pytest.importorskip("grpc")
service = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")
messages = pytest.importorskip("tritonclient.grpc.service_pb2")
serialize_byte_tensor = pytest.importorskip("tritonclient.utils").serialize_byte_tensor

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(4, 3)).astype(np.float32)
Model = Callable[..., np.ndarray]
"""Takes arrays by the names of the inputs."""
X: Mapping[str, Any] = MappingProxyType({"x": ("FP32", (-1, 4), np.float32)})
IDS = ("INT64", (-1, -1), np.int64)


def answer(x: np.ndarray) -> np.ndarray:
    return x @ WEIGHT


MODELS: Mapping[str, Model] = MappingProxyType({"small": answer, "dense": answer})


class Served(service.GRPCInferenceServiceServicer):  # type: ignore[name-defined]
    """Answers calls.

    Args:
        models: by name.
        inputs: protocol's type, shape and NumPy's type by name.
        output: name of what the models give.
        dies_after: calls after which it answers no more.
        slow: seconds that every answer takes.
    """

    def __init__(
        self, models: Mapping[str, Model], inputs: Mapping[str, Any], output: str, dies_after: int, slow: float
    ) -> None:
        self.models, self.inputs, self.output, self.left, self.slow = models, inputs, output, dies_after, slow

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ServerLiveResponse(live=True)

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ServerMetadataResponse(name="served", version="1")

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ModelReadyResponse(ready=request.name in self.models and request.version in ("", "1", "2"))

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        tensor = messages.ModelMetadataResponse.TensorMetadata
        inputs = [tensor(name=name, datatype=kind, shape=shape) for name, (kind, shape, _) in self.inputs.items()]
        return messages.ModelMetadataResponse(name=request.name, inputs=inputs)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        time.sleep(self.slow)
        self.left -= 1
        if self.left < 0:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        feeds = {
            one.name: np.frombuffer(content, self.inputs[one.name][2]).reshape(one.shape)
            for one, content in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        if request.model_name not in self.models:  # unloaded meanwhile
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such model")
        y = self.models[request.model_name](**feeds)
        if y.dtype == np.object_:
            kind, content = "BYTES", serialize_byte_tensor(y).item()
        else:
            kind, content = "FP32", y.astype(np.float32).tobytes()
        shape = (1, 3) if y.size == 0 else y.shape  # no bytes, whatever the shape promises
        output = messages.ModelInferResponse.InferOutputTensor(name=self.output, datatype=kind, shape=shape)
        return messages.ModelInferResponse(outputs=[output], raw_output_contents=[content])


@contextmanager
def serving(
    models: Mapping[str, Model] = MODELS,
    inputs: Mapping[str, Any] = X,
    output: str = "y",
    dies_after: int = 10**9,
    slow: float = 0.0,
) -> Iterator[str]:
    """Its URL."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service.add_GRPCInferenceServiceServicer_to_server(Served(models, inputs, output, dies_after, slow), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None)


def asked(url: str, **more: Any) -> CheckRequest:
    return CheckRequest(
        **{"model": "small", "baseline": "dense", "server": url, "seconds": 0.1, "max_slowdown": 1e3, **more}
    )


def measured(model: float, baseline: float, spread: float = 0.02) -> Callable[..., Iterator[np.ndarray]]:
    """In place of `turns`: sixty calls are made, and their times drawn about the two medians."""

    def turns(one: Any, other: Any, seconds: float, **_: Any) -> Iterator[np.ndarray]:
        for _block in range(30):
            one()
            other()
            yield 1e-3 * np.array([[model], [baseline]]) * np.exp(spread * RNG.normal(size=(2, 10)))

    return turns


def graph(path: Path, scale: float = 1.0) -> Path:
    """`y = softmax(x w) * scale`."""
    body = "h = MatMul (x, w)\n s = Softmax <axis = -1> (h)\n y = Mul (s, k)"
    save(parsed(body, "float[B, 4] x", "float[B, 3] y", f"float[4, 3] w, float k = {{{scale}}}"), path)
    return path


def text_model(folder: Path) -> Path:
    """A folder with a graph of texts as small as can be, `model.onnx`, its weights beside it, and a tokenizer."""
    folder.mkdir()
    made = parsed(
        "rows = Gather (table, input_ids) m = Cast <to = 1> (attention_mask) axis = Constant <value_ints = [2]> ()"
        " wide = Unsqueeze (m, axis) kept = Mul (rows, wide) one = Constant <value_ints = [1]> ()"
        " logits = ReduceSum <keepdims = 0> (kept, one)",
        "int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask",
        "float[batch, 16] logits",
        "float[25, 16] table",
    )
    save(made, folder / "model.onnx")
    folders.tokenizer().save_pretrained(folder)
    return folder
