"""Shrunk graphs of other exporters compute what the PyTorch model computes with the dropped units gated to zero."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.model_folder.access import access_of
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.units import find_groups, gated
from graph_passes import Plan, shrink
from tests.graph_passes.exporters import Attention, export, fused_by_onnxruntime, fused_by_onnxscript, trace
from tests.graph_passes.graphs import error, operators, run
from tests.random_plans import random_groups
from tests.units.masks import one_layer
from tests.zoo import FAMILIES, Case

TOLERANCE = 1e-4


class Source:
    """A tiny model, its inputs, its groups, and the fingerprints of its weights.

    Args:
        family: the family of the model.
        make: makes the model and its inputs.
    """

    def __init__(self, family: str, make: Callable[[str], Case] = lambda family: FAMILIES[family](0)) -> None:
        self.model, self.inputs = make(family)
        self.model.config.use_cache = False
        for name, parameter in self.model.named_parameters():
            if parameter.dim() == 1 and not name.endswith("bias"):  # norms of a new model are equal
                torch.nn.init.normal_(parameter, 1.0, 0.1)
        self.groups = find_groups(self.model, self.inputs)
        self.weights = weight_fingerprints(access_of(self.model))

    def graph(self, exporter: Callable[..., ir.Model], path: Path, opset: int, attention: Attention) -> ir.Model:
        return exporter(copy.deepcopy(self.model), self.inputs, path, opset=opset, attention=attention)

    def train(self) -> None:
        """Change every weight."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

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


def assert_shrinks(graph: ir.Model, source: Source, seeds: Sequence[int] = (0, 1), *, by_value: bool = False) -> None:
    """Check plans with groups of none, one and all units: the numbers are PyTorch's, and nothing is refused.

    Args:
        graph: the graph, which is not changed.
        source: the model that it was exported from.
        seeds: seeds of the plans.
        by_value: whether the plans record the weights of the model, which it may have been given after the export;
            otherwise the graph has names and these weights.
    """
    for seed in seeds:
        plan = random_groups(source.groups, np.random.default_rng(seed))
        if by_value:
            plan = record_weights(plan, source.weights, access_of(source.model))
        weights = {name: tensor.numpy() for name, tensor in source.model.state_dict().items()} if by_value else None
        shrunk = shrink(graph.clone(), plan, weights=weights)
        assert set(shrunk.transferred) == {name for name, record in plan.weights.items() if record.is_changed}
        assert shrunk.refused == ()
        assert {removed.group: removed.units for removed in shrunk.removed} == {
            group.name: group.dropped for group in plan.groups if group.dropped
        }
        assert shrunk.folded == tuple(group.name for group in plan.groups)
        for case in source.cases():
            outputs = run(shrunk.model, feeds(case, graph))
            assert error(outputs, [torch_logits(source.model, plan, case)]) <= TOLERANCE


def nameless(graph: ir.Model) -> ir.Model:
    """A copy whose nodes and weights have other names, as optimizers leave them, and no record of modules."""
    copy = graph.clone()
    for number, node in enumerate(copy.graph):
        node.name = f"node{number}"
        node.metadata_props.clear()
    for number, value in enumerate(list(copy.graph.initializers.values())):
        value.name = f"constant{number}"
    return copy


def feeds(inputs: Mapping[str, Tensor], graph: ir.Model) -> dict[str, np.ndarray]:
    """The inputs that a graph reads, in its types."""
    types = {value.name: value.dtype.numpy() for value in graph.graph.inputs if value.dtype is not None}
    return {name: value.numpy().astype(types[name]) for name, value in inputs.items() if name in types}


def torch_logits(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor]) -> np.ndarray:
    with torch.no_grad(), gated(model, plan, attention="eager"):
        return model(**inputs).logits.numpy()


Form = tuple[str, int, Attention]

TRACED: list[Form] = [("bert", 11, "eager")]
TRACED_IN_ZOO: list[Form] = [("llama", 17, "sdpa"), ("gpt2", 13, "eager"), ("t5", 17, "eager")]
EXPORTED_IN_ZOO: list[Form] = [("bert", 23, "sdpa"), ("gpt2", 18, "sdpa"), ("t5", 18, "eager")]


@pytest.mark.parametrize(
    ("family", "opset", "attention"), [*TRACED, *(pytest.param(*case, marks=pytest.mark.zoo) for case in TRACED_IN_ZOO)]
)
def test_graphs_of_the_older_exporter(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    source = Source(family)
    graph = source.graph(trace, tmp_path / "traced.onnx", opset, attention)
    assert_shrinks(graph, source, (0,))
    source.train()
    assert_shrinks(nameless(graph), source, (1,), by_value=True)


@pytest.mark.zoo
@pytest.mark.parametrize(("family", "opset", "attention"), EXPORTED_IN_ZOO)
def test_graphs_of_the_newer_exporter(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    source = Source(family)
    graph = source.graph(export, tmp_path / "exported.onnx", opset, attention)
    assert_shrinks(graph, source, (0,))
    assert_shrinks(nameless(graph), source, (1,), by_value=True)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("family", "attention", "op"), [("bert", "sdpa", "Attention"), ("llama", "eager", "MultiHeadAttention")]
)
def test_graphs_before_and_after_onnxscript_fuses_them(
    family: str, attention: Attention, op: str, tmp_path: Path
) -> None:
    source = Source(family, one_layer)
    graph = source.graph(export, tmp_path / "exported.onnx", 18, attention)
    assert_shrinks(graph, source)
    fused = fused_by_onnxscript(graph)
    assert operators(fused).count(op) == sum(group.type == "heads" for group in source.groups)
    assert_shrinks(fused, source)


def test_graphs_that_onnx_runtime_has_fused(tmp_path: Path) -> None:
    source = Source("bert")
    source.graph(trace, tmp_path / "traced.onnx", 17, "eager")
    fused = fused_by_onnxruntime(tmp_path / "traced.onnx", heads=4, width=32)
    assert operators(fused).count("Attention") == sum(group.type == "heads" for group in source.groups)
    assert_shrinks(fused, source, (0,))
    assert_shrinks(nameless(fused), source, (1,), by_value=True)
