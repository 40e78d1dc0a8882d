"""Weights of products that a graph computes become initializers; what depends on an input stays."""

from __future__ import annotations

import pytest

from graph_passes import Plan, find_groups, gate_groups, shrink
from graph_passes.passes import FoldComputedWeights
from tests.graph_passes.graphs import assert_same, graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

DOWN: dict[str, tuple[str, str]] = {
    "scaled": ("f = Mul(w, half)", "float[6, 8] w, float half = {0.5}"),
    "joined": ("f = Concat <axis = 0> (v, w)", "float[4, 8] v, float[2, 8] w"),
    "reshaped": ("f = Reshape(w, shape)", "float[48] w, int64[2] shape = {6, 8}"),
    "selected": ("f = Gather <axis = 0> (w, rows)", "float[9, 8] w, int64[6] rows = {5, 0, 3, 1, 8, 2}"),
    "a part": ("f = Slice(w, zero, six, zero)", "float[7, 8] w, int64[1] zero = {0}, int64[1] six = {6}"),
    "a chain": ("t = Transpose(w)  s = Mul(t, half)  f = Identity(s)", "float[8, 6] w, float half = {0.5}"),
}
"""How the weight that reads neurons is computed, and its initializers."""


@pytest.mark.parametrize("name", DOWN)
def test_neurons_before_a_computed_weight_can_be_removed(name: str) -> None:
    body, weights = DOWN[name]
    model = graph(f"{body}  h = MatMul(x, up)  r = Relu(h)  d = MatMul(r, f)  y = Add(d, x)", weights, "float[8, 6] up")
    assert rewritten(FoldComputedWeights(), model).report == ("f",)
    (group,) = find_groups(model.clone()).groups
    plan = Plan(groups=(group.plan((1, 4)),))
    shrunk = shrink(model.clone(), plan)
    assert [removal.units for removal in shrunk.removed] == [(0, 2, 3, 5)]
    assert_same(shrunk.model, gate_groups(model.clone(), plan))


def test_neurons_after_a_computed_weight_can_be_removed() -> None:
    body = "f = Mul(up, half)  h = MatMul(x, f)  r = Relu(h)  d = MatMul(r, w)  y = Add(d, x)"
    model = graph(body, "float[6, 8] w, float half = {0.5}", "float[8, 6] up")
    assert [group.units for group in find_groups(model).groups] == [6]


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("f = Transpose(w)  y = MatMul(x, f)", "float[8, 8] w"),
        ("c = Cast <to = 1> (w)  f = Transpose(c)  y = MatMul(x, f)", "float16[8, 8] w"),
        ("t = Transpose(w)  f = DequantizeLinear(t, scale)  y = MatMul(x, f)", "int8[8, 8] w, float scale = {0.1}"),
        (
            "d = DequantizeLinear(w, scale)  f = Reshape(d, shape)  y = MatMul(x, f)",
            "int8[64] w, float scale = {0.1}, int64[2] shape = {8, 8}",
        ),
        ("c = Cast <to = 1> (w)  f = Mul(c, scale)  y = MatMul(x, f)", "int8[8, 8] w, float scale = {0.1}"),
        ("n = RandomNormalLike(w)  f = Add(n, w)  y = MatMul(x, f)", "float[8, 8] w"),
        (
            "t = ReduceSum <keepdims = 0> (x, axes)  f = Mul(t, w)  y = MatMul(x, f)",
            "float[8, 8] w, int64[2] axes = {0, 1}",
        ),
        ("s = Mul(w, w)  y = Add(x, s)", "float[8] w"),
        ("t = Mul(w, w)  f = MatMul(t, w)  y = Add(x, f)", "float[8, 8] w"),
        ("f = Add(w, w)  y = MatMul(x, f)", "float[1, 8, 8] w"),
    ],
    ids=[
        "transposed",
        "converted",
        "of integers",
        "of integers, reshaped",
        "of integers, scaled",
        "random",
        "of an input",
        "no product",
        "of a table",
        "of three axes",
    ],
)
def test_other_weights_stay(body: str, weights: str) -> None:
    model = graph(body, weights)
    before = operators(model)
    assert assert_untouched(FoldComputedWeights(), model) == ()
    assert operators(model) == before
