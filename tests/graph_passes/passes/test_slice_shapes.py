"""Shapes of some axes become slices of whole shapes, and keep their numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes.passes import SliceShapes
from tests.graph_passes.graphs import graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched

X = np.zeros((2, 3, 5), np.float32)
ATTRIBUTES = [f"start = {start}, end = {end}" for start in range(-5, 6) for end in range(-5, 6)]


@pytest.mark.parametrize("attributes", ["start = 1", "end = 2", "end = -1", *ATTRIBUTES])
def test_the_selected_axes_stay(attributes: str) -> None:
    model = graph(f"y = Shape <{attributes}> (x)", inputs="float[B, S, 5] x", outputs="int64[N] y")
    result = SliceShapes()(model.clone())
    assert result.modified
    assert len(result.report.nodes) == 1
    assert operators(result.model).count("Slice") == 1
    assert result.model.graph.outputs[0].name == "y"
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    np.testing.assert_array_equal(run(result.model, {"x": X})[0], run(model, {"x": X})[0])
    assert_untouched(SliceShapes(), result.model)


def test_default_attributes_are_removed() -> None:
    model = graph("y = Shape <start = 0> (x)", inputs="float[B, S, 5] x", outputs="int64[3] y")
    result = SliceShapes()(model)
    assert result.modified
    assert operators(result.model) == ["Shape"]
    assert not result.model.graph[0].attributes


def test_a_whole_shape_stays() -> None:
    model = graph("y = Shape(x)", inputs="float[B, S, 5] x", outputs="int64[3] y")
    assert_untouched(SliceShapes(), model)
