"""Attention layers that divide positions: into blocks of whole lengths, and into first and other positions."""

from __future__ import annotations

from tests.graph_passes.layer_parts import CORE, OUTPUT, PROJECT, PROJECTIONS, SPLIT, TO_HEADS, Layer

_BLOCKS = """
    {0}2 = Reshape ({0}1, split)
    {0}3 = Pad ({0}2, pads)
    {0} = Reshape ({0}3, blocks)
"""
# Positions are padded to whole blocks of 32 and attend within their block, as in LongT5. The quotient that exporters
# write rounds down by the signs of its operands.
IN_BLOCKS = Layer(
    PROJECT
    + """
    rows = Shape <start = 0, end = 1> (x)
    length = Shape <start = 1, end = 2> (x)
    less = Neg (length)
    rest = Mod (less, size)
    pads = Concat <axis = 0> (five, rest, two)
    whole = Add (length, rest)
    quotient = Div (whole, size)
    sign = Sign (whole)
    count = Mul (quotient, sign)
    blocks = Concat <axis = 0> (rows, count, size, split2)
    """
    + "".join(_BLOCKS.format(name) for name in "qkv")
    + """
    scores = Einsum <equation = "...qhd,...khd->...hqk"> (q, k)
    p = Softmax <axis = -1> (scores)
    heads = Einsum <equation = "...hqk,...khd->...qhd"> (p, v)
    gated = Mul (heads, "a.head_gate")
    flat = Concat <axis = 0> (rows, minus, width)
    merged = Reshape (gated, flat)
    first = Slice (merged, zero, length, on1)
    y = MatMul (first, Wo)
    """,
    f"{PROJECTIONS}, {SPLIT}, int64[1] size = {{32}}, int64[5] five = {{0, 0, 0, 0, 0}}, int64[2] two = {{0, 0}}, "
    "int64[2] split2 = {4, 3}, int64[1] minus = {-1}, int64[1] width = {12}, int64[1] zero = {0}, int64[1] on1 = {1}, "
    'float[4, 1] "a.head_gate", float[12, 8] Wo',
    4 * 24 + 2 * 3,
)

# All positions but the first are turned, as patches behind a class token are by DINOv3's rotary embeddings.
IN_TWO_PARTS = Layer(
    PROJECT
    + TO_HEADS.replace("q = Transpose", "q9 = Transpose")
    + """
    length = Shape <start = 1, end = 2> (x)
    others = Sub (length, on1)
    sizes = Concat <axis = 0> (on1, others)
    parts = SplitToSequence <axis = -2> (q9, sizes)
    first = SequenceAt (parts, at0)
    second = SequenceAt (parts, at1)
    turned = Neg (second)
    q = Concat <axis = -2> (first, turned)
    """
    + CORE,
    f"{PROJECTIONS}, {SPLIT}, int64[1] on1 = {{1}}, int64 at0 = {{0}}, int64 at1 = {{1}}, {OUTPUT}",
    4 * 24 + 2 * 3,
)
