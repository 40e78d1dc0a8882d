"""Whole graphs of transformers models in PyTorch, as exporters and optimizers write them, against the models."""

from __future__ import annotations

import copy
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from compressor.graph.config import GraphConfig
from compressor.graph.fusions import fuse
from compressor.graph.network import network_of
from compressor.graph.program import Program
from graph_passes.passes import Normalize
from tests.graph.whole import run_graph
from tests.graph_passes.exporters import Attention, export, fused_by_onnxruntime, fused_by_onnxscript, trace
from tests.units.masks import one_layer
from tests.zoo import FAMILIES, Case

TOLERANCE = 1e-5
DECODED = ("bart", "marian", "t5")
TEXTS = ("bert", "roberta", "distilbert", "electra", "modernbert", "gpt2", "llama", "qwen3", *DECODED)
NORMS = {"t5": "RMSNormalization", "llama": "RMSNormalization", "qwen3": "RMSNormalization"}


def assert_computes(graph: ir.Model, case: Case) -> ir.Model:
    """Check that a graph, and the fused one, which is returned, compute the logits of the model."""
    model, inputs = case
    Normalize()(graph)
    fused = fuse(graph)
    kinds = {value.name or "": value.dtype for value in graph.graph.inputs}
    feeds = {name: inputs[name].int() if kind == ir.DataType.INT32 else inputs[name] for name, kind in kinds.items()}
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        for candidate in (graph, fused):
            (logits,) = run_graph(candidate, feeds)
            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    return fused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


def traced(family: str, folder: Path, opset: int) -> tuple[ir.Model, Case]:
    case = FAMILIES[family](0)
    return trace(copy.deepcopy(case[0]), case[1], folder / "graph.onnx", opset=opset, attention="eager"), case


def count(model: ir.Model, operator: str) -> int:
    return sum(node.op_type == operator for node in model.graph)


def test_bert_of_the_older_exporter(folder: Path) -> None:
    graph, case = traced("bert", folder, 14)
    fused = assert_computes(graph, case)
    assert count(fused, "Gelu") == 3
    assert count(fused, "LayerNormalization") == 7
    optimized = fused_by_onnxruntime(folder / "graph.onnx", heads=4, width=32)
    assert count(optimized, "Attention") == 3
    assert_computes(optimized, case)


@pytest.mark.zoo
def test_llama_of_the_newer_exporter(folder: Path) -> None:
    model, inputs = one_layer("llama")
    graph = export(copy.deepcopy(model), inputs, folder / "graph.onnx", opset=18, attention="sdpa")
    fused = assert_computes(graph, (model, inputs))
    assert count(fused, "RMSNormalization") == 3
    assert count(fused, "QuickGelu") == 1
    network = network_of(Program.of(folder / "graph.onnx"), GraphConfig())
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        logits = network(**{name: inputs[name] for name in network.input_specs})["logits"]
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.zoo
@pytest.mark.parametrize("opset", [11, 14, 17])
@pytest.mark.parametrize("family", TEXTS)
def test_graphs_of_the_older_exporter(family: str, opset: int, folder: Path) -> None:
    if opset == 11 and family == "modernbert":
        pytest.skip("the exporter refuses it")
    graph, case = traced(family, folder, opset)
    fused = assert_computes(graph, case)
    assert count(fused, NORMS.get(family, "LayerNormalization"))


@pytest.mark.zoo
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("family", TEXTS)
def test_graphs_of_the_newer_exporter(family: str, opset: int, folder: Path) -> None:
    model, inputs = FAMILIES[family](0)
    attention: Attention = "eager" if family == "t5" else "sdpa"  # the exporter fails at the other
    graph = export(copy.deepcopy(model), inputs, folder / "graph.onnx", opset=opset, attention=attention)
    optimized = fused_by_onnxscript(graph)
    fused = assert_computes(graph, (model, inputs))
    assert count(fused, NORMS.get(family, "LayerNormalization"))
    if (family, opset) != ("gpt2", 18):  # there onnxscript leaves a `Gemm` of three axes, which no runtime loads
        assert_computes(optimized, (model, inputs))
