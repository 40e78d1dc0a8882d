"""A fused normalization of a residual sum is computed as a sum and a normalization; one whose mean is read stays."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes.passes import SplitSkipNorms
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

INPUTS = "float[B, S, 8] x, float[B, S, 8] r"
ROWS = "float[B, S, 8] y"
WEIGHTS = "float[8] scale, float[8] shift, float[8] bias"
NORM = "com.microsoft.SkipLayerNormalization"


def norm(body: str, *weights: str, inputs: str = INPUTS, outputs: str = ROWS) -> ir.Model:
    """A graph whose nodes have the names of their first outputs."""
    model = graph(body, WEIGHTS, *weights, inputs=inputs, outputs=outputs)
    for node in model.graph:
        node.name = node.outputs[0].name
    return model


@pytest.mark.parametrize(
    ("operands", "read"),
    [
        ("x, r, scale", {"scale"}),
        ("x, r, scale, shift", {"scale", "shift"}),
        ("x, r, scale, , bias", {"scale", "bias"}),
        ("x, r, scale, shift, bias", {"scale", "shift", "bias"}),
    ],
    ids=["scale", "shift", "bias", "shift and bias"],
)
def test_a_norm_is_split_with_any_of_its_optional_inputs(operands: str, read: set[str]) -> None:
    result = rewritten(SplitSkipNorms(), norm(f"y = {NORM} <epsilon = 1e-05> ({operands})"))
    assert operators(result.model) == ["Sum", "LayerNormalization"]
    assert result.report == ("y",)
    operands_after = {value.name for node in result.model.graph for value in node.inputs if value is not None}
    assert operands_after & {"scale", "shift", "bias"} == read


@pytest.mark.parametrize("skip", ["float[S, 8] r", "float[1, S, 8] r"])
def test_a_residual_that_all_rows_share_is_added_to_each(skip: str) -> None:
    rewritten(SplitSkipNorms(), norm(f"y = {NORM}(x, r, scale, shift)", inputs=f"float[B, S, 8] x, {skip}"))


@pytest.mark.parametrize("epsilon", ["", "<epsilon = 0.001>"])
def test_small_variances_get_the_epsilon_of_the_operator(epsilon: str) -> None:
    body = f"a = Mul(x, tiny)  b = Mul(r, tiny)  y = {NORM} {epsilon} (a, b, scale, shift)"
    rewritten(SplitSkipNorms(), norm(body, "float tiny = {0.0001}"))


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (f"y, , , s = {NORM}(x, r, scale, shift, bias)  z = Relu(s)", f"{ROWS}, float[B, S, 8] z"),
        (f"y, , , s = {NORM}(x, r, scale, shift, bias)", f"{ROWS}, float[B, S, 8] s"),
        (f"y, , , s = {NORM}(x, r, scale, shift, bias)", "float[B, S, 8] s"),
        (f"y, , , s = {NORM}(x, r, scale, shift, bias)", ROWS),
    ],
    ids=["read", "output", "only output", "unread"],
)
def test_the_sum_before_a_norm_stays_readable(body: str, outputs: str) -> None:
    model = norm(body, outputs=outputs)
    result = rewritten(SplitSkipNorms(), model)
    assert operators(result.model) == ["Sum", "LayerNormalization", *operators(model)[1:]]
    assert [value.name for value in result.model.graph.outputs] == [value.name for value in model.graph.outputs]


def test_norms_in_a_row_are_split() -> None:
    body = f"""
        h, , , s = {NORM}(x, r, scale, shift)
        f = MatMul(h, w)
        y = {NORM}(f, s, scale, shift, bias)
    """
    result = rewritten(SplitSkipNorms(), norm(body, "float[8, 8] w"))
    assert result.report == ("h", "y")
    assert operators(result.model) == ["Sum", "LayerNormalization", "MatMul", "Sum", "LayerNormalization"]


def test_shapes_and_types_of_the_results_are_those_of_the_file() -> None:
    model = norm(
        f"h, , , s = {NORM}(x, r, scale)  y = Add(h, s)",
        "float[B, S, 8] h, float[B, S, 8] s",
    )
    result = rewritten(SplitSkipNorms(), model)
    values = {value.name: value for node in result.model.graph for value in node.outputs}
    for name in ("h", "s"):
        assert values[name].dtype == ir.DataType.FLOAT
        assert values[name].shape == ir.Shape(["B", "S", 8])


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (f"h, mean = {NORM}(x, r, scale)  y = Sub(h, mean)", ROWS),
        (f"h, , deviation = {NORM}(x, r, scale)  y = Mul(h, deviation)", ROWS),
        (f"y, mean = {NORM}(x, r, scale)", f"{ROWS}, float[B, S, 1] mean"),
    ],
    ids=["mean", "deviation", "output"],
)
def test_a_norm_whose_mean_or_variance_is_read_stays(body: str, outputs: str) -> None:
    assert assert_untouched(SplitSkipNorms(), norm(body, outputs=outputs)) == ()


@pytest.mark.parametrize("names", ["y, mean", "y, mean, deviation, s"])
def test_a_norm_whose_mean_nothing_reads_is_split(names: str) -> None:
    result = SplitSkipNorms()(norm(f"{names} = {NORM}(x, r, scale)"))
    assert operators(result.model) == ["Sum", "LayerNormalization"]


@pytest.mark.parametrize(
    "operator", ["com.microsoft.SkipSimplifiedLayerNormalization(x, r, scale)", "LayerNormalization(x, scale)"]
)
def test_other_norms_stay(operator: str) -> None:
    assert assert_untouched(SplitSkipNorms(), norm(f"y = {operator}")) == ()
