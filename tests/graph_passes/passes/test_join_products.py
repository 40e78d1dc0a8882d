"""Products of the same tensor by quantized weights are computed at once."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes.passes import JoinProducts, QuantizeWeights
from graph_passes.passes.quantize_weights import OPERATOR
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten


def products(last: str = "x", bits: int = 4, **bits_of: int | None) -> ir.Model:
    """Products of `x` by three weights, the last one of `last`, whose results are summed."""
    model = graph(
        f"t = Tanh(x) a = MatMul(x, w1) b = MatMul(x, w2) c = MatMul({last}, w3) ab = Concat <axis = -1> (a, b, c)"
        " y = MatMul(ab, w4)",
        "float[8, 5] w1, float[8, 40] w2, float[8, 3] w3, float[48, 8] w4",
    )
    return QuantizeWeights(bits, bits_of)(model).model


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("last", "joined"), [("x", 3), ("t", 2)])
def test_products_of_the_same_tensor_are_joined(bits: int, last: str, joined: int) -> None:
    result = rewritten(JoinProducts(), products(last, bits))
    assert len(result.report) == joined
    assert operators(result.model).count(OPERATOR) == 5 - joined
    assert {name for name in result.model.graph.initializers if "integers" in name} <= {"w3.4.integers"} | {
        f"w{number}.{bits}.integers" for number in (3, 4)
    }


def test_products_in_floats_and_in_other_bits_stay() -> None:
    assert assert_untouched(JoinProducts(), products("t", w2=8)) == ()
    assert len(rewritten(JoinProducts(), products(w2=None)).report) == 2


def test_weights_that_two_products_read_are_not_stored_twice() -> None:
    model = graph(
        "t = Tanh(x) a = MatMul(x, w1) b = MatMul(x, w2) c = MatMul(t, w1) d = MatMul(t, w2)"
        " e = Add(a, b) f = Add(c, d) y = Add(e, f)",
        "float[8, 8] w1, float[8, 8] w2",
    )
    assert assert_untouched(JoinProducts(), QuantizeWeights(4)(model).model) == ()
