"""Quantizers are inserted where they belong, are symmetric, and err by half a step at most."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes.passes import InsertQuantizers
from graph_passes.quantizers.faults import FP8, QuantizerFault, QuantizerRule, form_faults, quantizer_faults
from graph_passes.quantizers.placement import QuantizedRole, quantized_inputs, without_quantizers
from tests.graph_passes.graphs import graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched

LAYER = """
    p = MatMul(x, w)  q = Add(p, b)  k = MatMul(x, w)  t = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul(q, t)  m = Add(s, mask)  a = Softmax(m)  v = Gemm <transB = 1> (flat, u)
    v3 = Reshape(v, shape)  h = MatMul(a, v3)  o = MatMul(h, w)  r = Add(o, x)  n = Mul(r, r)  y = MatMul(n, head)
"""


def layer(opset: int = 18) -> ir.Model:
    """An attention with a residual sum and an output head; nodes have the names of their outputs."""
    model = graph(
        f"flat = Reshape(x, matrix)  {LAYER}",
        "float[8, 8] w, float[8] b, float[8, 8] u, float[8, 3] head, float[1, 4, 4] mask",
        "int64[3] shape = {1, 4, 8}, int64[2] matrix = {4, 8}",
        inputs="float[1, 4, 8] x",
        outputs="float[1, 4, 3] y",
        opset=opset,
    )
    for node in model.graph:
        node.name = node.outputs[0].name
    return model


def ranges(model: ir.Model, largest: float = 100.0) -> dict[str, float]:
    return {str(entry.value.name): largest for entry in quantized_inputs(model)}


EXPECTED = {
    *((name, position, QuantizedRole.ATTENTION) for name in ("s", "h") for position in (0, 1)),
    *((name, 0, QuantizedRole.ACTIVATION) for name in ("p", "k", "v", "o")),
    *((name, 1, QuantizedRole.WEIGHT) for name in ("p", "k", "v", "o")),
    ("r", 1, QuantizedRole.RESIDUAL),
}


def test_inputs_of_products_attentions_and_residual_sums_are_quantized() -> None:
    assert {(entry.node.name, entry.position, entry.role) for entry in quantized_inputs(layer())} == EXPECTED


@pytest.mark.parametrize(
    "body",
    [
        "g = MatMul(x, w)  y = Mul(g, g)",
        "g = MatMul(x, w)  c = Mul(g, g)  s = Add(g, c)  y = MatMul(s, w)",
        "g = MatMul(x, w)  s = Add(g, b)  y = MatMul(s, w)",
        "z = Relu(x)  s = Add(z, x)  y = MatMul(s, w)",
        "e = Gather(w, ids)  s = Add(x, e)  y = MatMul(s, w)",
    ],
    ids=["head", "of one product", "bias", "no product", "embeddings"],
)
def test_other_sums_are_not_residual(body: str) -> None:
    model = graph(body, "float[8, 8] w, float[8] b, int64[1] ids = {0}")
    assert QuantizedRole.RESIDUAL not in {entry.role for entry in quantized_inputs(model)}


def test_a_tensor_has_one_quantizer_and_weights_one_for_each_axis() -> None:
    model = layer()
    report = InsertQuantizers(ranges(model))(model).report
    assert sorted(report.tensors) == ["a", "flat", "h", "q", "t", "v3", "x"]
    assert report.weights == ("w", "u")
    assert report.inputs == {
        QuantizedRole.ACTIVATION: 4,
        QuantizedRole.WEIGHT: 4,
        QuantizedRole.ATTENTION: 4,
        QuantizedRole.RESIDUAL: 1,
    }
    assert operators(model).count("QuantizeLinear") == 7
    assert operators(model).count("DequantizeLinear") == 9
    assert "w" not in model.graph.initializers


@pytest.mark.parametrize(("element_type", "opset"), [(ir.DataType.INT8, 18), (FP8, 21)])
def test_quantized_graphs_are_valid_and_keep_the_rules(element_type: ir.DataType, opset: int) -> None:
    model = layer(opset)
    result = InsertQuantizers(ranges(model), element_type)(model)
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    assert quantizer_faults(result.model) == []
    assert_untouched(InsertQuantizers({}, element_type), result.model)


@pytest.mark.parametrize(("element_type", "opset", "share"), [(ir.DataType.INT8, 18, 1 / 254), (FP8, 21, 1 / 16)])
def test_factors_err_by_half_a_step(element_type: ir.DataType, opset: int, share: float) -> None:
    """With a diagonal weight, every element of the product errs by its own two factors alone."""
    diagonal = np.diag(np.linspace(0.5, 4, 8)).astype(np.float32)
    model = graph("h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, w)", "float[8, 8] w", opset=opset)
    model.graph.initializers["w"].const_value = ir.Tensor(diagonal, name="w")
    feeds = {"x": np.random.default_rng(0).uniform(-3, 3, (1, 5, 8)).astype(np.float32)}
    expected = run(model, feeds)[0]
    quantized = InsertQuantizers({"x": 3.0}, element_type)(model).model
    largest = np.diag(diagonal) ** 2 * 3
    assert (np.abs(run(quantized, feeds)[0] - expected) <= share * 1.01 * largest).all()


def test_ranges_saturate_and_a_range_of_zero_is_no_error() -> None:
    model = graph("h = MatMul(x, w)  y = MatMul(h, w)", "float[8, 8] w")
    feeds = {"x": np.full((1, 2, 8), 7, np.float32)}
    clipped = {"x": np.full((1, 2, 8), 2, np.float32)}
    quantized = InsertQuantizers({"x": 2.0})(model.clone()).model
    np.testing.assert_allclose(run(quantized, feeds)[0], run(quantized, clipped)[0], rtol=0.02)
    zero = InsertQuantizers({"x": 0.0})(model.clone()).model
    assert np.isfinite(run(zero, feeds)[0]).all()


def test_missing_ranges_and_an_old_operator_set_are_refused() -> None:
    with pytest.raises(ir.passes.PreconditionError):
        InsertQuantizers({})(layer())
    with pytest.raises(ir.passes.PreconditionError):
        InsertQuantizers(ranges(layer()), FP8)(layer())
    with pytest.raises(ValueError, match="UINT8"):
        InsertQuantizers({}, ir.DataType.UINT8)


def broken(rule: QuantizerRule) -> tuple[ir.Model, set[QuantizerFault]]:
    """A quantized layer that breaks one rule, and the faults to be found."""
    model = layer()
    InsertQuantizers(ranges(model))(model)
    nodes = {node.name: node for node in model.graph}
    zero, scale = model.graph.initializers["x.zero_point"], model.graph.initializers["x.scale"]
    pair = {"x.quantize", "x.dequantize"}
    if rule is QuantizerRule.PLACED:
        nodes["s"].replace_input_with(0, nodes["q"].outputs[0])
        return model, {QuantizerFault(rule, "s", 0)}
    if rule is QuantizerRule.ONLY_PLACED:
        nodes["m"].replace_input_with(1, nodes["q.dequantize"].outputs[0])
        return model, {QuantizerFault(rule, "m", 1)}
    if rule is QuantizerRule.SYMMETRIC:
        zero.const_value = ir.Tensor(np.array(3, np.int8), name=zero.name)
    elif rule is QuantizerRule.SCALE:
        scale.const_value = ir.Tensor(np.array(-1, np.float32), name=scale.name)
    elif rule is QuantizerRule.TYPE:
        zero.const_value, zero.dtype = ir.Tensor(np.array(0, np.uint8), name=zero.name), ir.DataType.UINT8
        nodes["x.quantize"].outputs[0].dtype = ir.DataType.UINT8
    else:
        model = layer(21)
        InsertQuantizers(ranges(model), FP8)(model)
        model.opset_imports[""] = 20
        return model, {QuantizerFault(rule, str(model.graph.name))}
    return model, {QuantizerFault(rule, name) for name in pair}


@pytest.mark.parametrize("rule", list(QuantizerRule))
def test_a_broken_rule_is_found_with_its_node(rule: QuantizerRule) -> None:
    model, expected = broken(rule)
    assert set(quantizer_faults(model)) == expected
    is_about_places = rule in (QuantizerRule.PLACED, QuantizerRule.ONLY_PLACED)
    assert set(form_faults(model)) == (set() if is_about_places else expected)


def test_a_lookup_in_quantized_weights_is_no_quantizer() -> None:
    body = """
        row = Gather (w, ids)  e = DequantizeLinear (row, s, z)
        q = QuantizeLinear (e, s, z)  d = DequantizeLinear (q, s, z)  y = MatMul (d, m)
    """
    weights = ["int8[6, 8] w", "float s = {0.1}", "int8 z = {0}", "float[8, 6] m"]
    model = graph(body, *weights, inputs="int64[B, S] ids", outputs="float[B, S, 6] y")
    assert operators(without_quantizers(model)) == ["Gather", "DequantizeLinear", "QuantizeLinear", "MatMul"]
