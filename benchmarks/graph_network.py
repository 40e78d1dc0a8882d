"""Measure forward and backward of a graph in torch against those of the model that it was exported from.

    python -m benchmarks.graph_network --steps 12

A BERT of MiniLM's shape and one of BERT-base's are exported by torch's older exporter. Model and network run in turn in
one process, without dropout; the printed ratio is the median over pairs of neighbouring steps.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from compressor.graph.config import GraphConfig
from compressor.graph.network import network_of
from compressor.graph.program import Program

SHAPES: dict[str, dict[str, Any]] = {
    "MiniLM": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "BERT-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
MAX_RATIO = 1.3


class _Logits(nn.Module):
    """A classifier with positional inputs, as the exporter reads them."""

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def export(model: BertForSequenceClassification, inputs: dict[str, Tensor], path: Path) -> None:
    """Write the graph of a model."""
    free = {name: {0: "batch", 1: "length"} for name in inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        torch.onnx.export(
            _Logits(model),
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=["logits"],
            dynamo=False,
            opset_version=17,
            dynamic_axes=free,
        )


def step_seconds(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Seconds of a forward and a backward."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(**inputs)["logits"].square().sum().backward()
    return time.perf_counter() - start


def main() -> None:
    """Print the time of both models, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(**shape)).eval()
        ids = torch.randint(5, 30000, (options.batch, options.seq))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["attention_mask"][-1, options.seq // 2 :] = 0
        with tempfile.TemporaryDirectory() as folder:
            export(model, inputs, Path(folder) / "model.onnx")
            network = network_of(Program.of(Path(folder) / "model.onnx"), GraphConfig())
        pairs = [(step_seconds(model, inputs), step_seconds(network, inputs)) for _ in range(options.steps + 1)][1:]
        times = np.array(pairs)
        ratio = float(np.median(times[:, 1] / times[:, 0]))
        median = 1e3 * np.median(times, axis=0)
        print(
            f"{name}, batch {options.batch}, length {options.seq}: transformers {median[0]:.0f} ms, graph"
            f" {median[1]:.0f} ms, {ratio:.2f} times (goal: at most {MAX_RATIO})"
        )


if __name__ == "__main__":
    main()
