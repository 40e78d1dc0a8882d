"""Layout operators on weights are computed once; what computes or depends on an input stays."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.passes import FoldWeights
from tests.graph_passes.graphs import content, graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

SQUARE = "float[8, 8] w"


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("f = Transpose <perm = [1, 0]> (w)", SQUARE),
        ("f = Cast <to = 1> (w)", "float16[8, 8] w"),
        ("f = Concat <axis = 1> (v, w)", "float[8, 3] v, float[8, 5] w"),
        ("f = Reshape(w, shape)", "float[64] w, int64[2] shape = {8, 8}"),
        ("f = Squeeze(w, axes)", "float[1, 8, 8] w, int64[1] axes = {0}"),
        ("f = Unsqueeze(w, axes)", "float[8, 8] w, int64[1] axes = {0}"),
        (
            "joined = Concat <axis = 0> (v, w)  wide = Cast <to = 1> (joined)  f = Transpose(wide)",
            "float16[2, 8] v, float16[6, 8] w",
        ),
    ],
    ids=["transposed", "cast", "concatenated", "reshaped", "squeezed", "unsqueezed", "chain"],
)
def test_layout_of_weights_becomes_an_initializer(body: str, weights: str) -> None:
    result = rewritten(FoldWeights(), graph(f"{body}  y = MatMul(x, f)", weights))
    assert operators(result.model) == ["MatMul"]
    assert result.report == ("f",)
    assert list(result.model.graph.initializers) == ["f"], "weights that nothing reads any more are removed"


def test_a_folded_weight_has_the_content_of_its_operator() -> None:
    model = graph("f = Transpose(w)  y = MatMul(x, f)", "float[8, 8] w")
    weight = content(model, "w")
    np.testing.assert_array_equal(content(FoldWeights()(model).model, "f"), weight.T)


def test_large_weights_are_folded() -> None:
    wide = "float[B, S, 600]"
    model = graph("f = Transpose(w)  y = MatMul(x, f)", "float[600, 600] w", inputs=f"{wide} x", outputs=f"{wide} y")
    assert rewritten(FoldWeights(), model).report == ("f",)


def test_constants_in_nodes_count_as_weights() -> None:
    body = "shape = Constant <value_ints = [8, 8]> ()  f = Reshape(w, shape)  y = MatMul(x, f)"
    result = rewritten(FoldWeights(), graph(body, "float[64] w"))
    assert operators(result.model) == ["MatMul"]
    assert list(result.model.graph.initializers) == ["f"]


def test_quantized_weights_are_folded_before_their_scales() -> None:
    body = "f = Transpose(w)  d = DequantizeLinear(f, scale)  y = MatMul(x, d)"
    result = rewritten(FoldWeights(), graph(body, "int8[8, 8] w, float scale = {0.1}"))
    assert operators(result.model) == ["DequantizeLinear", "MatMul"]
    assert result.report == ("f",)


def test_a_weight_that_another_node_reads_stays_beside_its_copy() -> None:
    model = graph("f = Transpose(w)  a = MatMul(x, f)  y = MatMul(a, w)", SQUARE)
    weight = content(model, "w")
    result = rewritten(FoldWeights(), model)
    assert operators(result.model) == ["MatMul", "MatMul"]
    assert result.report == ("f",)
    np.testing.assert_array_equal(content(result.model, "w"), weight)
    np.testing.assert_array_equal(content(result.model, "f"), weight.T)


def test_a_folded_weight_that_two_nodes_read_is_stored_once() -> None:
    body = "f = Transpose(w)  a = MatMul(x, f)  y = MatMul(a, f)"
    assert list(rewritten(FoldWeights(), graph(body, SQUARE)).model.graph.initializers) == ["f"]


def test_weights_that_are_outputs_keep_their_names() -> None:
    body, outputs = "f = Transpose(w)  y = MatMul(x, f)", "float[B, S, 8] y, float[8, 8] f, float[8, 8] w"
    result = rewritten(FoldWeights(), graph(body, SQUARE, outputs=outputs), tolerance=0)
    assert [value.name for value in result.model.graph.outputs] == ["y", "f", "w"]
    assert set(result.model.graph.initializers) == {"f", "w"}


BRANCHES = """
    f = Transpose(w)  largest = ReduceMax <keepdims = 0> (x)  is_positive = Greater(largest, zero)
    y = If <
        then_branch = positive () => (float[B, S, 8] p) {{ {then} }},
        else_branch = negative () => (float[B, S, 8] n) {{ {otherwise} }}
    > (is_positive)
"""


@pytest.mark.parametrize(
    ("then", "otherwise", "kept"),
    [
        ("p = MatMul(x, f)", "n = MatMul(x, f)", {"f", "zero"}),
        ("p = MatMul(x, f)", "n = MatMul(x, w)", {"f", "w", "zero"}),
        ("c = Constant <value = float[1] {2.0}> ()  p = Mul(x, c)", "n = MatMul(x, f)", {"f", "zero"}),
    ],
    ids=["folded", "both", "constant"],
)
def test_branches_read_the_folded_weight_and_keep_their_own(then: str, otherwise: str, kept: set[str]) -> None:
    model = graph(BRANCHES.format(then=then, otherwise=otherwise), f"{SQUARE}, float zero = {{0.0}}")
    result = rewritten(FoldWeights(), model)
    assert operators(result.model) == ["ReduceMax", "Greater", "If"]
    assert set(result.model.graph.initializers) == kept
    assert result.report == ("f",)


@pytest.mark.parametrize("operator", ["Neg(w)", "Mul(w, w)", "DequantizeLinear(q, s)", "MatMul(w, w)"])
def test_operators_that_compute_stay(operator: str) -> None:
    weights = "int8[8, 8] q, float s = {0.1}" if "q" in operator else SQUARE
    model = graph(f"c = {operator}  f = Transpose(c)  y = MatMul(x, f)", weights)
    assert assert_untouched(FoldWeights(), model) == ()


def test_operators_that_read_an_input_stay() -> None:
    body = """
        t = Transpose <perm = [0, 2, 1]> (x)  j = Concat <axis = 2> (t, w)
        u = Unsqueeze(j, axes)  y = Squeeze(u, axes)
    """
    model = graph(body, "float[2, 8, 8] w, int64[1] axes = {1}", inputs="float[2, S, 8] x", outputs="float[2, 8, N] y")
    assert assert_untouched(FoldWeights(), model) == ()


def test_an_input_with_a_default_stays_an_input() -> None:
    model = graph("f = Transpose(w)  y = MatMul(x, f)", SQUARE, inputs="float[B, S, 8] x, float[8, 8] w")
    assert assert_untouched(FoldWeights(), model) == ()


def test_names_and_metadata_of_the_graph_stay() -> None:
    model = graph("f = Transpose(w)  y = MatMul(x, f)", SQUARE)
    model.metadata_props["origin"] = "a test"
    model.graph[1].name = "product"
    result = rewritten(FoldWeights(), model)
    assert result.model.metadata_props == {"origin": "a test"}
    assert [node.name for node in result.model.graph] == ["product"]
    assert result.model.graph.initializers["f"].dtype == ir.DataType.FLOAT
