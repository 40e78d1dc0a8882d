"""Gates before products: a quantized graph without gates is shrunk like any other, and computes what its gates say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import NeuronPlan, Plan, PlanError, shrink
from graph_passes.errors import GraphErrorCode
from graph_passes.passes import InsertProductGates, Normalize
from graph_passes.passes.insert_product_gates import products_of_groups
from tests.graph_passes.graphs import graph, run

UNITS = 6
BODY = """
 h = MatMul (x, W1) r = Relu (h)
 q = QuantizeLinear (r, s, z) d = DequantizeLinear (q, s, z)
 w = DequantizeLinear <axis = 1> (W2, ws, wz)
 [down] m = MatMul (d, w)
 y = Add (m, x)
"""
WEIGHTS = (
    "float[8, 6] W1",
    "float s = {0.05}",
    "uint8 z = {7}",
    "int8[6, 8] W2",
    "float[8] ws",
    "int8[8] wz = {0, 0, 0, 0, 0, 0, 0, 0}",
)
PRODUCTS = {"mlp": ("down",)}
X = {"x": np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)}


def quantized() -> ir.Model:
    return graph(BODY, *WEIGHTS, opset=21)


def neurons(kept: Sequence[int], scale: Sequence[float] = ()) -> Plan:
    return Plan(groups=(NeuronPlan("mlp", UNITS, tuple(kept), tuple(scale)),))


def gated(kept: Sequence[int]) -> ir.Model:
    model = quantized()
    InsertProductGates(neurons(kept), PRODUCTS)(model)
    return model


def weight(model: ir.Model, name: str) -> tuple[int, ...]:
    value = model.graph.initializers[name].const_value
    assert value is not None
    return tuple(value.shape.numpy())


@pytest.mark.parametrize("kept", [(0, 2, 5), (3,), (), range(UNITS)])
def test_a_quantized_graph_is_cut_to_the_kept_units(kept: Sequence[int]) -> None:
    expected = run(gated(kept), X)[0]
    model = gated(kept)
    Normalize()(model)
    shrunk = shrink(model, neurons(kept))
    assert not shrunk.refused
    np.testing.assert_allclose(run(shrunk.model, X)[0], expected, rtol=1e-5, atol=1e-5)
    if 0 < len(kept) < UNITS:
        assert weight(shrunk.model, "W1") == (8, len(kept))
        assert weight(shrunk.model, "W2") == (len(kept), 8)
        assert weight(shrunk.model, "ws") == (8,)
    if not kept:
        assert "W2" not in shrunk.model.graph.initializers


def test_products_are_those_that_sum_over_gated_units() -> None:
    model = gated(range(UNITS))
    assert products_of_groups(model) == PRODUCTS


@pytest.mark.parametrize(
    ("plan", "products", "code"),
    [
        (neurons((0,)), {"mlp": ("up",)}, GraphErrorCode.SITE_MISSING),
        (Plan(groups=(NeuronPlan("mlp", 5, (0,)),)), PRODUCTS, GraphErrorCode.SITE_MISMATCH),
    ],
)
def test_products_of_another_graph_are_refused(
    plan: Plan, products: dict[str, tuple[str, ...]], code: GraphErrorCode
) -> None:
    with pytest.raises(PlanError) as error:
        InsertProductGates(plan, products)(quantized())
    assert (error.value.code, error.value.details["site"]) == (code, "mlp")


def test_a_scale_for_each_block_of_weights_is_refused() -> None:
    body = BODY.replace("<axis = 1> (W2, ws, wz)", "<axis = 0, block_size = 3> (W2, ws)")
    weights = [declared for declared in WEIGHTS if not declared.startswith(("float[8] ws", "int8[8]"))]
    model = graph(body, *weights, "float[2, 8] ws", opset=21)
    InsertProductGates(neurons((0,)), PRODUCTS)(model)
    Normalize()(model)
    assert shrink(model, neurons((0,))).refused
