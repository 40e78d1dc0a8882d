"""Run a model of Triton's Python backend in this process: `python backend_stand_in.py FOLDER < requests.json`.

Each request has values by the names of inputs, and may have `leaves_after`, the number of responses after which its
client has gone. The responses of each request are printed as JSON, with the files of packages that were imported.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

FINAL = 1


class Tensor:
    """An input or output."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.array = name, array

    def as_numpy(self) -> np.ndarray:
        return self.array


class Sender:
    """Collects responses; its client leaves after some of them."""

    def __init__(self, leaves_after: int) -> None:
        self.sent: list[dict[str, Any]] = []
        self.finals, self.leaves_after = 0, leaves_after

    def is_cancelled(self) -> bool:
        return len(self.sent) >= self.leaves_after

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.finals, "nothing follows the last response"
        self.finals += flags
        if response is not None:
            self.sent.append(response)


def response(outputs: Any = (), error: str | None = None) -> dict[str, Any]:
    if error is not None:
        return {"error": error}
    values = {tensor.name: tensor.array[0] for tensor in outputs}
    return {name: value.decode() if isinstance(value, bytes) else int(value) for name, value in values.items()}


def request(values: dict[str, Any]) -> Any:
    types = {"text_input": object, "stop": object, "max_tokens": np.int32, "temperature": np.float32, "chat": bool}
    sender = Sender(values.pop("leaves_after", 10**9))
    tensors = {}
    for name, value in values.items():
        items = [item.encode() if isinstance(item, str) else item for item in np.ravel(np.array(value, object))]
        tensors[name] = Tensor(name, np.array(items, types.get(name, np.int64)))
    return SimpleNamespace(tensors=tensors, sender=sender, get_response_sender=lambda: sender)


def main() -> None:
    folder = Path(sys.argv[1])
    stand_in: Any = ModuleType("triton_python_backend_utils")
    stand_in.Tensor, stand_in.InferenceResponse, stand_in.TritonError = Tensor, response, str
    stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    stand_in.get_input_tensor_by_name = lambda request, name: request.tensors.get(name)
    sys.modules[stand_in.__name__] = stand_in
    vars(np)["__version__"] = "1.26.4"  # the server has NumPy 1
    spec: Any = importlib.util.spec_from_file_location("model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    content = json.load(sys.stdin)
    model = module.TritonPythonModel()
    model.initialize({"model_config": json.dumps(content["config"]), "model_instance_kind": "CPU"})
    requests = [request(values) for values in content["requests"]]
    model.execute(requests)
    assert all(each.sender.finals == FINAL for each in requests)
    names = ("compressor", "graph_passes", "onnx_ir", "pydantic", "psutil")
    files = {name: str(getattr(sys.modules.get(name), "__file__", None)) for name in names}
    print(json.dumps({"responses": [each.sender.sent for each in requests], "files": files}))


if __name__ == "__main__":
    main()
