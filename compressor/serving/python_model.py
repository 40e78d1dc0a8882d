"""ONNX Runtime under Triton's Python backend, for servers that have no other; copied beside the graph as `model.py`.

It needs `numpy<2` and `onnxruntime` in the server's Python and nothing of this package. The requests that the server
hands over together have inputs of the same lengths: they run as one batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils

_PROVIDERS = {"CPU": ["CPUExecutionProvider"], "GPU": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


class TritonPythonModel:
    """One instance of the model; the server calls `initialize` once, then `execute` with one request or more."""

    def initialize(self, args: dict[str, str]) -> None:
        if int(np.__version__.split(".")[0]) > 1:
            # Its arrays pass for empty ones (python_backend, pull request 384): clients would get answers of no bytes.
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
            # TensorFloat-32 keeps ten bits of a number: it is not fp32.
            providers[0] = (providers[0], {"device_id": args["model_instance_device_id"], "use_tf32": "0"})
        self.session = ort.InferenceSession(str(graph / graph.name if graph.is_dir() else graph), options, providers)
        if self.session.get_providers()[0] != _PROVIDERS[kind][0]:
            raise RuntimeError(f"{_PROVIDERS[kind][0]}: ONNX Runtime could not start it in the server's Python")
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request; where the batch of all fails, one may be at fault, and each is run alone."""
        feeds = [{name: self._given(request, name) for name in self.inputs} for request in requests]
        answers: list[Any]
        try:
            answers = self._together(feeds) if self.batched and len(feeds) > 1 else [self._run(one) for one in feeds]
        except Exception:
            answers = [self._tried(one) for one in feeds]
        return [_response(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _together(self, feeds: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """The outputs of each, all rows run as one batch."""
        outputs = self._run({name: np.concatenate([one[name] for one in feeds]) for name in self.inputs})
        ends = np.cumsum([len(one[self.inputs[0]]) for one in feeds])[:-1]
        parts = {name: np.split(output, ends) for name, output in outputs.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(len(feeds))]

    def _tried(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray] | str:
        """The outputs, or why there are none."""
        try:
            return self._run(feeds)
        except Exception as error:  # ONNX Runtime's own exceptions share no base but this one
            return " ".join(str(error).split())

    def _run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self.outputs, self.session.run(self.outputs, feeds), strict=True))

    def _given(self, request: Any, name: str) -> np.ndarray:
        found: np.ndarray = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
        return found


def _response(request: Any, answer: dict[str, np.ndarray] | str) -> Any:
    if isinstance(answer, str):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(answer))
    asked = request.requested_output_names()
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, answer[name]) for name in asked])
