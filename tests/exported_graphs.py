"""Exported graphs in ONNX Runtime, and their outputs beside those of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

Inputs = dict[str, Tensor]
TOLERANCE = 1e-5


class Session:
    """A graph in ONNX Runtime."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.axes = {value.name: value.shape for value in self._session.get_inputs()}

    def run(self, inputs: Inputs) -> dict[str, np.ndarray]:
        """Every output by name."""
        names = [value.name for value in self._session.get_outputs()]
        feeds = {name: inputs[name].numpy() for name in self.axes}
        return dict(zip(names, self._session.run(None, feeds), strict=True))


def assert_computes(path: Path, model: Any, inputs: Inputs) -> None:
    """Every output of the graph is that of the model."""
    with torch.no_grad():
        expected = model(**inputs)
    for name, output in Session(path).run(inputs).items():
        reference = expected[name].numpy()
        assert output.shape == reference.shape
        assert np.abs(output - reference).max() <= TOLERANCE * np.abs(reference).max(), name
