"""Attention layers that look up elements: relative positions, interleaved parts of a head, positions in an order."""

from __future__ import annotations

from tests.graph_passes.layer_parts import CORE, OUTPUT, PROJECT, PROJECTIONS, SPLIT, TO_HEADS, Layer

# A table of six distances for each query, from which each pair of positions reads one, as in DeBERTa.
LOOKED_UP = Layer(
    PROJECT
    + TO_HEADS
    + CORE.replace(
        "(q, kt)",
        "(q, kt) "
        "distances = Abs (scores) near = Clip (distances, none, most) nearest = Cast <to = 7> (near) "
        "table = MatMul (q, positions) bias = GatherElements <axis = 3> (table, nearest) biased = Add (scores, bias)",
    ).replace("Softmax <axis = -1> (scores)", "Softmax <axis = -1> (biased)"),
    f"{PROJECTIONS}, {SPLIT}, float[4, 3, 6] positions, float none = {{0.0}}, float most = {{5.0}}, {OUTPUT}",
    4 * 24 + 2 * 3 + 18,
)

# Queries are turned as by interleaved rotary embeddings: each part of a head passes an operator of another axis first.
INTERLEAVED = Layer(
    PROJECT
    + TO_HEADS.replace("q = Transpose", "q9 = Transpose")
    + """
    all = Slice (q9, at0, end, on1)
    even = Slice (all, at0, end, on3, by2)
    whole = Split <axis = 1, num_outputs = 1> (q9)
    odd = Slice (whole, at1, end, on3, by2)
    q = Concat <axis = 3> (odd, even)
    """
    + CORE,
    f"{PROJECTIONS}, {SPLIT}, int64[1] at0 = {{0}}, int64[1] at1 = {{1}}, int64[1] end = {{9}}, int64[1] on1 = {{1}}, "
    f"int64[1] on3 = {{3}}, int64[1] by2 = {{2}}, {OUTPUT}",
    4 * 24 + 2 * 3,
)

# Keys in an order that is computed from the length.
PERMUTED = Layer(
    PROJECT
    + """
    length = Shape <start = 1, end = 2> (x)
    rows = Shape <start = 0, end = 1> (x)
    count = Squeeze (length)
    upward = Range (zero, count, unit)
    column = Reshape (upward, upright)
    shape = Concat <axis = 0> (rows, ones)
    order = Expand (column, shape)
    k9 = GatherND <batch_dims = 1> (k1, order)
    """
    + TO_HEADS.replace("(k1, split)", "(k9, split)")
    + CORE,
    f"{PROJECTIONS}, {SPLIT}, int64 zero = {{0}}, int64 unit = {{1}}, int64[3] upright = {{1, -1, 1}}, "
    f"int64[2] ones = {{1, 1}}, {OUTPUT}",
    4 * 24 + 2 * 3,
)
