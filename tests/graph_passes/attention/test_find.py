"""The kind of an attention follows from its mask."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes import find_attention
from tests.graph_passes.graphs import draw, graph, run


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
    assert [site.kind for site in find_attention(model)] == [kind]


ATTENTION = """
    qp = MatMul (x, Wq) qs = Reshape (qp, split) q = Transpose <perm = {order}> (qs)
    kp = MatMul (x, Wk) ks = Reshape (kp, split) k = Transpose <perm = {order}> (ks)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    {values}
    raw = MatMul (q, kt) p = Softmax <axis = -1> (raw) heads = MatMul (p, v)
    back = Transpose <perm = {order}> (heads) merged = Reshape (back, merge) y = MatMul (merged, Wo)
"""


def attention(values: str, *weights: str, order: str = "[0, 2, 1, 3]") -> ir.Model:
    """An attention of 4 heads of width 3, with an order of axes."""
    projections = (f"float[8, 12] W{operand}" for operand in "qkv")
    splits = "int64[4] split = {0, 0, 4, 3}, int64[3] merge = {0, 0, 12}, float[12, 8] Wo"
    return graph(ATTENTION.format(values=values, order=order), *projections, splits, *weights)


def test_values_that_every_row_shares_are_not_shared_by_heads() -> None:
    values = """
        s = Shape <start = 0, end = 1> (x) l = Shape <start = 1, end = 2> (x)
        part = Slice (stored, none, l, axis) shape = Concat <axis = 0> (s, four, l, three) v = Expand (part, shape)
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
