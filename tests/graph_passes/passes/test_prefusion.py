"""Linear layers and sums of masks take the forms that fusion rules match."""

from __future__ import annotations

import pytest

from graph_passes.passes import PrepareForFusion
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

LINEAR = """
    flat = Reshape(x, rows)  h = Gemm(flat, w, b)
    size = Shape <start = 0, end = 2> (x)  back = Concat <axis = 0> (size, n)
    y0 = Reshape(h, back)  y = Relu(y0)
"""
WEIGHTS = ["float[8, 6] w", "float[6] b", "int64[2] rows = {-1, 8}", "int64[1] n = {6}"]
OUTPUT = "float[B, S, 6] y"


def test_a_flattened_linear_layer_is_unflattened() -> None:
    result = rewritten(PrepareForFusion(), graph(LINEAR, *WEIGHTS, outputs=OUTPUT))
    assert operators(result.model) == ["MatMul", "Add", "Relu"]
    assert len(result.report) == 1
    assert list(result.model.graph.initializers) == ["w", "b"]


def test_a_linear_layer_without_a_bias_is_one_product() -> None:
    model = graph(LINEAR.replace("w, b", "w"), *WEIGHTS[:1], *WEIGHTS[2:], outputs=OUTPUT)
    assert operators(rewritten(PrepareForFusion(), model).model) == ["MatMul", "Relu"]


@pytest.mark.parametrize(
    ("body", "weights", "outputs"),
    [
        pytest.param(LINEAR.replace("Gemm(", "Gemm <alpha = 2.0> ("), WEIGHTS, OUTPUT, id="scaled"),
        pytest.param(
            LINEAR.replace("Gemm(", "Gemm <transB = 1> ("), ["float[6, 8] w", *WEIGHTS[1:]], OUTPUT, id="transposed"
        ),
        pytest.param(
            LINEAR.replace("(size, n)", "(n, size)"), WEIGHTS, "float[6, B, S] y", id="restored to other axes"
        ),
        pytest.param(
            LINEAR,
            ["float[4, 3] w", "float[3] b", "int64[2] rows = {-1, 4}", "int64[1] n = {6}"],
            OUTPUT,
            id="of parts of a position",
        ),
        pytest.param(LINEAR + "z = Relu(h)", WEIGHTS, f"{OUTPUT}, float[N, 6] z", id="two readers"),
        pytest.param(LINEAR, WEIGHTS, f"{OUTPUT}, float[N, 6] h", id="an output of the graph"),
    ],
)
def test_other_linear_layers_stay(body: str, weights: list[str], outputs: str) -> None:
    assert assert_untouched(PrepareForFusion(), graph(body, *weights, outputs=outputs)) == ()


SCORES = "float[B, 2, S, 4] q, float[B, 2, 4, S] k, float[1, 2, S, S] bias, float[B, 1, S, S] mask"


def test_addends_of_scores_are_summed_first() -> None:
    model = graph(
        "s = MatMul(q, k)  t = Mul(s, c)  u = Add(t, bias)  v = Add(u, mask)  y = Softmax <axis = -1> (v)",
        "float c = {0.5}",
        inputs=SCORES,
        outputs="float[B, 2, S, S] y",
    )
    result = rewritten(PrepareForFusion(), model)
    assert len(result.report) == 1
    assert operators(result.model) == ["MatMul", "Mul", "Add", "Add", "Softmax"]
    scores = result.model.graph[-1].inputs[0]
    assert scores is not None
    total = scores.producer()
    assert total is not None
    assert total.inputs[1] is not None
    addend = total.inputs[1].producer()
    assert addend is not None
    assert [value.name for value in addend.inputs if value is not None] == ["bias", "mask"]


def test_one_sum_serves_all_layers() -> None:
    layer = "s{0} = MatMul(q, k)  u{0} = Add(s{0}, bias)  v{0} = Add(u{0}, mask)  y{0} = Softmax <axis = -1> (v{0})  "
    body = layer.format(1) + layer.format(2).replace("MatMul(q, k)", "MatMul(y1, s1)")
    model = graph(body, inputs=SCORES, outputs="float[B, 2, S, S] y1, float[B, 2, S, S] y2")
    result = rewritten(PrepareForFusion(), model)
    assert len(result.report) == 2
    assert operators(result.model).count("Add") == 3


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("s = MatMul(q, k)  u = Add(s, bias)  y = Softmax(u)", id="one addend"),
        pytest.param("s = Relu(mask)  u = Add(s, bias)  v = Add(u, mask)  y = Softmax(v)", id="no product"),
    ],
)
def test_other_sums_stay(body: str) -> None:
    model = graph(body, inputs=SCORES, outputs="float[B, 2, S, S] y")
    assert assert_untouched(PrepareForFusion(), model) == ()


@pytest.mark.parametrize("total", ["u", "v"])
def test_a_sum_that_the_graph_returns_stays(total: str) -> None:
    body = "s = MatMul(q, k)  u = Add(s, bias)  v = Add(u, mask)  y = Softmax(v)"
    model = graph(body, inputs=SCORES, outputs=f"float[B, 2, S, S] y, float[B, 2, S, S] {total}")
    assert assert_untouched(PrepareForFusion(), model) == ()
