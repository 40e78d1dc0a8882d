"""Operator set 18 is lowered to 17 if 17 can express the graph."""

from __future__ import annotations

import pytest

from graph_passes import GraphError
from graph_passes.errors import GraphErrorCode
from graph_passes.passes import LowerOpset
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten


def test_reductions_and_splits_take_the_form_of_17() -> None:
    body = "m = ReduceMean <keepdims = 1> (x, axes)  a, b = Split <axis = 2, num_outputs = 2> (m)  y = Add(a, b)"
    model = graph(body, "int64[1] axes = {1}", outputs="float[B, 1, 4] y")
    result = rewritten(LowerOpset(), model, tolerance=0)
    assert result.report == 18
    assert result.model.opset_imports[""] == 17
    reduction, split, _ = result.model.graph
    assert (len(reduction.inputs), list(reduction.attributes["axes"].as_ints())) == (1, [1])
    assert "num_outputs" not in split.attributes


def test_a_reduction_of_every_axis_needs_no_attribute() -> None:
    model = graph("y = ReduceMax <noop_with_empty_axes = 0, keepdims = 1> (x)", outputs="float[1, 1, 1] y")
    (reduction,) = rewritten(LowerOpset(), model, tolerance=0).model.graph
    assert "axes" not in reduction.attributes
    assert "noop_with_empty_axes" not in reduction.attributes


def test_attributes_with_their_default_value_are_removed() -> None:
    body = 'y = Resize <antialias = 0, keep_aspect_ratio_policy = "stretch", mode = "linear"> (x, , s)'
    model = graph(
        body, "float[4] s = {1.0, 1.0, 0.5, 0.5}", inputs="float[1, 1, 4, 4] x", outputs="float[1, 1, 2, 2] y"
    )
    (resize,) = rewritten(LowerOpset(), model, tolerance=0).model.graph
    assert set(resize.attributes) == {"mode"}


@pytest.mark.parametrize(
    ("op", "body", "inputs", "outputs", "weights"),
    [
        (
            "Resize",
            'y = Resize <antialias = 1, mode = "linear"> (x, , s)',
            "float[1, 1, 4, 4] x",
            "float[1, 1, 2, 2] y",
            "float[4] s = {1.0, 1.0, 0.5, 0.5}",
        ),
        (
            "Split",
            "a, b = Split <axis = 1, num_outputs = 2> (x)  y = Concat <axis = 1> (b, a)",
            "float[B, 5] x",
            "float[B, 5] y",
            "",
        ),
        ("ReduceMax", "y = ReduceMax <noop_with_empty_axes = 1> (x)", "float[B, 5] x", "float[B, 5] y", ""),
        ("ReduceMax", "y = ReduceMax(x, axes)", "float[B, 2] x, int64[1] axes", "float[B, 1] y", ""),
        (
            "ScatterND",
            'y = ScatterND <reduction = "max"> (x, i, u)',
            "float[4] x, int64[1, 1] i, float[1] u",
            "float[4] y",
            "",
        ),
        ("Mish", "y = Mish(x)", "float[4] x", "float[4] y", ""),
    ],
)
def test_an_operator_without_a_form_in_17_is_named(op: str, body: str, inputs: str, outputs: str, weights: str) -> None:
    with pytest.raises(GraphError) as error:
        LowerOpset()(graph(body, weights, inputs=inputs, outputs=outputs))
    assert error.value.code is GraphErrorCode.UNSUPPORTED_OPERATOR
    assert error.value.details["op"] == op


def test_a_later_operator_set_is_refused() -> None:
    with pytest.raises(GraphError) as error:
        LowerOpset()(graph("y = Relu(x)", opset=23))
    assert error.value.code is GraphErrorCode.UNSUPPORTED_OPSET
    assert (error.value.details["opset"], error.value.details["maximum"]) == (23, 18)


@pytest.mark.parametrize("opset", [13, 17])
def test_an_older_operator_set_stays(opset: int) -> None:
    model = graph("a, b = Split <axis = 2> (x)  y = Add(a, b)", outputs="float[B, S, 4] y", opset=opset)
    assert operators(model) == ["Split", "Add"]
    assert assert_untouched(LowerOpset(), model) == opset
