"""A scale moves from scores to queries where that changes nothing but its place."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graph_passes.passes import ScaleQueries
from tests.engines import parsed

INPUTS = "float[B, 2, S, 4] q, float[B, 2, 4, S] k, float[B, 1, 1, S] mask"
WEIGHTS = (
    "float c = {0.5}, float[1] d = {2.0}, float[2, 1, 1] each = {0.5, 2.0}, float[1, 1, 1, 1] wide = {0.5},"
    " int64[4] same = {0, 0, 0, 0}"
)
AFTER = "a = Add(s, mask)  y = Softmax(a)"


def outputs(model: ir.Model) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    feeds = {"q": (2, 2, 5, 4), "k": (2, 2, 4, 5), "mask": (2, 1, 1, 5)}
    options = ort.SessionOptions()
    options.log_severity_level = 3  # weights that a case does not use
    options.graph_optimization_level = (
        ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    )  # its own fusion of scales fails on two
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    names = [value.name for value in session.get_inputs()]
    return list(session.run(None, {name: draw.standard_normal(feeds[name], np.float32) for name in names}))


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
    model = parsed(f"p = MatMul(q, k)  {scale}  {AFTER}", INPUTS, "float[B, 2, S, S] y", WEIGHTS)
    before = outputs(model)
    assert ScaleQueries()(model).modified
    product = next(node for node in model.graph if node.op_type == "MatMul")
    query = product.inputs[0]
    assert query is not None
    assert (made := query.producer()) is not None
    assert made.op_type in ("Mul", "Div")
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    np.testing.assert_allclose(outputs(model)[0], before[0], rtol=1e-6)
    assert not ScaleQueries()(model).modified, "once is enough"


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (f"p = MatMul(q, k)  s = Mul(p, each)  {AFTER}", ""),  # a scale of each head
        (f"p = MatMul(q, k)  s = Mul(p, c)  {AFTER}  z = Relu(p)", ", float[B, 2, S, S] z"),  # read twice
        (f"p = MatMul(q, k)  s = Mul(p, c)  {AFTER}", ", float[B, 2, S, S] p"),  # an output
        (f"p = MatMul(q, k)  s = Mul(p, c)  {AFTER}", ", float[B, 2, S, S] s"),  # scaled ones are an output
        (f"p = MatMul(q, k)  s = Mul(p, wide)  {AFTER}", ""),  # a number of more axes
        (f"p = MatMul(q, k)  s = Div(d, p)  {AFTER}", ""),  # no scale
        ("p = MatMul(q, k)  s = Mul(p, c)  y = Add(s, mask)", ""),  # no softmax
        (f"p = MatMul(q, k)  s = Mul(p, c)  {AFTER}  z = Relu(s)", ", float[B, 2, S, S] z"),  # read elsewhere too
        (f"t = Mul(q, c)  s = MatMul(t, k)  {AFTER}", ""),  # scaled queries already
    ],
)
def test_all_else_stays(body: str, more: str) -> None:
    model = parsed(body, INPUTS, f"float[B, 2, S, S] y{more}", WEIGHTS)
    before = [(node.op_type, node.outputs[0].name) for node in model.graph]
    assert not ScaleQueries()(model).modified
    assert [(node.op_type, node.outputs[0].name) for node in model.graph] == before


@pytest.mark.parametrize("first", ["", "u = Mul(q, e)  "])
def test_layers_that_share_a_scale_are_scaled_each(first: str) -> None:
    body = (
        f"e = Constant <value_float = 0.25> ()  {first}"
        "p = MatMul(q, k)  s = Mul(p, e)  a = Add(s, mask)  y = Softmax(a)"
        f"  r = MatMul({'u' if first else 'q'}, k)  t = Mul(r, e)  z = Softmax(t)"
    )
    model = parsed(body, INPUTS, "float[B, 2, S, S] y, float[B, 2, S, S] z", WEIGHTS)
    before = outputs(model)
    assert ScaleQueries()(model).modified
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for got, expected in zip(outputs(model), before, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
