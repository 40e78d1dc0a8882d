"""Chosen products of a quantized graph compute in floats again, with the weights that their integers stand for."""

from __future__ import annotations

import importlib.util

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes import load
from graph_passes.passes import ReturnToFloats
from tests.graph_passes.graphs import SIZES, assert_same, content, graph, operators
from tests.graph_passes.passes.checks import assert_untouched

ROWS = "float[B, S, 8] y"
ACTIVATION = "xq = QuantizeLinear(x, sx, zx)  xd = DequantizeLinear(xq, sx, zx)"
WEIGHTS = """
    float sx = {0.05}, uint8 zx = {100}, float sa = {0.4}, int8 za = {-3},
    int8[8, 8] v, float[8] sv = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}, int8[8] zv = {0, 1, 0, -1, 0, 2, 0, 0},
    int8[8, 8] w, float sw = {0.1}, int8 zw = {3}
"""
CHANNELS = "vd = DequantizeLinear <axis = 1> (v, sv, zv)"
TENSOR = "wd = DequantizeLinear(w, sw, zw)"


def quantized(body: str, *weights: str, inputs: str = "float[B, S, 8] x", outputs: str = ROWS) -> ir.Model:
    """A graph whose nodes have the names of their outputs."""
    model = graph(body, WEIGHTS, *weights, inputs=inputs, outputs=outputs)
    for node in model.graph:
        node.name = node.outputs[0].name
    return model


def returned(model: ir.Model, *names: str, expected: ir.Model) -> ir.Model:
    """A copy of a graph in which all of some products were returned to floats, and which computes what is expected."""
    result = ReturnToFloats(names)(model.clone())
    assert result.modified
    assert sorted(result.report) == sorted(names)
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    assert_same(result.model, expected, SIZES, 1e-6)
    assert_untouched(ReturnToFloats(names), result.model)
    return result.model


def product(model: ir.Model, name: str) -> ir.Node:
    (node,) = (node for node in model.graph if node.name == name)
    return node


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        (CHANNELS, "vd"),
        (CHANNELS.replace("1", "0"), "vd"),
        (CHANNELS.replace("1", "-1"), "vd"),
        (CHANNELS.replace(", zv", ""), "vd"),
        (TENSOR, "wd"),
        (TENSOR.replace(", zw", ""), "wd"),
        (TENSOR.replace("sw, zw", "one, none"), "wd"),
    ],
    ids=["columns", "rows", "last axis", "symmetric columns", "tensor", "symmetric tensor", "tensor, with an axis"],
)
def test_a_product_reads_its_activation_and_its_weights_in_floats(weights: str, name: str) -> None:
    more, factor = "float[1] one = {0.1}, int8[1] none = {-128}", f"{weights}  y = MatMul"
    model = quantized(f"{ACTIVATION}  {factor}(xd, {name})", more)
    result = returned(model, "y", expected=quantized(f"{factor}(x, {name})", more))
    assert operators(result) == ["MatMul"]
    (initializer,) = result.graph.initializers.values()
    assert initializer.dtype == ir.DataType.FLOAT
    assert [value.name for value in product(result, "y").inputs if value is not None] == ["x", initializer.name]


def test_weights_are_what_their_integers_stand_for() -> None:
    model = quantized(f"{ACTIVATION}  {CHANNELS}  y = MatMul(xd, vd)")
    integers, zeros, scales = (content(model, name).astype(np.float32) for name in ("v", "zv", "sv"))
    result = ReturnToFloats({"y"})(model).model
    (name,) = result.graph.initializers
    np.testing.assert_array_equal(content(result, name), (integers - zeros) * scales)


@pytest.mark.parametrize("chosen", ["a", "b"])
def test_other_products_of_a_shared_quantizer_stay_quantized(chosen: str) -> None:
    body = f"{ACTIVATION}  {CHANNELS}  {TENSOR}  a = MatMul(xd, vd)  b = MatMul(xd, wd)  y = Add(a, b)"
    expected = quantized(body.replace(f"{chosen} = MatMul(xd,", f"{chosen} = MatMul(x,"))
    result = returned(quantized(body), chosen, expected=expected)
    assert operators(result).count("QuantizeLinear") == 1
    assert operators(result).count("DequantizeLinear") == 2, "of the activation and of the other weights"
    (remaining,) = {"a", "b"} - {chosen}
    assert all(value is not None and value.producer() is not None for value in product(result, remaining).inputs)


def test_every_product_of_a_shared_quantizer_may_return() -> None:
    body = f"{{}} {CHANNELS}  {TENSOR}  a = MatMul({{}}, vd)  b = MatMul({{}}, wd)  y = Add(a, b)"
    result = returned(
        quantized(body.format(ACTIVATION, "xd", "xd")), "a", "b", expected=quantized(body.format("", "x", "x"))
    )
    assert operators(result) == ["MatMul", "MatMul", "Add"]


def test_products_in_a_row_return_one_by_one() -> None:
    body = f"""
        {ACTIVATION}  {CHANNELS}  {TENSOR}
        a = MatMul(xd, vd)  aq = QuantizeLinear(a, sa, za)  ad = DequantizeLinear(aq, sa, za)
        y = MatMul(ad, wd)
    """
    last = body.replace("y = MatMul(ad,", "y = MatMul(a,")
    first = returned(quantized(body), "y", expected=quantized(last))
    assert operators(first).count("QuantizeLinear") == 1
    both = returned(first, "a", expected=quantized(last.replace("MatMul(xd,", "MatMul(x,")))
    assert operators(both) == ["MatMul", "MatMul"]


@pytest.mark.parametrize(
    ("layout", "factors"),
    [
        ("vt = Transpose <perm = [1, 0]> (vd)", "{x}d, vt"),
        ("vr = Reshape(vd, square)  vt = Transpose(vr)", "{x}d, vt"),
        ("xr = Reshape({x}d, same)", "xr, vd"),
        ("xt = Transpose <perm = [0, 2, 1]> ({x}d)  xr = Transpose <perm = [0, 2, 1]> (xt)", "xr, vd"),
    ],
    ids=["weights", "weights twice", "activation", "activation twice"],
)
def test_layout_operators_are_repeated_on_floats(layout: str, factors: str) -> None:
    more = "int64[2] square = {8, 8}, int64[3] same = {0, -1, 8}"
    body = f"{ACTIVATION}  {CHANNELS}  {layout}  y = MatMul({factors})"
    model = quantized(body.format(x="x"), more)
    expected = f"{CHANNELS}  {layout}  y = MatMul({factors})".replace("{x}d", "x")
    result = returned(model, "y", expected=quantized(expected, more))
    assert set(operators(result)) <= {"Reshape", "Transpose", "MatMul"}
    assert len(operators(result)) == 1 + layout.count("=") - layout.count("perm")


def test_layout_operators_that_another_product_reads_stay_quantized() -> None:
    body = f"""
        {ACTIVATION}  {CHANNELS}  {TENSOR}
        xt = Reshape(xd, same)  a = MatMul(xt, vd)  b = MatMul(xt, wd)  y = Add(a, b)
    """
    more = "int64[3] same = {0, -1, 8}"
    expected = body.replace("a = MatMul(xt,", "xs = Reshape(x, same)  a = MatMul(xs,")
    result = returned(quantized(body, more), "a", expected=quantized(expected, more))
    assert operators(result).count("Reshape") == 2
    assert operators(result).count("QuantizeLinear") == 1


def test_a_bias_stays_as_it_is() -> None:
    body = """
        {activation}  vd = DequantizeLinear <axis = 0> (v, sv, zv)  bd = DequantizeLinear <axis = 0> (b, sv)
        y = Gemm <transB = 1> ({x}, vd, bd)
    """
    texts = body.format(activation=ACTIVATION, x="xd"), body.format(activation="", x="x")
    model, expected = (quantized(text, "int32[8] b", inputs="float[B, 8] x", outputs="float[B, 8] y") for text in texts)
    result = returned(model, "y", expected=expected)
    assert operators(result) == ["DequantizeLinear", "Gemm"]


def test_a_product_with_one_quantized_factor_returns() -> None:
    model = quantized(f"{CHANNELS}  y = MatMul(x, vd)")
    assert operators(returned(model, "y", expected=model)) == ["MatMul"]


@pytest.mark.parametrize("names", [(), ("z",), ("", "x", "vd"), ("b",)], ids=["none", "unknown", "tensors", "float"])
def test_other_names_change_nothing(names: tuple[str, ...]) -> None:
    body = f"{ACTIVATION}  {CHANNELS}  a = MatMul(xd, vd)  b = MatMul(a, f)  y = Relu(b)"
    assert assert_untouched(ReturnToFloats(names), quantized(body, "float[8, 8] f")) == ()


@pytest.mark.zoo
@pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("nncf", "openvino")), reason="needs NNCF and OpenVINO"
)
def test_a_whole_model_returns_to_floats() -> None:
    from compressor.targets.graph_facts import float_matmuls, quantized_matmuls
    from compressor.targets.relative_error import relative_error
    from tests.graph_passes.graphs import run
    from tests.quantization import graphs

    bert = graphs.quantized()
    model = load(bert.path)
    result = ReturnToFloats(bert.graph.products)(model)
    assert result.report == bert.graph.products
    assert quantized_matmuls(result.model) == []
    assert tuple(node.name for node in float_matmuls(result.model)) == bert.graph.products
    onnx.checker.check_model(ir.to_proto(ir.external_data.load_to_model(result.model)), full_check=True)
    assert_untouched(ReturnToFloats(bert.graph.products), result.model)
    for feeds in graphs.calibration_rows():
        (output,) = run(result.model, feeds)
        assert relative_error(graphs.run(bert.source, feeds)["logits"], output, feeds) < 0.1
