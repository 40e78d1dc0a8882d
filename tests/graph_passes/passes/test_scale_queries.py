"""A scale moves from attention scores to queries if only its position changes."""

from __future__ import annotations

import pytest

from graph_passes.passes import ScaleQueries
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

INPUTS = "float[B, 2, S, 4] q, float[B, 2, 4, S] k, float[B, 1, 1, S] mask"
OUTPUT = "float[B, 2, S, S] y"
CONSTANTS = (
    "float c = {0.5}, float[1] d = {2.0}, float[2, 1, 1] each = {0.5, 2.0}, float[1, 1, 1, 1] wide = {0.5},"
    " int64[4] same = {0, 0, 0, 0}"
)
SOFTMAX = "a = Add(s, mask)  y = Softmax(a)"


@pytest.mark.parametrize(
    "scale",
    [
        "s = Mul(p, c)",
        "s = Mul(c, p)",
        "s = Div(p, d)",
        "e = Constant <value_float = 0.25> ()  s = Mul(p, e)",
        "f = Div(p, d)  s = Reshape(f, same)",
    ],
)
def test_a_scale_of_scores_moves_to_the_queries(scale: str) -> None:
    model = graph(f"p = MatMul(q, k)  {scale}  {SOFTMAX}", CONSTANTS, inputs=INPUTS, outputs=OUTPUT)
    result = rewritten(ScaleQueries(), model)
    (product,) = [node for node in result.model.graph if node.op_type == "MatMul"]
    assert result.report == (product.name or "",)
    query = product.inputs[0]
    assert query is not None
    assert (scaled := query.producer()) is not None
    assert scaled.op_type in ("Mul", "Div")
    assert scaled.inputs[0] is result.model.graph.inputs[0]


@pytest.mark.parametrize(
    ("body", "more_outputs"),
    [
        pytest.param(f"p = MatMul(q, k)  s = Mul(p, each)  {SOFTMAX}", "", id="a scale for each head"),
        pytest.param(
            f"p = MatMul(q, k)  s = Mul(p, c)  {SOFTMAX}  z = Relu(p)", ", float[B, 2, S, S] z", id="two readers"
        ),
        pytest.param(f"p = MatMul(q, k)  s = Mul(p, c)  {SOFTMAX}", ", float[B, 2, S, S] p", id="scores are an output"),
        pytest.param(f"p = MatMul(q, k)  s = Mul(p, c)  {SOFTMAX}", ", float[B, 2, S, S] s", id="scaled are an output"),
        pytest.param(f"p = MatMul(q, k)  s = Mul(p, wide)  {SOFTMAX}", "", id="a number with several axes"),
        pytest.param(f"p = MatMul(q, k)  s = Div(d, p)  {SOFTMAX}", "", id="a quotient by the scores"),
        pytest.param("p = MatMul(q, k)  s = Mul(p, c)  y = Add(s, mask)", "", id="no softmax"),
        pytest.param(
            f"p = MatMul(q, k)  s = Mul(p, c)  {SOFTMAX}  z = Relu(s)", ", float[B, 2, S, S] z", id="a way past softmax"
        ),
        pytest.param(f"t = Mul(q, c)  s = MatMul(t, k)  {SOFTMAX}", "", id="scaled queries"),
    ],
)
def test_other_scales_stay(body: str, more_outputs: str) -> None:
    report = assert_untouched(ScaleQueries(), graph(body, CONSTANTS, inputs=INPUTS, outputs=OUTPUT + more_outputs))
    assert report == ()


@pytest.mark.parametrize("before", ["", "u = Mul(q, e)  "])
def test_layers_that_share_a_scale_are_each_scaled(before: str) -> None:
    body = (
        f"e = Constant <value_float = 0.25> ()  {before}"
        "p = MatMul(q, k)  s = Mul(p, e)  a = Add(s, mask)  y = Softmax(a)"
        f"  r = MatMul({'u' if before else 'q'}, k)  t = Mul(r, e)  z = Softmax(t)"
    )
    model = graph(body, CONSTANTS, inputs=INPUTS, outputs=f"{OUTPUT}, float[B, 2, S, S] z")
    result = rewritten(ScaleQueries(), model)
    assert len(result.report) == 2
    assert operators(result.model).count("Mul") == operators(model).count("Mul")
