"""Foreign graphs, end to end: shrunk, they compute what the PyTorch model computes with those heads gated."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.units import Site, find_sites, gated
from graph_passes import Plan, shrink
from tests.graph_passes.foreign import (
    Attention,
    fused_by_onnxruntime,
    fused_by_onnxscript,
    new_exporter,
    old_exporter,
)
from tests.graph_passes.graphs import error, operators, run
from tests.zoo import FAMILIES, random_plan

TOLERANCE = 1e-4


def cases(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The inputs of the export, and ones of another batch size and other lengths."""
    yield dict(inputs)
    generator = torch.Generator().manual_seed(3)
    other: dict[str, Tensor] = {}
    for name, value in inputs.items():
        length = 4 if "decoder" in name else 9
        other[name] = torch.ones(2, length, dtype=value.dtype)
        if "mask" in name:
            other[name][-1, length // 2 :] = 0
        else:
            other[name] = torch.randint(5, 90, (2, length), generator=generator)
    yield other


def assert_shrinks(graph: ir.Model, model: PreTrainedModel, inputs: Mapping[str, Tensor], sites: list[Site]) -> None:
    """For two plans, with layers with none, one and all heads: the numbers are PyTorch's, and nothing is refused."""
    for seed in range(2):
        plan = random_plan(sites, np.random.default_rng(seed))
        shrunk = shrink(graph.clone(), plan)
        assert shrunk.refused == ()
        assert {removed.site: removed.heads for removed in shrunk.removed} == {
            site.name: site.dropped for site in plan.sites if site.dropped
        }
        assert shrunk.folded == tuple(site.name for site in plan.sites)
        for case in cases(inputs):
            ours = run(shrunk.model, numpy(case, graph))
            assert error(ours, [torch_logits(model, plan, case)]) <= TOLERANCE


def numpy(inputs: Mapping[str, Tensor], graph: ir.Model) -> dict[str, np.ndarray]:
    types = {value.name: value.dtype.numpy() for value in graph.graph.inputs if value.dtype is not None}
    return {name: value.numpy().astype(types[name]) for name, value in inputs.items() if name in types}


def torch_logits(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor]) -> np.ndarray:
    with torch.no_grad(), gated(model, plan, attention="eager"):
        return model(**inputs).logits.numpy()


def prepare(family: str) -> tuple[PreTrainedModel, dict[str, Tensor], list[Site]]:
    model, inputs = FAMILIES[family](0)
    model.config.use_cache = False
    return model, inputs, find_sites(model, inputs)


OLD: list[tuple[str, int, Attention]] = [
    ("bert", 11, "eager"),
    ("gpt2", 13, "eager"),
    ("llama", 17, "sdpa"),
    ("t5", 17, "eager"),
]


@pytest.mark.parametrize(("family", "opset", "attention"), OLD)
def test_graphs_of_the_old_exporter(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    model, inputs, sites = prepare(family)
    graph = old_exporter(copy.deepcopy(model), inputs, tmp_path / "old.onnx", opset=opset, attention=attention)
    assert_shrinks(graph, model, inputs, sites)


NEW: list[tuple[str, int, Attention]] = [
    ("bert", 23, "sdpa"),
    ("gpt2", 18, "sdpa"),
    ("llama", 18, "eager"),
    ("t5", 18, "eager"),
]


@pytest.mark.parametrize(("family", "opset", "attention"), NEW)
def test_graphs_of_the_new_exporter(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    model, inputs, sites = prepare(family)
    graph = new_exporter(copy.deepcopy(model), inputs, tmp_path / "new.onnx", opset=opset, attention=attention)
    assert_shrinks(graph, model, inputs, sites)
    if family == "llama":
        fused = fused_by_onnxscript(graph)
        assert operators(fused).count("MultiHeadAttention") == len(sites)
        assert_shrinks(fused, model, inputs, sites)


def test_graphs_that_onnxscript_has_fused(tmp_path: Path) -> None:
    model, inputs, sites = prepare("bert")
    graph = new_exporter(copy.deepcopy(model), inputs, tmp_path / "new.onnx", opset=18, attention="sdpa")
    fused = fused_by_onnxscript(graph)
    assert operators(fused).count("Attention") == len(sites)
    assert_shrinks(fused, model, inputs, sites)


def test_graphs_that_onnx_runtime_has_fused(tmp_path: Path) -> None:
    model, inputs, sites = prepare("bert")
    old_exporter(copy.deepcopy(model), inputs, tmp_path / "old.onnx", opset=17, attention="eager")
    fused = fused_by_onnxruntime(tmp_path / "old.onnx", heads=4, width=32)
    assert operators(fused).count("Attention") == len(sites)
    assert_shrinks(fused, model, inputs, sites)
