"""The kind of an attention follows from its mask."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import find_attention
from tests.graph_passes.graphs import draw, graph, run
from tests.graph_passes.layers import LAYERS


@pytest.mark.parametrize(
    ("mask", "weights", "kind"),
    [
        (
            "Slice (stored, first, size, axes)",
            "float[1, 1, 9, 9] stored, int64[1] first = {0}, int64[1] axes = {3}",
            "causal",
        ),
        ("Sub (padding, padding)", "", "bidirectional"),
    ],
)
def test_a_stored_mask_over_pairs_is_causal_and_a_threshold_of_a_computed_one_is_not(
    mask: str, weights: str, kind: str
) -> None:
    body = f"""
        qp = MatMul (x, Wq) qs = Reshape (qp, split) q = Transpose <perm = [0, 2, 1, 3]> (qs)
        kp = MatMul (x, Wk) ks = Reshape (kp, split) kt = Transpose <perm = [0, 2, 3, 1]> (ks)
        vp = MatMul (x, Wv) vs = Reshape (vp, split) v = Transpose <perm = [0, 2, 1, 3]> (vs)
        raw = MatMul (q, kt)
        mask = {mask}
        visible = Greater (mask, zero)
        scores = Where (visible, raw, low)
        p = Softmax <axis = -1> (scores)
        heads = MatMul (p, v) back = Transpose <perm = [0, 2, 1, 3]> (heads) merged = Reshape (back, merge)
        y = MatMul (merged, Wo)
    """
    declared = [
        "float zero = {0.0}",
        "float low = {-1e9}",
        "int64[4] split = {0, 0, 4, 3}",
        "int64[3] merge = {0, 0, 12}",
        *(f"float[8, 12] W{operand}" for operand in "qkv"),
        "float[12, 8] Wo",
        "int64[1] size = {9}",
        weights,
    ]
    model = graph(body, *declared, inputs="float[B, 9, 8] x, float[B, 1, 9, 9] padding", outputs="float[B, 9, 8] y")
    if "stored" in model.graph.initializers:
        model.graph.initializers["stored"].const_value = ir.tensor(np.tri(9, dtype=np.float32).reshape(1, 1, 9, 9))
    assert [site.kind for site in find_attention(model)] == [kind]


NORM = "LayerNormalization <axis = -1>"
SOURCES = {
    "one activation": ("q = Identity (x) k = Identity (x)", "bidirectional"),
    "a position of it": ("q = Slice (x, start, end, axes) k = Identity (x)", "bidirectional"),
    "a position by its index": ("q = Gather <axis = 1> (x, position) k = Identity (x)", "bidirectional"),
    "norms of both": (f"one = Slice (x, start, end, axes) q = {NORM} (one, w) k = {NORM} (x, w)", "bidirectional"),
    "a position of the norm": (f"k = {NORM} (x, w) q = Slice (k, start, end, axes)", "bidirectional"),
    "decomposed norms": (
        "mean = ReduceMean (x, last) k = Sub (x, mean) one = Slice (x, start, end, axes)"
        " mean2 = ReduceMean (one, last) q = Sub (one, mean2)",
        "bidirectional",
    ),
    "two inputs": ("q = Identity (z) k = Identity (x)", "cross"),
    "sums with a common part": ("q = Add (x, z) k = Identity (z)", "cross"),
    "sums with different parts": ("q = Add (x, x2) k = Add (z, x2)", "cross"),
    "several projections": ("q = MatMul (x, W) k = Identity (x)", "bidirectional"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_queries_of_some_positions_attend_to_their_own_sequence(name: str) -> None:
    sources, kind = SOURCES[name]
    body = f"""
        {sources}
        qp = MatMul (q, Wq) qs = Reshape (qp, split) qh = Transpose <perm = [0, 2, 1, 3]> (qs)
        kp = MatMul (k, Wk) ks = Reshape (kp, split) kh = Transpose <perm = [0, 2, 3, 1]> (ks)
        vp = MatMul (k, Wv) vs = Reshape (vp, split) vh = Transpose <perm = [0, 2, 1, 3]> (vs)
        scores = MatMul (qh, kh) p = Softmax <axis = -1> (scores) heads = MatMul (p, vh)
        back = Transpose <perm = [0, 2, 1, 3]> (heads) merged = Reshape (back, merge) y = MatMul (merged, Wo)
    """
    weights = (*(f"float[8, 12] W{operand}" for operand in "qkv"), "float[8, 8] W", "float[12, 8] Wo", "float[8] w")
    numbers = (
        "int64[1] start = {0}",
        "int64[1] end = {1}",
        "int64[1] axes = {1}",
        "int64[1] position = {0}",
        "int64[1] last = {2}",
    )
    shapes = ("int64[4] split = {0, -1, 4, 3}", "int64[3] merge = {0, -1, 12}")
    inputs = "float[B, 9, 8] x, float[B, 9, 8] z, float[B, 9, 8] x2"
    model = graph(body, *weights, *numbers, *shapes, inputs=inputs, outputs="float[B, N, 8] y")
    assert [site.kind for site in find_attention(model)] == [kind]


ATTENTION = """
    qp = MatMul (x, Wq) qs = Reshape (qp, split) q = Transpose <perm = {order}> (qs)
    kp = MatMul (x, Wk) ks = Reshape (kp, split) k = Transpose <perm = {order}> (ks)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    {values}
    raw = MatMul (q, kt) {masked} p = Softmax <axis = -1> (s) heads = MatMul (p, v)
    back = Transpose <perm = {order}> (heads) merged = Reshape (back, merge) y = MatMul (merged, Wo)
"""


def attention(values: str, *weights: str, order: str = "[0, 2, 1, 3]", masked: str = "s = Identity (raw)") -> ir.Model:
    """An attention of 4 heads of width 3, with an order of axes, and what computes its masked scores."""
    projections = (f"float[8, 12] W{operand}" for operand in "qkv")
    splits = "int64[4] split = {0, 0, 4, 3}, int64[3] merge = {0, 0, 12}, float[12, 8] Wo"
    return graph(ATTENTION.format(values=values, order=order, masked=masked), *projections, splits, *weights)


@pytest.mark.parametrize("name", ["separate", "grouped heads", "grouped heads, tiled"])
def test_keys_that_heads_share_are_counted(name: str) -> None:
    (site,) = find_attention(LAYERS[name].graph())
    assert (site.heads, site.kv_heads, site.head_dim) == (4, LAYERS[name].kv_heads, LAYERS[name].head_dim)


def test_values_that_every_row_shares_are_not_shared_by_heads() -> None:
    values = """
        b = Shape <start = 0, end = 1> (x) l = Shape <start = 1, end = 2> (x)
        part = Slice (stored, none, l, axis) shape = Concat <axis = 0> (b, four, l, three) v = Expand (part, shape)
    """
    weights = "float[1, 4, 64, 3] stored, int64[1] none = {0}, int64[1] axis = {2}, int64[1] four = {4}"
    (site,) = find_attention(attention(values, weights, "int64[1] three = {3}"))
    assert (site.heads, site.kv_heads) == (4, 4)


def test_rows_on_the_second_axis_are_no_heads() -> None:
    """Heads, rows, positions, width: the number of rows is not the number of heads."""
    values = "vp = MatMul (x, Wv) vs = Reshape (vp, split) v = Transpose <perm = [2, 0, 1, 3]> (vs)"
    model = attention(values, order="[2, 0, 1, 3]")
    for node in model.graph:
        if node.op_type == "Transpose" and node.outputs[0].name == "back":
            node.attributes["perm"] = ir.AttrInt64s("perm", (1, 2, 0, 3))
    assert run(model, draw(model, {"B": 2, "S": 5}))
    assert not find_attention(model)


POSITIONS = """
    l = Shape <start = 1, end = 2> (x) count = Squeeze (l) order = Range (none, count, one)
    row = Unsqueeze (order, first) column = Unsqueeze (order, second) distance = Sub (row, column)
"""


@pytest.mark.parametrize(
    ("comparison", "kind"),
    [
        ("far = Greater (distance, none)", "causal"),
        ("size = Abs (distance) far = Greater (size, one)", "bidirectional"),
        ("near = LessOrEqual (distance, none) far = Not (near)", "causal"),
        ("far = Greater (distance, one)", "bidirectional"),
    ],
)
def test_a_window_around_each_query_is_not_causal(comparison: str, kind: str) -> None:
    values = f"""
        vp = MatMul (x, Wv) vs = Reshape (vp, split) v = Transpose <perm = [0, 2, 1, 3]> (vs)
        {POSITIONS} {comparison}
    """
    weights = "int64 none = {0}, int64 one = {1}, int64[1] first = {0}, int64[1] second = {1}, float low = {-1e9}"
    model = attention(values, weights, masked="s = Where (far, low, raw)")
    assert [site.kind for site in find_attention(model)] == [kind]


def test_reshapes_around_a_projection_leave_its_source() -> None:
    values = "vp = MatMul (x, Wv) vs = Reshape (vp, split) v = Transpose <perm = [0, 2, 1, 3]> (vs)"
    model = attention(values, "int64[2] rows = {-1, 8}, int64[1] width = {12}")
    weights = model.graph.initializers
    query = next(node for node in model.graph if node.outputs[0].name == "qp")
    rows = ir.node("Reshape", [query.inputs[0], weights["rows"]])
    lengths = ir.node("Shape", [query.inputs[0]], {"start": 0, "end": 2})
    shape = ir.node("Concat", [lengths.outputs[0], weights["width"]], {"axis": 0})
    back = ir.node("Reshape", [query.outputs[0], shape.outputs[0]])
    (reader, position), *_ = query.outputs[0].uses()
    model.graph.insert_before(query, [rows, lengths, shape])
    model.graph.insert_after(query, back)
    query.replace_input_with(0, rows.outputs[0])
    reader.replace_input_with(position, back.outputs[0])
    assert [site.kind for site in find_attention(model)] == ["bidirectional"]
