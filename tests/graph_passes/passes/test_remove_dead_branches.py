"""Of an attention without heads, only the output bias and the residual remain; its products are removed."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
import pytest

from graph_passes.passes import RemoveDeadBranches
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.layers import SOME_LAYERS
from tests.graph_passes.passes.checks import assert_untouched, rewritten
from tests.graph_passes.passes.gated_layers import gated_layer, set_gate

GATED = 'h = MatMul(x, W)  g = Mul(h, "a.head_gate")  p = MatMul(g, Wo)  '
WEIGHTS = ["float[8, 12] W", 'float[12] "a.head_gate"', "float[12, 8] Wo"]
NONE = [0, 0, 0, 0]


@pytest.mark.parametrize("name", SOME_LAYERS)
def test_a_layer_without_heads_multiplies_nothing(name: str) -> None:
    result = rewritten(RemoveDeadBranches(), gated_layer(name, NONE), tolerance=0)
    assert result.report == ("a",)
    assert not {"Softmax", "MatMul"} & set(operators(result.model))


@pytest.mark.parametrize(
    ("body", "weights", "kept"),
    [
        pytest.param("y = Add(p, x)", [], [], id="the residual"),
        pytest.param("b = Add(p, bias)  y = Add(b, x)", ["float[8] bias"], ["Add"], id="the bias on the residual"),
        pytest.param(
            "d = Reshape(p, rows)  b = Gemm(d, V, bias)  back = Shape(x)  r = Reshape(b, back)  y = Add(r, x)",
            ["float[8, 8] V", "float[8] bias", "int64[2] rows = {-1, 8}"],
            ["Add"],
            id="the bias of a Gemm",
        ),
        pytest.param("n = Neg(p)  t = Mul(n, c)  y = Add(t, x)", ["float c = {2.0}"], [], id="scaled zeros"),
    ],
)
def test_bias_and_residual_of_a_layer_remain(body: str, weights: list[str], kept: list[str]) -> None:
    model = graph(GATED + body + "  z = Relu(y)", *WEIGHTS, *weights, outputs="float[B, S, 8] z")
    set_gate(model, NONE)
    result = rewritten(RemoveDeadBranches(), model, tolerance=0)
    assert operators(result.model) == [*kept, "Relu"]


def test_rows_of_two_branches_are_added_as_rows() -> None:
    """As of parallel attention and feed-forward: the sum records the shape of a row."""
    body = GATED + "b = Add(p, bias)  q = MatMul(g, Wp)  c = Add(q, other)  s = Add(b, c)  y = Add(s, x)  z = Relu(y)"
    model = graph(body, *WEIGHTS, "float[8] bias", "float[12, 8] Wp", "float[8] other", outputs="float[B, S, 8] z")
    set_gate(model, NONE)
    common.ShapeInferencePass()(model)
    result = rewritten(RemoveDeadBranches(), model, tolerance=0)
    assert operators(result.model) == ["Add", "Add", "Relu"]
    total = next(node for node in result.model.graph if node.op_type == "Add").outputs[0]
    assert total.shape == ir.Shape([8])


def test_another_operator_reads_zeros_of_the_full_shape() -> None:
    model = graph(GATED + "y = LayerNormalization(p, scale, bias)", *WEIGHTS, "float[8] scale", "float[8] bias")
    set_gate(model, NONE)
    result = rewritten(RemoveDeadBranches(), model, tolerance=0)
    assert "MatMul" not in operators(result.model)
    assert operators(result.model)[-2:] == ["Expand", "LayerNormalization"]


def test_an_output_of_the_graph_keeps_its_name() -> None:
    model = graph(GATED + "b = Add(p, bias)  y = Identity(b)", *WEIGHTS, "float[8] bias")
    set_gate(model, NONE)
    result = rewritten(RemoveDeadBranches(), model, tolerance=0)
    assert [value.name for value in result.model.graph.outputs] == ["y"]
    assert "MatMul" not in operators(result.model)


@pytest.mark.parametrize("gates", [[1, 1, 1, 1], [0, 0, 0, 1]])
def test_a_site_that_keeps_a_head_stays(gates: list[float]) -> None:
    assert assert_untouched(RemoveDeadBranches(), gated_layer("separate", gates)) == ()
