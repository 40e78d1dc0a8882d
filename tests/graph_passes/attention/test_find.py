"""The kind of an attention follows from its mask."""

from __future__ import annotations

import pytest

from graph_passes import find_attention
from tests.graph_passes.graphs import graph


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
