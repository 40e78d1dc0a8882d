"""A graph that runs layer by layer in ONNX Runtime computes what it computes as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import graph_passes
from compressor.graph.layers import LayeredGraph, LayerPass
from graph_passes.passes import Normalize
from tests.exported_graphs import Inputs, Session
from tests.graph.test_network import legacy
from tests.zoo import text

FAMILIES = [
    name if name in ("bert", "gpt2") else pytest.param(name, marks=pytest.mark.zoo)
    for name in ("bert", "gpt2", "llama", "t5", "bart")
]


def layered(path: Path) -> LayeredGraph:
    model = graph_passes.load(path)
    Normalize()(model)
    return LayeredGraph(model)


def arrays(inputs: Inputs) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in inputs.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_compute_the_outputs_of_the_graph(family: str, tmp_path: Path) -> None:
    path, inputs = legacy(family, tmp_path)
    graph, expected = layered(path), Session(path).run(inputs)
    run = LayerPass(graph, [arrays(inputs)], {})
    run.advance(len(graph.layers) - 1)
    (outputs,) = run.observe(graph.layers[-1].results)
    assert len(graph.layers) > 3
    assert outputs.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(outputs[name] - array).max() <= 1e-5 * np.abs(array).max()


def test_changed_weights_have_an_effect_from_their_layer_on(tmp_path: Path) -> None:
    path, _ = legacy("bert", tmp_path)
    graph, changed = layered(path), dict[str, np.ndarray]()
    batches = [arrays(text(3, length=length)) for length in (5, 9)]
    linear = graph.linears[-1]
    assert linear.weight.const_value is not None
    whole, pruned = (LayerPass(graph, batches, weights) for weights in ({}, changed))
    last = len(graph.layers) - 1
    for each in (whole, pruned):
        each.advance(last)
    read = linear.activation.name or ""
    for before, after in zip(whole.observe([linear.activation]), pruned.observe([linear.activation]), strict=True):
        assert np.array_equal(before[read], after[read])
    changed[linear.weight.name or ""] = np.zeros_like(linear.weight.const_value.numpy())
    for after in pruned.observe([linear.output]):
        rows = after[linear.output.name or ""]
        assert np.ptp(rows, axis=0).max() == 0  # the bias alone
