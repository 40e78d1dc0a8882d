"""Gates move into the weights that the gated heads are multiplied by."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.passes import FoldGates
from tests.graph_passes.graphs import content, graph
from tests.graph_passes.layers import SOME_LAYERS
from tests.graph_passes.passes.checks import assert_untouched, rewritten
from tests.graph_passes.passes.gated_layers import gate, gated_layer, set_gate

GATES = [0.5, 0.0, 2.0, 1.25]
GATED = 'gated = Mul(x, "a.head_gate")  '
GATE = 'float[8] "a.head_gate"'


@pytest.mark.parametrize("name", SOME_LAYERS)
def test_a_gate_becomes_zeros_and_ones(name: str) -> None:
    model = gated_layer(name, GATES)
    result = rewritten(FoldGates(), model)
    assert result.report == ("a",)
    assert gate(result.model) == [float(element != 0) for element in gate(model)]


def test_rows_of_the_output_projection_are_scaled_except_those_of_dropped_heads() -> None:
    model = gated_layer("separate", GATES)
    factors = np.repeat([0.5, 1.0, 2.0, 1.25], 3)
    folded = rewritten(FoldGates(), model).model
    np.testing.assert_allclose(content(folded, "Wo"), content(model, "Wo") * factors[:, None], rtol=1e-6)
    assert list(folded.graph.initializers) == list(model.graph.initializers)


@pytest.mark.parametrize("weight", ["Wt = Transpose <perm = [1, 0]> (W)", "Wt = Cast <to = 1> (W)"])
def test_a_weight_is_scaled_behind_a_transpose_or_a_cast(weight: str) -> None:
    shape = "float[8, 5] W" if "Cast" in weight else "float[5, 8] W"
    model = graph(f"{GATED} {weight}  y = MatMul(gated, Wt)", GATE, shape, outputs="float[B, S, 5] y")
    set_gate(model, range(1, 9))
    folded = rewritten(FoldGates(), model).model
    axis = content(model, "W").shape.index(8)
    factors = np.arange(1, 9).reshape([-1 if dim == axis else 1 for dim in range(2)])
    np.testing.assert_allclose(content(folded, "W"), content(model, "W") * factors, rtol=1e-6)


def test_a_gate_whose_product_a_body_reads_stays() -> None:
    body = """
        r = MatMul(gated, W)
        z = If (c) <
            then_branch = then () => (float[B, S, 8] t) { t = Abs(gated) },
            else_branch = otherwise () => (float[B, S, 8] e) { e = Neg(gated) }
        >
        y = Add(r, z)
    """
    model = graph(GATED + body, GATE, "float[8, 8] W", "bool c = {1}")
    set_gate(model, range(1, 9))
    assert assert_untouched(FoldGates(), model) == ()


def test_every_product_of_a_gated_tensor_is_scaled_and_shares_its_weight() -> None:
    body = GATED + "a1 = MatMul(gated, W)  a2 = MatMul(gated, W)  a3 = MatMul(x, W)  y = Sum(a1, a2, a3)"
    model = graph(body, GATE, "float[8, 8] W")
    set_gate(model, range(1, 9))
    folded = rewritten(FoldGates(), model).model
    weights = [node.inputs[1] for node in folded.graph if node.op_type == "MatMul"]
    assert [value.name for value in weights if value is not None] == ["W.scaled0", "W.scaled0", "W"]


def test_a_weight_that_two_gates_scale_is_kept_twice() -> None:
    body = """
        one = Mul(x, "a.neuron_gate")  r = MatMul(one, W)  h = Relu(r)
        two = Mul(h, "b.neuron_gate")  y = MatMul(two, W)
    """
    model = graph(body, 'float[8] "a.neuron_gate"', 'float[8] "b.neuron_gate"', "float[8, 8] W")
    for name, first in (("a", 1), ("b", 9)):
        gate = model.graph.initializers[f"{name}.neuron_gate"]
        gate.const_value = ir.tensor([float(first + unit) for unit in range(8)], name=gate.name)
    folded = rewritten(FoldGates(), model).model
    weights = [node.inputs[1] for node in folded.graph if node.op_type == "MatMul"]
    assert [value.name for value in weights if value is not None] == ["W", "W.scaled1"]


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        pytest.param("n = Cos(gated)  y = MatMul(n, W)", ["float[8, 8] W"], id="an operator that is not linear"),
        pytest.param("y = Identity(gated)", [], id="an output of the graph"),
        pytest.param("t = Transpose <perm = [0, 2, 1]> (gated)  y = MatMul(gated, t)", [], id="no weight"),
        pytest.param("a1 = MatMul(gated, W)  n = Relu(gated)  y = Add(a1, n)", ["float[8, 8] W"], id="one of two ways"),
        pytest.param(
            "Wt = Transpose <perm = [1, 0]> (W)  a1 = MatMul(gated, Wt)  a2 = MatMul(x, Wt)  y = Add(a1, a2)",
            ["float[8, 8] W"],
            id="a transposed weight with two readers",
        ),
    ],
)
def test_other_gates_stay(body: str, weights: list[str]) -> None:
    outputs = "float[B, S, S] y" if "t = " in body else "float[B, S, 8] y"
    model = graph(GATED + body, GATE, *weights, outputs=outputs)
    set_gate(model, range(1, 9))
    assert assert_untouched(FoldGates(), model) == ()


@pytest.mark.parametrize("gates", [[1, 1, 1, 1], [1, 0, 1, 0]])
def test_a_gate_of_zeros_and_ones_needs_no_folding(gates: list[float]) -> None:
    assert assert_untouched(FoldGates(), gated_layer("separate", gates)) == ()
