"""A shrunk graph looks as if it had been exported at its size."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.passes import CleanUp
from tests.graph_passes.graphs import content, graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched, rewritten


def test_a_gate_of_ones_is_removed() -> None:
    for product in ('"a.head_gate", x', 'x, "a.head_gate"'):
        result = rewritten(CleanUp(), graph(f"g = Mul({product})  y = Relu(g)", 'float[8] "a.head_gate"'), tolerance=0)
        assert result.report == ("a.head_gate",)
        assert operators(result.model) == ["Relu"]
        assert not result.model.graph.initializers


@pytest.mark.parametrize(("before", "kept"), [("r = Relu(x)", "Relu"), ("r = Identity(x)", "Identity")])
def test_an_output_that_is_gated_by_ones_keeps_its_name(before: str, kept: str) -> None:
    model = graph(f'{before}  y = Mul(r, "a.head_gate")', 'float[8] "a.head_gate"')
    result = rewritten(CleanUp(), model, tolerance=0)
    assert operators(result.model) == [kept]
    assert [value.name for value in result.model.graph.outputs] == ["y"]


@pytest.mark.parametrize(
    "body",
    [
        "y = Relu(x) z = Identity(y) w = Identity(z)",
        "r = Relu(x) y = Identity(r) z = Identity(r) w = Relu(z)",
        "y = Identity(x) z = Identity(y) w = Identity(x)",
        "r = Relu(x) w = Identity(r) z = Identity(r) y = Identity(r)",
    ],
)
def test_outputs_that_are_equal_stay_separate(body: str) -> None:
    outputs = ", ".join(f"float[B, S, 8] {name}" for name in "yzw")
    result = rewritten(CleanUp(), graph(body, outputs=outputs), tolerance=0)
    assert [value.name for value in result.model.graph.outputs] == ["y", "z", "w"]


def test_a_body_returns_an_outer_tensor_under_a_name_of_its_own() -> None:
    body = """
        r = Relu(x)  h = Identity(r)
        y = If (c) <
            then_branch = then () => (float[B, S, 8] t) { t = Neg(h) },
            else_branch = otherwise () => (float[B, S, 8] e) { e = Identity(h) }
        >
    """
    result = rewritten(CleanUp(), graph(body, "bool c = {0}"), tolerance=0)
    assert operators(result.model) == ["Relu", "If"]


def test_other_products_stay() -> None:
    model = graph('g = Mul(x, "a.head_gate")  y = Mul(g, ones)', 'float[8] "a.head_gate"', "float[8] ones")
    gate = model.graph.initializers["a.head_gate"]
    gate.const_value = ir.tensor([1.0] * 7 + [0.5], dtype=ir.DataType.FLOAT, name=gate.name)
    model.opset_imports.pop("com.microsoft")
    assert assert_untouched(CleanUp(), model) == ()


def test_a_computed_shape_becomes_a_constant() -> None:
    body = """
        size = Shape <start = 0, end = 2> (x)  shape = Concat <axis = 0> (size, heads)
        split = Reshape(x, shape)  y = Transpose <perm = [0, 2, 1, 3]> (split)
    """
    result = rewritten(CleanUp(), graph(body, "int64[2] heads = {4, 2}", outputs="float[B, 4, S, 2] y"), tolerance=0)
    assert operators(result.model) == ["Reshape", "Transpose"]
    assert len(result.report) == 1
    (shape,) = result.model.graph.initializers
    assert content(result.model, shape).tolist() == [0, 0, 4, 2]


def test_a_shape_of_another_tensor_stays_computed() -> None:
    body = "size = Shape(other)  flat = Reshape(x, size)  y = Relu(flat)"
    model = graph(body, inputs="float[B, S, 8] x, float[S, B, 8] other", outputs="float[N, M, 8] y")
    assert operators(CleanUp()(model).model) == ["Shape", "Reshape", "Relu"]


def test_a_shape_of_an_empty_tensor_stays_computed() -> None:
    # The size 0 of a Reshape would copy an axis that the source lacks. Keys without rotated positions are such tensors.
    body = """
        eight, none = Split <axis = 2> (x, sizes)  size = Shape <start = 0, end = 2> (x)
        shape = Concat <axis = 0> (size, last)  flat = Reshape <allowzero = 1> (none, shape)
        other = Concat <axis = 3> (flat, flat)  z = Relu(other)  y = Relu(eight)
    """
    model = graph(
        body, "int64[2] sizes = {8, 0}", "int64[2] last = {1, 0}", outputs="float[B, S, 8] y, float[B, S, 1, 0] z"
    )
    model.opset_imports.pop("com.microsoft")
    assert assert_untouched(CleanUp(), model) == ()


def test_a_shape_of_an_axis_that_is_empty_in_short_inputs_stays_computed() -> None:
    # Patches of a time series are counted: a short one has none.
    body = """
        sizes = Shape(x)  length = Gather(sizes, one)  count = Div(length, patch)  numbers = Range(zero, count, one)
        counts = Unsqueeze(count, first)  shape = Concat <axis = 0> (two, counts)  rows = Expand(numbers, shape)
        z = Identity(rows)  y = Relu(x)
    """
    model = graph(
        body,
        "int64 zero = {0}, int64 one = {1}, int64 patch = {1000}, int64[1] first = {0}, int64[1] two = {2}",
        outputs="float[B, S, 8] y, int64[2, N] z",
    )
    result = CleanUp()(model)
    assert result.report == ()
    assert run(result.model, {"x": np.zeros((1, 3000, 8), np.float32)})[1].tolist() == [[0, 1, 2]] * 2


def test_unused_parts_are_removed() -> None:
    body = "a = Identity(x)  y = Relu(a)  unused = Add(x, w)"
    result = rewritten(CleanUp(), graph(body, "float[8] w"), tolerance=0)
    assert operators(result.model) == ["Relu"]
    assert not result.model.graph.initializers
    assert set(result.model.graph.opset_imports) == {""}
    assert result.report == ()


def test_a_new_constant_and_a_value_in_a_loop_have_different_names() -> None:
    # onnx-ir names the new shape `val_0`, as the exporter names values in the bodies of loops.
    body = """
        size = Shape <start = 0, end = 2> (x)  shape = Concat <axis = 0> (size, heads)
        split = Reshape(x, shape)  start = ReduceSum <keepdims = 0> (split, first)
        last, y = Scan <num_scan_inputs = 1, body = step (float[S, 4, 2] state, float[S, 4, 2] row)
            => (float[S, 4, 2] next, float[S, 4, 2] copy)
            { val_0 = Add(state, row)  next = Relu(val_0)  copy = Neg(val_0) }> (start, split)
    """
    weights = ("int64[2] heads = {4, 2}", "int64[1] first = {0}")
    model = graph(body, *weights, outputs="float[B, S, 4, 2] y", opset=18)
    result = rewritten(CleanUp(), model, tolerance=0)
    assert len(result.report) == 1
    assert "val_0" in result.model.graph.initializers
