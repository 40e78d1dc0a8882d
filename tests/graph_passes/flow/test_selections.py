"""Heads of rows that `NonZero` selects are cut for any number of rows, none included, or refused."""

from __future__ import annotations

import pytest

from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.sizes import is_selection
from tests.graph_passes.graphs import graph, plan, shrink_and_compare, site

ROWS = """
    sums = ReduceSum <keepdims = 0> (x, axes)
    mask = Greater (sums, level)
    positions = NonZero (mask)
"""
LAYER = """
    h = MatMul (rows, Wv)
    count = Shape <start = 0, end = 1> (rows)
    parts = Concat <axis = 0> (count, four, three)
    s = Reshape (h, parts)
    g = Mul (s, "a.head_gate")
    whole = Concat <axis = 0> (count, twelve)
    j = Reshape (g, whole)
    o = MatMul (j, Wo)
    y = ReduceSum <keepdims = 1> (o, zero)
"""
CONSTANTS = """
    int64[1] zero = {0}, int64[1] one = {1}, int64[1] three = {3}, int64[1] four = {4}, int64[1] twelve = {12},
    float[8, 12] Wv, float[12, 8] Wo, float[4, 1] "a.head_gate"
"""
TOKENS = "int64[1] axes = {2}"
SIZES = ({"B": 2, "S": 20}, {"B": 1, "S": 3}, {"B": 1, "S": 1})


@pytest.mark.parametrize("level", [-100.0, 0.5, 1000.0])
@pytest.mark.parametrize("kept", [[0, 2], [1]])
def test_heads_of_selected_rows_are_cut(kept: list[int], level: float) -> None:
    body = f"{ROWS} index = Transpose (positions)  rows = GatherND (x, index) {LAYER}"
    constants = f"{CONSTANTS}, {TOKENS}, float level = {{{level}}}"
    shrunk = shrink_and_compare(
        graph(body, constants, outputs="float[1, 8] y"), plan(site(kept, name="a")), sizes=SIZES
    )
    assert shrunk.refused == ()


@pytest.mark.parametrize("kept", [[0, 2], [1]])
def test_heads_of_the_first_selected_rows_are_not_cut(kept: list[int]) -> None:
    """Four rows at most: fewer rows would have another size than the one that both assignments give."""
    first = "some = Slice (positions, zero, four, one)"
    body = f"{ROWS} {first}  index = Transpose (some)  rows = GatherND (x, index) {LAYER}"
    constants = f"{CONSTANTS}, {TOKENS}, float level = {{1.5}}"
    shrunk = shrink_and_compare(
        graph(body, constants, outputs="float[1, 8] y"), plan(site(kept, name="a")), sizes=SIZES
    )
    assert {refusal.code for refusal in shrunk.refused} == {RefusalCode.UNKNOWN_SHAPE}


@pytest.mark.parametrize("level", [-100.0, 1000.0])
def test_sizes_are_not_inferred_beside_an_axis_that_may_be_empty(level: float) -> None:
    body = f"""{ROWS}
        index = Transpose (positions)
        rows = GatherND (x, index)
        h = MatMul (rows, Wv)
        count = Shape <start = 0, end = 1> (rows)
        length = Shape <start = 1, end = 2> (rows)
        parts = Concat <axis = 0> (count, length, four, three)
        s = Reshape (h, parts)
        g = Mul (s, "a.head_gate")
        whole = Concat <axis = 0> (count, length, twelve)
        j = Reshape (g, whole)
        o = MatMul (j, Wo)
        y = ReduceSum <keepdims = 1> (o, zero)
    """
    constants = f"{CONSTANTS}, int64[2] axes = {{1, 2}}, float level = {{{level}}}"
    shrink_and_compare(graph(body, constants, outputs="float[1, S, 8] y"), plan(site([0, 2], name="a")))


def test_multiples_of_a_selection_are_recognized() -> None:
    assert is_selection(1009, 2003)
    assert is_selection(4 * 1009, 4 * 2003)
    assert not is_selection(4, 4)
    assert not is_selection(0, 0)
    assert not is_selection(3, 5)
