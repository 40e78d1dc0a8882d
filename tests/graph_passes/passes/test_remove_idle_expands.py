"""An `Expand` that repeats nothing is removed."""

from __future__ import annotations

from graph_passes.passes import RemoveIdleExpands
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

INPUTS = "float[B, 2, S, 4] q, float[B, 1, S, S] mask, float[B, 1, 1, S] row"
SHAPE = "s = Shape <start = 2, end = 3> (q)  to = Concat <axis = 0> (one, one, s, one)  "


def test_an_expand_that_repeats_nothing_is_removed() -> None:
    body = SHAPE + "e = Expand(mask, to)  f = Expand(row, to)  y = Add(e, f)"
    model = graph(body, "int64[1] one = {1}", inputs=INPUTS, outputs="float[B, 1, S, S] y")
    result = rewritten(RemoveIdleExpands(), model, tolerance=0)
    assert operators(result.model) == ["Shape", "Concat", "Expand", "Add"]
    assert len(result.report) == 1
    assert [value.name for value in result.model.graph[-1].inputs if value is not None] == ["mask", "f"]


def test_an_output_of_the_graph_stays() -> None:
    body = SHAPE + "y = Expand(mask, to)"
    model = graph(body, "int64[1] one = {1}", inputs=INPUTS, outputs="float[B, 1, S, S] y")
    assert assert_untouched(RemoveIdleExpands(), model) == ()


def test_an_expand_to_a_computed_shape_stays() -> None:
    body = """
        low = ReduceMin <keepdims = 0> (row)  zero = Mul(low, nought)  number = Cast <to = 7> (zero)
        sizes = Add(number, ones)  e = Expand(row, sizes)  y = Relu(e)
    """
    weights = "float nought = {0.0}, int64[4] ones = {1, 1, 1, 1}"
    model = graph(body, weights, inputs=INPUTS, outputs="float[B, N, M, S] y")
    assert assert_untouched(RemoveIdleExpands(), model) == ()
