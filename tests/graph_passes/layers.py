"""One attention layer of 4 heads of width 3 on `x [B, S, 8]`, in the forms that exporters write. Its gate is `a`."""

from __future__ import annotations

import dataclasses

from tests.graph_passes.layer_parts import CORE, OUTPUT, PROJECT, PROJECTIONS, SPLIT, TO_HEADS, Layer
from tests.graph_passes.lookup_layers import INTERLEAVED, LOOKED_UP, PERMUTED
from tests.graph_passes.position_layers import IN_BLOCKS, IN_TWO_PARTS
from tests.quick_cases import quick

SEPARATE = Layer(PROJECT + TO_HEADS + CORE, f"{PROJECTIONS}, {SPLIT}, {OUTPUT}", 4 * 24 + 2 * 3)

FUSED_PROJECTION = """
    both = MatMul (x, Wqkv)
    qkv = Add (both, bqkv)
"""


def _fused(body: str, weights: str) -> Layer:
    """A layer whose three projections are one product."""
    declared = f"float[8, 36] Wqkv, float[36] bqkv, {weights}, {OUTPUT}"
    return Layer(FUSED_PROJECTION + body + CORE, declared, 4 * 24 + 3 * 3)


# Query heads 0 and 1 share the first key/value head, 2 and 3 the second.
GROUPED = Layer(
    """
    q0 = MatMul (x, Wq)
    q1 = Reshape (q0, split)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul (x, Wk)
    k1 = Reshape (k0, splitkv)
    k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
    k3 = Unsqueeze (k2, two)
    k4 = Expand (k3, twice)
    k = Reshape (k4, join)
    v0 = MatMul (x, Wv)
    v1 = Reshape (v0, splitkv)
    v2 = Transpose <perm = [0, 2, 1, 3]> (v1)
    v3 = Unsqueeze (v2, two)
    v4 = Expand (v3, twice)
    v = Reshape (v4, join)
    """
    + CORE,
    f"float[8, 12] Wq, float[8, 6] Wk, float[8, 6] Wv, {SPLIT}, int64[4] splitkv = {{0, 0, 2, 3}}, "
    "int64[1] two = {2}, int64[5] twice = {1, 1, 2, 1, 1}, int64[4] join = {0, 4, -1, 3}, " + OUTPUT,
    2 * 24,
    kv_heads=2,
    weights_a_kv_head=2 * 24,
)

# Batch and heads share the first axis of three-dimensional products, as in torch's older attention layers.
MERGED_BATCH = Layer(
    PROJECT
    + """
    shape = Shape (x)
    length = Gather (shape, one)
    flat = Concat <axis = 0> (minus, length, width)
    unmerge = Concat <axis = 0> (minus, count, length, width)
    q2 = Reshape (q1, split)
    q3 = Transpose <perm = [0, 2, 1, 3]> (q2)
    q = Reshape (q3, flat)
    k2 = Reshape (k1, split)
    k3 = Transpose <perm = [0, 2, 1, 3]> (k2)
    k = Reshape (k3, flat)
    v2 = Reshape (v1, split)
    v3 = Transpose <perm = [0, 2, 1, 3]> (v2)
    v = Reshape (v3, flat)
    kt = Transpose <perm = [0, 2, 1]> (k)
    scores = MatMul (q, kt)
    p = Softmax <axis = -1> (scores)
    out = MatMul (p, v)
    heads = Reshape (out, unmerge)
    gated = Mul (heads, "a.head_gate")
    back = Transpose <perm = [0, 2, 1, 3]> (gated)
    merged = Reshape (back, merge)
    y = MatMul (merged, Wo)
    """,
    f"{PROJECTIONS}, {SPLIT}, int64[1] one = {{1}}, int64[1] minus = {{-1}}, int64[1] width = {{3}}, "
    f"int64[1] count = {{4}}, {OUTPUT}",
    4 * 24 + 2 * 3,
)

# Query and key are normalised over one head's width and rotated by position, in halves; head width 4 for 2 + 2.
_ROTATE = """
    {0}3 = Mul ({0}2, {0}2)
    {0}4 = ReduceMean <keepdims = 1> ({0}3, last)
    {0}5 = Sqrt ({0}4)
    {0}6 = Div ({0}2, {0}5)
    {0}7 = Mul ({0}6, norm)
    {0}low, {0}high = Split <axis = -1, num_outputs = 2> ({0}7)
    {0}minus = Neg ({0}high)
    {0}turned = Concat <axis = -1> ({0}minus, {0}low)
    {0}c = Mul ({0}7, cos)
    {0}s = Mul ({0}turned, sin)
    {0} = Add ({0}c, {0}s)
"""
ROTATED = Layer(
    """
    shape = Shape (x)
    length = Gather (shape, i1)
    places = Range (i0, length, i1)
    row = Cast <to = 1> (places)
    column = Unsqueeze (row, last)
    angle = Mul (column, frequencies)
    cos = Cos (angle)
    sin = Sin (angle)
    q0 = MatMul (x, Wq)
    q1 = Reshape (q0, split)
    q2 = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul (x, Wk)
    k1 = Reshape (k0, split)
    k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
    v0 = MatMul (x, Wv)
    v1 = Reshape (v0, splitv)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    """
    + _ROTATE.format("q")
    + _ROTATE.format("k")
    + CORE,
    "int64 i0 = {0}, int64 i1 = {1}, int64[1] last = {-1}, float[4] frequencies, float[4] norm, float[8, 16] Wq, "
    "float[8, 16] Wk, float[8, 12] Wv, int64[4] split = {0, 0, 4, 4}, int64[4] splitv = {0, 0, 4, 3}, " + OUTPUT,
    2 * 32 + 2 * 24,
)

# A table [distance, head] is looked up by distance and added to the scores; query and key are scaled on both sides.
RELATIVE = Layer(
    PROJECT
    + TO_HEADS
    + """
    shape = Shape (x)
    length = Gather (shape, i1)
    places = Range (i0, length, i1)
    columns = Unsqueeze (places, first)
    rows = Unsqueeze (places, last)
    distance = Sub (columns, rows)
    far = Add (distance, middle)
    bucket = Clip (far, i0, top)
    looked = Gather <axis = 0> (table, bucket)
    turned = Transpose <perm = [2, 0, 1]> (looked)
    bias = Unsqueeze (turned, first)
    root = Sqrt (scale)
    qs = Mul (q, root)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    ks = Mul (kt, root)
    raw = MatMul (qs, ks)
    scores = Add (raw, bias)
    p = Softmax <axis = -1> (scores)
    heads = MatMul (p, v)
    gated = Mul (heads, "a.head_gate")
    back = Transpose <perm = [0, 2, 1, 3]> (gated)
    merged = Reshape (back, merge)
    y = MatMul (merged, Wo)
    """,
    f"{PROJECTIONS}, {SPLIT}, int64 i0 = {{0}}, int64 i1 = {{1}}, int64[1] first = {{0}}, int64[1] last = {{-1}}, "
    f"int64 middle = {{4}}, int64 top = {{8}}, float[9, 4] table, float scale = {{0.5}}, {OUTPUT}",
    4 * 24 + 2 * 3 + 9,
)

# The output projection is a `Gemm` on two axes, with a bias and a residual, and the gate has the axis heads * width.
FLAT = Layer(
    PROJECT
    + TO_HEADS
    + """
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    raw = MatMul (q, kt)
    p = Softmax <axis = -1> (raw)
    heads = MatMul (p, v)
    back = Transpose <perm = [0, 2, 1, 3]> (heads)
    merged = Reshape (back, merge)
    gated = Mul ("a.head_gate", merged)
    rows = Reshape (gated, flat)
    out = Gemm <transB = 1> (rows, Wo, bo)
    shape = Shape (x)
    projected = Reshape (out, shape)
    y = Add (x, projected)
    """,
    f'{PROJECTIONS}, {SPLIT}, float[12] "a.head_gate", float[8, 12] Wo, float[8] bo, int64[3] merge = {{0, 0, 12}}, '
    "int64[2] flat = {-1, 12}",
    4 * 24 + 2 * 3,
)

LAYERS = {
    "separate": SEPARATE,
    "split": _fused(
        "q1, k1, v1 = Split <axis = -1> (qkv, thirds)" + TO_HEADS,
        f"{SPLIT}, int64[3] thirds = {{12, 12, 12}}",
    ),
    "split in equal parts": _fused("q1, k1, v1 = Split <axis = 2, num_outputs = 3> (qkv)" + TO_HEADS, SPLIT),
    "slice": _fused(
        """
        q1 = Slice (qkv, at0, at1, last)
        k1 = Slice (qkv, at1, at2, last)
        v1 = Slice (qkv, at2, end, last)
        """
        + TO_HEADS,
        f"{SPLIT}, int64[1] at0 = {{0}}, int64[1] at1 = {{12}}, int64[1] at2 = {{24}}, "
        "int64[1] end = {9223372036854775807}, int64[1] last = {-1}",
    ),
    "gather from [3, heads, width]": _fused(
        """
        five = Reshape (qkv, three)
        q2 = Gather <axis = 2> (five, i0)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)
        k2 = Gather <axis = 2> (five, i1)
        k = Transpose <perm = [0, 2, 1, 3]> (k2)
        v2 = Gather <axis = 2> (five, i2)
        v = Transpose <perm = [0, 2, 1, 3]> (v2)
        """,
        "int64[5] three = {0, 0, 3, 4, 3}, int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {-1}",
    ),
    "turned to [3, batch, heads, length, width]": _fused(
        """
        five = Reshape (qkv, three)
        turned = Transpose <perm = [2, 0, 3, 1, 4]> (five)
        q0, k0, v0 = Split <axis = 0, num_outputs = 3> (turned)
        q = Squeeze (q0, zero)
        k = Squeeze (k0, zero)
        v = Squeeze (v0, zero)
        """,
        "int64[5] three = {0, 0, 3, 4, 3}, int64[1] zero = {0}",
    ),
    "split by head [heads, 3 * width]": _fused(
        """
        four = Reshape (qkv, nine)
        turned = Transpose <perm = [0, 2, 1, 3]> (four)
        q, k, v = Split <axis = -1, num_outputs = 3> (turned)
        """,
        "int64[4] nine = {0, 0, 4, 9}",
    ),
    "split to a sequence": _fused(
        """
        parts = SplitToSequence <axis = -1> (qkv, thirds)
        q1 = SequenceAt (parts, i0)
        k1 = SequenceAt (parts, i1)
        v1 = SequenceAt (parts, i2)
        """
        + TO_HEADS,
        f"{SPLIT}, int64[3] thirds = {{12, 12, 12}}, int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{2}}",
    ),
    "grouped heads": GROUPED,
    "grouped heads, tiled": dataclasses.replace(GROUPED, body=GROUPED.body.replace("Expand", "Tile")),
    "batch and heads on one axis": MERGED_BATCH,
    "rotary and normalised": ROTATED,
    "relative bias": RELATIVE,
    "gate on heads * width": FLAT,
    "relative positions that are looked up": LOOKED_UP,
    "elements of a head that are read apart": INTERLEAVED,
    "positions that are looked up": PERMUTED,
    "positions in blocks": IN_BLOCKS,
    "positions in two parts": IN_TWO_PARTS,
    "GatherND from [3, heads, width]": _fused(
        """
        five = Reshape (qkv, three)
        parts = Transpose <perm = [2, 0, 3, 1, 4]> (five)
        q1 = GatherND (parts, i0)
        q = Squeeze (q1, first)
        k1 = GatherND (parts, i1)
        k = Squeeze (k1, first)
        v1 = GatherND (parts, i2)
        v = Squeeze (v1, first)
        """,
        "int64[5] three = {0, 0, 3, 4, 3}, int64[1] first = {0}, int64[1, 1] i0 = {0}, int64[1, 1] i1 = {-2}, "
        "int64[1, 1] i2 = {2}",
    ),
}

SOME_LAYERS = quick(LAYERS, ("separate", "batch and heads on one axis"))
"""All layers for tests of single passes, two of them quick: shrinking runs these passes on each."""
