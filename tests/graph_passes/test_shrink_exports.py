"""Shrunk graphs of other exporters compute what the PyTorch model computes with the dropped heads gated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.units import Site, find_sites, gated
from graph_passes import Plan, shrink
from tests.graph_passes.exporters import Attention, export, fused_by_onnxruntime, fused_by_onnxscript, trace
from tests.graph_passes.graphs import error, operators, run
from tests.zoo import FAMILIES, random_plan

TOLERANCE = 1e-4


class Source:
    """A tiny model of one family, its inputs and its sites."""

    def __init__(self, family: str) -> None:
        self.model, self.inputs = FAMILIES[family](0)
        self.model.config.use_cache = False
        self.sites: list[Site] = find_sites(self.model, self.inputs)

    def graph(self, exporter: Callable[..., ir.Model], path: Path, opset: int, attention: Attention) -> ir.Model:
        return exporter(copy.deepcopy(self.model), self.inputs, path, opset=opset, attention=attention)

    def cases(self) -> Iterator[dict[str, Tensor]]:
        """The inputs of the export, and ones of another batch size and other lengths."""
        yield dict(self.inputs)
        generator = torch.Generator().manual_seed(3)
        longer: dict[str, Tensor] = {}
        for name, value in self.inputs.items():
            length = 4 if "decoder" in name else 9
            longer[name] = torch.ones(2, length, dtype=value.dtype)
            if "mask" in name:
                longer[name][-1, length // 2 :] = 0
            else:
                longer[name] = torch.randint(5, 90, (2, length), generator=generator)
        yield longer


def assert_shrinks(graph: ir.Model, source: Source) -> None:
    """Check two plans, with layers of none, one and all heads: the numbers are PyTorch's, and nothing is refused."""
    for seed in range(2):
        plan = random_plan(source.sites, np.random.default_rng(seed))
        shrunk = shrink(graph.clone(), plan)
        assert shrunk.refused == ()
        assert {removed.group: removed.units for removed in shrunk.removed} == {
            site.name: site.dropped for site in plan.sites if site.dropped
        }
        assert shrunk.folded == tuple(site.name for site in plan.sites)
        for case in source.cases():
            outputs = run(shrunk.model, feeds(case, graph))
            assert error(outputs, [torch_logits(source.model, plan, case)]) <= TOLERANCE


def feeds(inputs: Mapping[str, Tensor], graph: ir.Model) -> dict[str, np.ndarray]:
    """The inputs that a graph reads, in its types."""
    types = {value.name: value.dtype.numpy() for value in graph.graph.inputs if value.dtype is not None}
    return {name: value.numpy().astype(types[name]) for name, value in inputs.items() if name in types}


def torch_logits(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor]) -> np.ndarray:
    with torch.no_grad(), gated(model, plan, attention="eager"):
        return model(**inputs).logits.numpy()


Case = tuple[str, int, Attention]

TRACED: list[Case] = [("bert", 11, "eager"), ("gpt2", 13, "eager"), ("t5", 17, "eager")]
TRACED_IN_ZOO: list[Case] = [("llama", 17, "sdpa")]
EXPORTED_IN_ZOO: list[Case] = [("bert", 23, "sdpa"), ("gpt2", 18, "sdpa"), ("t5", 18, "eager")]


@pytest.mark.parametrize(
    ("family", "opset", "attention"), [*TRACED, *(pytest.param(*case, marks=pytest.mark.zoo) for case in TRACED_IN_ZOO)]
)
def test_graphs_of_the_older_exporter(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    source = Source(family)
    assert_shrinks(source.graph(trace, tmp_path / "traced.onnx", opset, attention), source)


@pytest.mark.zoo
@pytest.mark.parametrize(("family", "opset", "attention"), EXPORTED_IN_ZOO)
def test_graphs_of_the_newer_exporter(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    source = Source(family)
    assert_shrinks(source.graph(export, tmp_path / "exported.onnx", opset, attention), source)


@pytest.mark.parametrize(
    ("family", "attention", "op"),
    [("bert", "sdpa", "Attention"), pytest.param("llama", "eager", "MultiHeadAttention", marks=pytest.mark.zoo)],
)
def test_graphs_before_and_after_onnxscript_fuses_them(
    family: str, attention: Attention, op: str, tmp_path: Path
) -> None:
    source = Source(family)
    graph = source.graph(export, tmp_path / "exported.onnx", 18, attention)
    assert_shrinks(graph, source)
    fused = fused_by_onnxscript(graph)
    assert operators(fused).count(op) == len(source.sites)
    assert_shrinks(fused, source)


def test_graphs_that_onnx_runtime_has_fused(tmp_path: Path) -> None:
    source = Source("bert")
    source.graph(trace, tmp_path / "traced.onnx", 17, "eager")
    fused = fused_by_onnxruntime(tmp_path / "traced.onnx", heads=4, width=32)
    assert operators(fused).count("Attention") == len(source.sites)
    assert_shrinks(fused, source)
