"""ONNX Runtime in Triton's Python backend, for servers without another backend; copied beside the graph as `model.py`.

The file needs `numpy<2` and `onnxruntime` in the server's Python, and nothing of this package. Requests that the server
passes together have inputs of the same lengths, so that they run as one batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils

_PROVIDERS = {"CPU": ["CPUExecutionProvider"], "GPU": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
Feeds = dict[str, np.ndarray]


class TritonPythonModel:
    """One instance of the model; the server calls `initialize` once, then `execute` with one request or more."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the graph on the instance's device."""
        if int(np.__version__.split(".")[0]) > 1:
            # The backend reads arrays of NumPy 2 as empty ones (python_backend, pull request 384).
            raise RuntimeError(f"NumPy {np.__version__}: Triton's Python backend needs numpy<2")
        config = json.loads(args["model_config"])
        self.batched = config["max_batch_size"] > 0
        graph = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        options = ort.SessionOptions()
        threads = config["parameters"].get("intra_op_thread_count")
        options.intra_op_num_threads = int(threads["string_value"]) if threads else 0
        kind = args["model_instance_kind"]
        providers: list[Any] = list(_PROVIDERS[kind])
        if kind == "GPU":
            # TensorFloat-32 keeps ten bits of a number, which is not fp32.
            providers[0] = (providers[0], {"device_id": args["model_instance_device_id"], "use_tf32": "0"})
        self.session = ort.InferenceSession(str(graph / graph.name if graph.is_dir() else graph), options, providers)
        if self.session.get_providers()[0] != _PROVIDERS[kind][0]:
            raise RuntimeError(f"{_PROVIDERS[kind][0]}: ONNX Runtime could not start it in the server's Python")
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """The responses of all requests. If their common batch fails, each runs alone, so that only a bad one fails."""
        feeds = [{name: _array(request, name) for name in self.inputs} for request in requests]
        results: list[Any]
        try:
            batched = self.batched and len(feeds) > 1
            results = self._run_batched(feeds) if batched else [self._run(row) for row in feeds]
        except Exception:
            results = [self._run_or_explain(row) for row in feeds]
        return [_response(request, result) for request, result in zip(requests, results, strict=True)]

    def _run_batched(self, feeds: list[Feeds]) -> list[Feeds]:
        """The outputs of each request, all rows run as one batch."""
        outputs = self._run({name: np.concatenate([row[name] for row in feeds]) for name in self.inputs})
        ends = np.cumsum([len(row[self.inputs[0]]) for row in feeds])[:-1]
        parts = {name: np.split(output, ends) for name, output in outputs.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(len(feeds))]

    def _run_or_explain(self, feeds: Feeds) -> Feeds | str:
        """The outputs, or the message of the error."""
        try:
            return self._run(feeds)
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            return " ".join(str(error).split())

    def _run(self, feeds: Feeds) -> Feeds:
        return dict(zip(self.outputs, self.session.run(self.outputs, feeds), strict=True))


def _array(request: Any, name: str) -> np.ndarray:
    array: np.ndarray = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    return array


def _response(request: Any, result: Feeds | str) -> Any:
    if isinstance(result, str):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(result))
    names = request.requested_output_names()
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, result[name]) for name in names])
