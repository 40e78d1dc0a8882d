"""An endpoint that computes a NumPy function, for tests that need neither a server nor an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.targets.base import TOLERANCE, Feeds, Precision
from compressor.targets.tensor_specs import FREE, TensorSpec

X = (TensorSpec("x", ir.DataType.FLOAT, (FREE, 4)),)


class FunctionEndpoint:
    """A model that is a function of arrays by name."""

    concurrency = 4
    graph = None
    has_random_inputs = True

    def __init__(
        self,
        function: Callable[[Feeds], dict[str, np.ndarray]] = lambda feeds: {"y": feeds["x"] * 2},
        *,
        name: str = "function",
        inputs: tuple[TensorSpec, ...] = X,
        precision: Precision = "fp32",
        id_limits: Mapping[str, int] | None = None,
    ) -> None:
        self.function, self.name, self.inputs = function, name, inputs
        self.tolerance = TOLERANCE[precision]
        self.host = "this process"
        self.id_limits: Mapping[str, int] = id_limits or {}

    def trial_batch(self, batch: int, seq: int, seed: int) -> Feeds:
        rng = np.random.default_rng(seed)
        shapes = {tensor.name: [batch, *tensor.dims[1:]] for tensor in self.inputs}
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def fitting_length(self, batch: int, longest: int) -> int:
        return longest

    def encode(self, feeds: Feeds) -> Feeds:
        return feeds

    def call(self, request: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self.function(request)

    infer = call

    def wait_until_idle(self) -> None: ...
