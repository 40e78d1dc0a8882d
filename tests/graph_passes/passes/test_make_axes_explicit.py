"""`Shape` and `Slice` state their axes in inputs, and compute the same numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes.passes import MakeAxesExplicit
from tests.graph_passes.graphs import graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched

X = np.zeros((2, 3, 5), np.float32)
ATTRIBUTES = [f"start = {start}, end = {end}" for start in (-5, -2, 0, 1, 4) for end in (-4, -1, 0, 2, 5)]


@pytest.mark.parametrize("attributes", ["start = 1", "end = 2", "end = -1", *ATTRIBUTES])
def test_the_selected_axes_stay(attributes: str) -> None:
    model = graph(f"y = Shape <{attributes}> (x)", inputs="float[B, S, 5] x", outputs="int64[N] y")
    result = MakeAxesExplicit()(model.clone())
    assert result.modified
    assert len(result.report) == 1
    assert operators(result.model).count("Slice") == 1
    assert result.model.graph.outputs[0].name == "y"
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    np.testing.assert_array_equal(run(result.model, {"x": X})[0], run(model, {"x": X})[0])
    assert_untouched(MakeAxesExplicit(), result.model)


def test_default_attributes_are_removed() -> None:
    model = graph("y = Shape <start = 0> (x)", inputs="float[B, S, 5] x", outputs="int64[3] y")
    result = MakeAxesExplicit()(model)
    assert result.modified
    assert operators(result.model) == ["Shape"]
    assert not result.model.graph[0].attributes


def test_a_whole_shape_stays() -> None:
    model = graph("y = Shape(x)", inputs="float[B, S, 5] x", outputs="int64[3] y")
    assert_untouched(MakeAxesExplicit(), model)


@pytest.mark.parametrize("axes", ["", ", axes"])
@pytest.mark.parametrize("steps", ["", ", steps"])
def test_a_slice_states_its_axes(axes: str, steps: str) -> None:
    inputs = "s, e" + (axes or (", " if steps else "")) + steps
    weights = "int64[2] s = {0, 1}, int64[2] e = {2, 3}, int64[2] axes = {0, 1}, int64[2] steps = {1, 2}"
    model = graph(f"y = Slice(x, {inputs})", weights, inputs="float[B, S, 5] x", outputs="float[M, N, 5] y")
    if axes:
        assert_untouched(MakeAxesExplicit(), model)
        return
    x = np.random.default_rng(0).standard_normal((2, 3, 5), np.float32)
    result = MakeAxesExplicit()(model.clone())
    assert len(result.report) == 1
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    np.testing.assert_array_equal(run(result.model, {"x": x})[0], run(model, {"x": x})[0])
    assert_untouched(MakeAxesExplicit(), result.model)


def test_a_slice_with_an_unknown_number_of_starts_stays() -> None:
    model = graph("y = Slice(x, s, e)", inputs="float[B, S, 5] x, int64[K] s, int64[K] e", outputs="float[M, N, L] y")
    assert_untouched(MakeAxesExplicit(), model)
