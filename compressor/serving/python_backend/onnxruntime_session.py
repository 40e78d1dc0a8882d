"""A graph in ONNX Runtime, for `model.py`; copied beside it as `session.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

_PROVIDERS = {"CPU": ["CPUExecutionProvider"], "GPU": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


class Session:
    """The graph `model.onnx`, loaded on the instance's device; `inputs` and `outputs` are names."""

    def __init__(self, folder: Path, config: dict[str, Any], args: dict[str, str]) -> None:
        graph = folder / "model.onnx"
        options = ort.SessionOptions()
        threads = config["parameters"].get("intra_op_thread_count")
        options.intra_op_num_threads = int(threads["string_value"]) if threads else 0
        kind = args["model_instance_kind"]
        providers: list[Any] = list(_PROVIDERS[kind])
        if kind == "GPU":
            # TensorFloat-32 keeps ten bits of a number, which is not fp32.
            providers[0] = (providers[0], {"device_id": args["model_instance_device_id"], "use_tf32": "0"})
        self._session = ort.InferenceSession(str(graph / graph.name if graph.is_dir() else graph), options, providers)
        if self._session.get_providers()[0] != _PROVIDERS[kind][0]:
            raise RuntimeError(f"{_PROVIDERS[kind][0]}: ONNX Runtime could not start it in the server's Python")
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return dict(zip(self.outputs, self._session.run(self.outputs, feeds), strict=True))
