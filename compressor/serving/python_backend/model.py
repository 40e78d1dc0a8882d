"""A model in Triton's Python backend, for servers without the backend of its runtime; copied as `model.py`.

`session.py` beside it opens the model in its runtime. The files need `numpy<2` and the runtime in the server's Python,
and nothing of this package. Requests that the server passes together have inputs of the same lengths, so that they run
as one batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))
from session import Session

Feeds = dict[str, np.ndarray]


class TritonPythonModel:
    """One instance of the model; the server calls `initialize` once, then `execute` with one request or more."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model on the instance's device.

        Raises:
            RuntimeError: NumPy 2 is installed, which the backend does not support.
        """
        if int(np.__version__.split(".")[0]) > 1:
            # The backend reads arrays of NumPy 2 as empty ones (python_backend, pull request 384).
            raise RuntimeError(f"NumPy {np.__version__}: Triton's Python backend needs numpy<2")
        config = json.loads(args["model_config"])
        self.batched = config["max_batch_size"] > 0
        self.session = Session(Path(args["model_repository"]) / args["model_version"], config, args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """The responses of all requests. If their common batch fails, each runs alone, so that only a bad one fails."""
        feeds = [
            {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.session.inputs}
            for request in requests
        ]
        results: list[Any]
        try:
            batched = self.batched and len(feeds) > 1
            results = self._run_batched(feeds) if batched else [self.session.run(row) for row in feeds]
        except Exception:
            results = [self._run_or_explain(row) for row in feeds]
        return [_response(request, result) for request, result in zip(requests, results, strict=True)]

    def _run_batched(self, feeds: list[Feeds]) -> list[Feeds]:
        """The outputs of each request, all rows run as one batch."""
        outputs = self.session.run({name: np.concatenate([row[name] for row in feeds]) for name in self.session.inputs})
        ends = np.cumsum([len(row[self.session.inputs[0]]) for row in feeds])[:-1]
        parts = {name: np.split(output, ends) for name, output in outputs.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(len(feeds))]

    def _run_or_explain(self, feeds: Feeds) -> Feeds | str:
        """The outputs, or the message of the error."""
        try:
            return self.session.run(feeds)
        except Exception as error:  # the runtimes' exceptions share no other base
            return " ".join(str(error).split())


def _response(request: Any, result: Feeds | str) -> Any:
    if isinstance(result, str):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(result))
    names = request.requested_output_names()
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, result[name]) for name in names])
