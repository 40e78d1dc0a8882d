"""Integer weights become floats with a `QuantizeLinear` behind them; the function stays as it is."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.passes import QuantizeWeightsInside
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

PRODUCT = "w = DequantizeLinear <axis = 1> (q, scale, zero)  y = MatMul(x, w)"
PER_COLUMN = "int8[4, 3] q, float[3] scale = {0.5, 1, 2}, int8[3] zero = {0, 1, -2}"
PER_ROW = "int8[4, 3] q, float[4] scale = {0.5, 1, 2, 4}, int8[4] zero = {0, 1, -2, 3}"
PER_TENSOR = "int8[4, 3] q, float scale = {0.5}, int8 zero = {3}"
INPUTS, OUTPUTS = "float[B, S, 4] x", "float[B, S, 3] y"
INTEGERS = np.array([[-128, 127, 0], [1, -1, 5], [64, -64, 33], [7, 8, 9]], np.int8)


def product(body: str = PRODUCT, weights: str = PER_COLUMN) -> ir.Model:
    """A product with the integer weights `q`."""
    model = graph(body, weights, inputs=INPUTS, outputs=OUTPUTS)
    model.graph.initializers["q"].const_value = ir.Tensor(INTEGERS, name="q")
    return model


@pytest.mark.parametrize(
    ("axis", "weights"),
    [(1, PER_COLUMN), (0, PER_ROW), (1, PER_TENSOR)],
    ids=["a scale a column", "a scale a row", "one scale"],
)
def test_weights_are_floats_that_the_graph_quantizes(axis: int, weights: str) -> None:
    result = rewritten(QuantizeWeightsInside(), product(PRODUCT.replace("1", str(axis)), weights), tolerance=1e-6)
    assert result.report == ("q",)
    assert operators(result.model) == ["QuantizeLinear", "DequantizeLinear", "MatMul"]
    initializers = result.model.graph.initializers
    assert "q" not in initializers
    assert initializers["w.float"].dtype == ir.DataType.FLOAT


def test_the_float_weights_are_those_that_the_integers_stand_for() -> None:
    result = rewritten(QuantizeWeightsInside(), product(), tolerance=1e-6)
    weights = result.model.graph.initializers["w.float"].const_value
    assert weights is not None
    expected = (INTEGERS.astype(np.float32) - [0, 1, -2]) * [0.5, 1, 2]
    np.testing.assert_array_equal(weights.numpy(), expected)


def test_integers_that_another_node_reads_stay() -> None:
    model = product(f"{PRODUCT}  row = Gather(q, first)  z = Cast <to = 1> (row)", f"{PER_COLUMN}, int64 first = {{0}}")
    z = next(node.outputs[0] for node in model.graph if node.op_type == "Cast")
    z.type, z.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([3])
    model.graph.outputs.append(z)
    assert "q" in rewritten(QuantizeWeightsInside(), model, tolerance=1e-6).model.graph.initializers


def test_weights_that_two_dequantizers_read_are_reported_once() -> None:
    body = f"{PRODUCT.replace('y =', 'h =')}  v = DequantizeLinear <axis = 1> (q, scale, zero)  k = MatMul(x, v)"
    model = product(f"{body}  y = Add(h, k)")
    result = rewritten(QuantizeWeightsInside(), model, tolerance=1e-6)
    assert result.report == ("q",)
    assert sorted(name for name in result.model.graph.initializers if name.endswith(".float")) == ["v.float", "w.float"]


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("w = DequantizeLinear <axis = 1> (q, scale)  y = MatMul(x, w)", "int8[4, 3] q, float[3] scale = {0.5, 1, 2}"),
        (
            "i = QuantizeLinear(x, s, z)  d = DequantizeLinear(i, s, z)  w = Cast <to = 1> (q)  y = MatMul(d, w)",
            "int8[4, 3] q, float s = {0.1}, int8 z = {0}",
        ),
    ],
    ids=["weights without a zero point", "activations"],
)
def test_other_dequantizers_stay(body: str, weights: str) -> None:
    assert assert_untouched(QuantizeWeightsInside(), product(body, weights)) == ()
