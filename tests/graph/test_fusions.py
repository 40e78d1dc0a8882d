"""Fused operators compute what those did that they replace."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.graph.fusions import fuse
from graph_passes.passes import Normalize
from tests.graph.whole import run_graph


def graph(
    body: str, constants: str = "", opset: int = 17, x: str = "float[b, s, 16] x", y: str = "float[b, s, 16] y"
) -> ir.Model:
    """A graph of one input and one output, with a weight and a bias of 16 elements."""
    vector = ", ".join(str(0.5 + index / 16) for index in range(16))
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]> g ({x}) => ({y})
        <float[16] weight = {{{vector}}}, float[16] bias = {{{vector}}} {constants}> {{ {body} }}"""
    model = ir.from_onnx_text(text)
    Normalize()(model)
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


GELU_NUMBERS = ", float root = {1.41421356}, float inverse = {0.70710678}, float half = {0.5}, float one = {1}"
TANH_NUMBERS = (
    ", float half = {0.5}, float one = {1}, float three = {3}, float cubic = {0.044715}, float factor = {0.79788456}"
)
NORM_NUMBERS = ", float two = {2}, float epsilon = {1e-5}, int64[1] last = {-1}"

GELU = {
    "torch, older exporter": "d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
    "torch, newer exporter": "d = Mul(x, inverse) e = Erf(d) a = Add(e, one) h = Mul(half, x) y = Mul(h, a)",
    "transformers' own": "h = Mul(x, half) d = Div(x, root) e = Erf(d) a = Add(one, e) y = Mul(h, a)",
    "tensorflow": "d = Mul(inverse, x) e = Erf(d) a = Add(e, one) h = Mul(a, half) y = Mul(h, x)",
}
TANH = {
    "gelu_new": """p = Pow(x, three) c = Mul(p, cubic) s = Add(x, c) f = Mul(s, factor) t = Tanh(f) a = Add(t, one)
        h = Mul(x, half) y = Mul(h, a)""",
    "by products": """q = Mul(x, x) p = Mul(x, q) c = Mul(cubic, p) s = Add(c, x) f = Mul(factor, s) t = Tanh(f)
        a = Add(one, t) h = Mul(half, a) y = Mul(x, h)""",
}
LAYER_NORM = {
    "older exporter": """m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) q = Pow(d, two) v = ReduceMean<axes=[-1]>(q)
        e = Add(v, epsilon) r = Sqrt(e) n = Div(d, r) w = Mul(n, weight) y = Add(w, bias)""",
    "reciprocal, axis from the front": """m = ReduceMean<axes=[2]>(x) d = Sub(x, m) q = Mul(d, d)
        v = ReduceMean<axes=[2]>(q) e = Add(epsilon, v) r = Sqrt(e) i = Reciprocal(r) n = Mul(d, i)
        w = Mul(weight, n) y = Add(bias, w)""",
    "without a bias": """m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) q = Pow(d, two) v = ReduceMean<axes=[-1]>(q)
        e = Add(v, epsilon) r = Sqrt(e) n = Div(d, r) y = Mul(n, weight)""",
}
RMS_NORM = {
    "llama": """c = Cast<to=1>(x) q = Pow(c, two) v = ReduceMean<axes=[-1]>(q) e = Add(v, epsilon) r = Sqrt(e)
        i = Reciprocal(r) n = Mul(c, i) k = Cast<to=1>(n) y = Mul(weight, k)""",
    "by division": """q = Mul(x, x) v = ReduceMean<axes=[-1]>(q) e = Add(v, epsilon) r = Sqrt(e) n = Div(x, r)
        y = Mul(n, weight)""",
}
FORMS = [
    *[("Gelu", body, GELU_NUMBERS) for body in GELU.values()],
    *[("Gelu", body, TANH_NUMBERS) for body in TANH.values()],
    *[("LayerNormalization", body, NORM_NUMBERS) for body in LAYER_NORM.values()],
    *[("RMSNormalization", body, NORM_NUMBERS) for body in RMS_NORM.values()],
    ("QuickGelu", "s = Sigmoid(x) y = Mul(x, s)", ""),
    ("QuickGelu", "a = Mul(x, alpha) s = Sigmoid(a) y = Mul(x, s)", ", float alpha = {1.702}"),
]


@pytest.mark.parametrize(("operator", "body", "numbers"), FORMS)
def test_each_form_becomes_one_operator(operator: str, body: str, numbers: str) -> None:
    model = graph(body, numbers)
    before = operators(model)
    fused = fuse(model)
    assert operators(model) == before
    assert set(operators(fused)) - {"Cast"} == {operator}
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(run_graph(fused, {"x": x}), run_graph(model, {"x": x}), rtol=1e-5, atol=1e-5)
    assert fused.graph.outputs[0].name == "y"


def test_epsilon_is_that_of_the_graph() -> None:
    model = graph(LAYER_NORM["older exporter"], NORM_NUMBERS.replace("1e-5", "1e-2"))
    (node,) = fuse(model).graph
    assert node.attributes.get_float("epsilon") == pytest.approx(1e-2)


def test_inputs_from_a_sum_and_weights_keep_their_names() -> None:
    body = "z = Add(x, bias) d = Div(z, root) e = Erf(d) a = Add(e, one) m = Mul(z, a) y = Mul(m, half)"
    fused = fuse(graph(body, GELU_NUMBERS))
    assert operators(fused) == ["Add", "Gelu"]
    assert [value.name for value in fused.graph.initializers.values()] == ["bias"]
    assert [node.outputs[0].name for node in fused.graph] == ["z", "y"]


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        (GELU["tensorflow"], GELU_NUMBERS.replace("0.70710678", "0.7")),
        (GELU["tensorflow"], GELU_NUMBERS.replace("float half = {0.5}", "float half = {0.25}")),
        (TANH["gelu_new"], TANH_NUMBERS.replace("0.044715", "0.044")),
        (LAYER_NORM["older exporter"].replace("axes=[-1]", "axes=[1]"), NORM_NUMBERS),
        (RMS_NORM["by division"].replace("Sqrt(e)", "Sqrt(v)"), NORM_NUMBERS),
        ("s = Sigmoid(x) y = Mul(s, s)", ""),
        ("t = Tanh(x) y = Mul(x, t)", ""),
    ],
)
def test_what_computes_something_else_stays(body: str, numbers: str) -> None:
    model = graph(body, numbers)
    assert operators(fuse(model)) == operators(model)


def test_an_axis_from_the_front_of_a_tensor_of_unknown_rank_stays() -> None:
    body = LAYER_NORM["reciprocal, axis from the front"].replace("(x)", "(z)").replace("(x,", "(z,")
    model = graph(f"z = Identity(x) {body}", NORM_NUMBERS, x="float x", y="float y")
    assert "LayerNormalization" not in operators(fuse(model))


def test_a_part_that_is_read_elsewhere_stays() -> None:
    model = graph(GELU["tensorflow"], GELU_NUMBERS, y="float[b, s, 16] y, float[b, s, 16] e")
    fused = fuse(model)
    assert operators(fused) == operators(model)  # `e` is an output of the graph


def test_numbers_of_16_bits() -> None:
    model = graph(GELU["tensorflow"], GELU_NUMBERS)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy().astype(np.float16))
    assert operators(fuse(model)) == ["Gelu"]
