"""Axes that merge the batch with heads are cut for any batch size."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.flow.indices import part_of_each_row
from graph_passes.flow.refusal import RefusalCode
from tests.graph_passes.graphs import graph, plan, shrink_and_compare, site

# Distances to keys, times the slope of each head, `[batch * head, 1, key]`, as in BLOOM.
DISTANCES = """
    rows = Shape <start = 0, end = 1> (x)
    length = Shape <start = 1, end = 2> (x)
    count = Squeeze (length)
    whole = Range (zero, count, unit)
    far = Cast <to = 1> (whole)
    sloped = Mul (slopes, far)
    all = Concat <axis = 0> (rows, four, length)
    spread = Expand (sloped, all)
    flat = Concat <axis = 0> (minus, one, length)
    distances = Reshape (spread, flat)
    merged = Mul (rows, four)
    merge = Concat <axis = 0> (merged, minus, width)
    part = Concat <axis = 0> (rows, four, length, width)
"""
# A table of each head, repeated for the rows, of which every key reads an entry, as in DeBERTa v2.
TABLES = """
    rows = Shape <start = 0, end = 1> (x)
    length = Shape <start = 1, end = 2> (x)
    count = Squeeze (length)
    whole = Range (zero, count, unit)
    near = Mod (whole, six)
    repeats = Concat <axis = 0> (rows, one, one)
    tables = Tile (table, repeats)
    merged = Mul (rows, four)
    spread = Concat <axis = 0> (merged, one, length)
    entries = Expand (near, spread)
    distances = GatherElements <axis = 2> (tables, entries)
    merge = Concat <axis = 0> (merged, minus, width)
    part = Concat <axis = 0> (rows, four, length, width)
"""
LAYER = """
    q1{n} = MatMul ({x}, Wq{n})
    k1{n} = MatMul ({x}, Wk{n})
    v1{n} = MatMul ({x}, Wv{n})
    q2{n} = Reshape (q1{n}, split)
    k2{n} = Reshape (k1{n}, split)
    v2{n} = Reshape (v1{n}, split)
    q3{n} = Transpose <perm = [0, 2, 1, 3]> (q2{n})
    k3{n} = Transpose <perm = [0, 2, 1, 3]> (k2{n})
    v3{n} = Transpose <perm = [0, 2, 1, 3]> (v2{n})
    q{n} = Reshape (q3{n}, merge)
    k{n} = Reshape (k3{n}, merge)
    v{n} = Reshape (v3{n}, merge)
    kt{n} = Transpose <perm = [0, 2, 1]> (k{n})
    products{n} = MatMul (q{n}, kt{n})
    scores{n} = Add (products{n}, distances)
    p{n} = Softmax <axis = -1> (scores{n})
    out{n} = MatMul (p{n}, v{n})
    heads{n} = Reshape (out{n}, part)
    back{n} = Transpose <perm = [0, 2, 1, 3]> (heads{n})
    joined{n} = Reshape (back{n}, join)
    apart{n} = Reshape (joined{n}, split)
    gated{n} = Mul (apart{n}, "{n}.head_gate")
    again{n} = Reshape (gated{n}, join)
    {y} = MatMul (again{n}, Wo{n})
"""
CONSTANTS = (
    "int64 zero = {0}, int64 unit = {1}, int64[1] one = {1}, int64[1] four = {4}, int64[1] minus = {-1}, "
    "int64[1] width = {3}, int64[4] split = {0, 0, 4, 3}, int64[3] join = {0, 0, 12}"
)


def layer_of(name: str) -> str:
    """The weights and the gate of a layer."""
    shapes = {"Wq": "8, 12", "Wk": "8, 12", "Wv": "8, 12", "Wo": "12, 8"}
    weights = (f"float[{shape}] {weight}{name}" for weight, shape in shapes.items())
    return ", ".join([*weights, f'float[4, 1] "{name}.head_gate"'])


@pytest.mark.parametrize(("first", "second"), [([0], [1, 2]), ([0, 3], [0, 1, 2, 3]), ([1, 2, 3], [])])
def test_a_table_of_rows_and_heads_is_cut_for_each_of_its_readers(first: list[int], second: list[int]) -> None:
    body = (
        DISTANCES
        + LAYER.format(n="a", x="x", y="middle")
        + LAYER.format(n="b", x="middle", y="last")
        + "y = Add (middle, last)"
    )
    sites = [site(first, name="a"), site(second, name="b")]
    shrunk = shrink_and_compare(
        graph(body, CONSTANTS, "float[4, 1] slopes", layer_of("a"), layer_of("b")), plan(*sites)
    )
    assert shrunk.refused == ()
    slopes = len({*first, *second}) if second else len(first)
    assert shrunk.parameters[1] == 8 * 12 * (len(first) + len(second)) + slopes


@pytest.mark.parametrize("kept", [[0], [1, 2], [0, 1, 3]])
def test_a_table_that_is_repeated_for_rows_is_cut(kept: list[int]) -> None:
    body = TABLES + LAYER.format(n="a", x="x", y="y")
    tables = "int64 six = {6}, float[4, 1, 6] table"
    shrunk = shrink_and_compare(graph(body, CONSTANTS, tables, layer_of("a")), plan(site(kept, name="a")))
    assert shrunk.refused == ()
    assert shrunk.parameters[1] == (8 * 12 + 6) * len(kept)


def test_heads_before_rows_on_an_axis_are_not_cut_for_readers_that_need_different_ones() -> None:
    head_first = """
    rows = Shape <start = 0, end = 1> (x)
    length = Shape <start = 1, end = 2> (x)
    merged = Mul (rows, four)
    spread = Concat <axis = 0> (four, rows, one)
    copies = Expand (slopes, spread)
    flat = Concat <axis = 0> (minus, one, one)
    distances = Reshape (copies, flat)
    merge = Concat <axis = 0> (merged, minus, width)
    part = Concat <axis = 0> (four, rows, length, width)
"""
    layer = LAYER.replace("[0, 2, 1, 3]> (heads", "[1, 2, 0, 3]> (heads").replace("[0, 2, 1, 3]", "[2, 0, 1, 3]")
    body = head_first + layer.format(n="a", x="x", y="middle") + layer.format(n="b", x="middle", y="y")
    model = graph(body, CONSTANTS, "float[4, 1, 1] slopes", layer_of("a"), layer_of("b"))
    shrunk = shrink_and_compare(model, plan(site([0], name="a"), site([1, 2], name="b")))
    assert RefusalCode.FREE_SIZE in {refusal.code for refusal in shrunk.refused}


@pytest.mark.parametrize("kept", [[0, 2], [1, 3]])
def test_repeated_axes_of_free_size_are_not_cut(kept: list[int]) -> None:
    """As many copies of the rows as there are heads: what a head needs are positions of some batch sizes only."""
    copies = """
    rows = Shape <start = 0, end = 1> (x)
    length = Shape <start = 1, end = 2> (x)
    merged = Mul (rows, four)
    sums = ReduceSum <keepdims = 1> (x, two)
    across = Transpose <perm = [0, 2, 1]> (sums)
    distances = Tile (across, repeats)
    merge = Concat <axis = 0> (merged, minus, width)
    part = Concat <axis = 0> (rows, four, length, width)
"""
    body = copies + LAYER.format(n="a", x="x", y="y")
    sizes = "int64[1] two = {2}, int64[3] repeats = {4, 1, 1}"
    shrunk = shrink_and_compare(graph(body, CONSTANTS, sizes, layer_of("a")), plan(site(kept, name="a")))
    assert {refusal.code for refusal in shrunk.refused} == {RefusalCode.FREE_SIZE}


@pytest.mark.parametrize(
    ("index", "expected"), [([1, 5, 9], [1]), ([0, 3, 4, 7, 8, 11], [0, 3]), ([1, 5, 8], None), ([0, 1], None)]
)
def test_the_part_of_a_row(index: list[int], expected: list[int] | None) -> None:
    part = part_of_each_row(np.array(index), 12, 3)
    assert (None if part is None else part.tolist()) == expected


@pytest.mark.parametrize("kept", [[0, 2], [0, 1], [1]])
def test_copies_of_rows_that_look_like_heads_are_not_cut(kept: list[int]) -> None:
    """A number of each row, repeated as often as there are columns: rows of some batch sizes seem to be copies."""
    body = """
        sums = ReduceSum <keepdims = 0> (x, axes)
        spread = Tile (sums, repeats)
        extra = Reshape (spread, shape)
        h = MatMul (x, Wv)
        s = Reshape (h, split)
        t = Mul (s, extra)
        g = Mul (t, "a.head_gate")
        j = Reshape (g, join)
        y = MatMul (j, Wo)
    """
    constants = """
        int64[2] axes = {1, 2}, int64[1] repeats = {12}, int64[4] shape = {-1, 1, 4, 3}, int64[4] split = {0, 0, 4, 3},
        int64[3] join = {0, 0, 12}, float[8, 12] Wv, float[12, 8] Wo, float[4, 1] "a.head_gate"
    """
    sizes = ({"B": 2, "S": 5}, {"B": 3, "S": 5}, {"B": 1, "S": 5}, {"B": 4, "S": 2})
    shrunk = shrink_and_compare(graph(body, constants), plan(site(kept, name="a")), sizes=sizes)
    assert {refusal.code for refusal in shrunk.refused} == {RefusalCode.FREE_SIZE}
