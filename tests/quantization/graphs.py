"""Quantized graphs for the tests of quantization; each is made once in a test process."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.engines.prove import Case, make_cases
from compressor.quantization import QuantizedGraph, quantize_graph, quantize_symmetric
from compressor.targets import Feeds, Precision
from compressor.targets.onnxruntime import ort_session
from graph_passes import load, save
from tests.targets.graphs import Pruned, parsed, pruned
from tests.zoo import text

# Importing NNCF to find out whether it is there would send statistics.
needs_nncf = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("nncf", "openvino")),
    reason="needs NNCF and OpenVINO",
)

METADATA = {"origin": "a test"}
CASES = make_cases(lambda batch, seq, seed: text(batch, seq, seed))


def calibration_rows(count: int = 4) -> list[Feeds]:
    """Random rows of text."""
    batches = (text(2, 9, seed) for seed in range(100, 100 + count))
    return [{name: tensor.numpy() for name, tensor in batch.items()} for batch in batches]


class Quantized:
    """A pruned BERT whose graph has metadata, and its portable quantized graph.

    Attributes:
        source: the float graph.
        before: content of each file of the float graph before it was quantized.
        graph: the quantized graph.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.source = folder / "float" / "model.onnx"
        self.source.parent.mkdir()
        model = load(pruned("bert").shrunk)
        model.metadata_props.update(METADATA)
        save(model, self.source)
        self.before = files_of(self.source)
        self.graph: QuantizedGraph = quantize_graph(self.source, calibration_rows(), folder / "model.int8.onnx")

    @property
    def path(self) -> Path:
        """File of the quantized graph."""
        return self.graph.path

    @property
    def cases(self) -> tuple[Case, ...]:
        """Inputs of several sizes."""
        return CASES


@functools.cache
def quantized() -> Quantized:
    """A quantized BERT, made once in a test process."""
    return Quantized()


class Symmetric:
    """The symmetric quantized graph of a pruned family.

    Args:
        family: of `tests.zoo`.
        precision: `int8` or `fp8`.

    Attributes:
        source: the float graph.
        graph: the quantized graph.
    """

    def __init__(self, family: str, precision: Precision) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.source: Pruned = pruned(family)
        path = Path(self._folder.name) / "graph.onnx"
        self.graph: QuantizedGraph = quantize_symmetric(
            self.source.shrunk, [self.source.inputs], path, precision=precision
        )

    def model(self) -> ir.Model:
        """The quantized graph, loaded anew."""
        return load(self.graph.path)


@functools.cache
def symmetric(family: str, precision: Precision = "int8") -> Symmetric:
    """The symmetric quantized graph of a family, made once in a test process."""
    return Symmetric(family, precision)


def two_products() -> ir.Model:
    """A small graph in floats whose two products have weights, `first` and `second`."""
    body = "h = MatMul(x, v)  r = Relu(h)  m = MatMul(r, w)  y = Add(m, b)"
    model = parsed(body, "float[B, 6] x", "float[B, 5] y", "float[6, 7] v, float[7, 5] w, float[5] b")
    for node, name in zip(model.graph, ("first", "relu", "second", "bias"), strict=True):
        node.name = name
    return model


def vectors(count: int = 4) -> list[Feeds]:
    """Random rows of `two_products`."""
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(3, 6)).astype(np.float32)} for _ in range(count)]


def files_of(graph: Path) -> dict[str, bytes]:
    """Content of every file beside a graph, by name."""
    return {path.name: path.read_bytes() for path in graph.parent.iterdir()}


def run(graph: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """Outputs of a graph that the runtime does not optimize."""
    settings = {**ort_session.session_settings("cpu", 1), "graph_optimization": "none"}
    return ort_session.run_session(ort_session.open_session(graph, settings), feeds)
