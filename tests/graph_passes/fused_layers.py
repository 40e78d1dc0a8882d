"""One attention layer of 4 heads on `x [B, S, 8]` as operators that compute all of it: of ONNX 23 and ONNX Runtime."""

from __future__ import annotations

from tests.graph_passes.layer_parts import PROJECT, PROJECTIONS, TO_HEADS, Layer

_MERGE = """
    back = Transpose <perm = [0, 2, 1, 3]> (heads)
    merged = Reshape (back, merge)
    y = MatMul (merged, Wo)
"""
_OUT = "float[12, 8] Wo"
_MERGED = f"{_OUT}, int64[3] merge = {{0, 0, 12}}"
_SPLIT = "int64[4] split = {0, 0, 4, 3}"
_HALVES = """
    k0 = MatMul (x, Wk)
    k1 = Reshape (k0, splitkv)
    k = Transpose <perm = [0, 2, 1, 3]> (k1)
    v0 = MatMul (x, Wv)
    v1 = Reshape (v0, splitkv)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
"""
_GROUPED = f"float[8, 12] Wq, float[8, 6] Wk, float[8, 6] Wv, {_SPLIT}, int64[4] splitkv = {{0, 0, 2, 3}}"
_LENGTHS = """
    shape = Shape (x)
    length = Gather (shape, i1)
    total = Cast <to = 6> (length)
    less = Sub (length, i1)
    less32 = Cast <to = 6> (less)
    batch = Slice (shape, at0, at1)
    last = Expand (less32, batch)
"""
_LENGTHS_WEIGHTS = "int64 i1 = {1}, int64[1] at0 = {0}, int64[1] at1 = {1}"


def _standard(body: str, weights: str, a_head: int, kv_heads: int = 4, a_kv_head: int = 0) -> Layer:
    return Layer(body, weights, a_head, kv_heads, a_kv_head, opset=23)


FUSED = {
    "Attention 4D": _standard(
        PROJECT + TO_HEADS + "heads = Attention (q, k, v)" + _MERGE, f"{PROJECTIONS}, {_SPLIT}, {_MERGED}", 102
    ),
    "Attention 4D, grouped": _standard(
        "q0 = MatMul (x, Wq) q1 = Reshape (q0, split) q = Transpose <perm = [0, 2, 1, 3]> (q1)"
        + _HALVES
        + "heads = Attention <is_causal = 1> (q, k, v)"
        + _MERGE,
        f"{_GROUPED}, {_MERGED}",
        48,
        2,
        48,
    ),
    "Attention 4D, mask a head": _standard(
        PROJECT
        + TO_HEADS
        + """
        turned = Transpose <perm = [0, 2, 1]> (x)
        pairs = MatMul (x, turned)
        grid = Unsqueeze (pairs, one)
        mask = Mul (grid, slope)
        heads = Attention <scale = 0.3> (q, k, v, mask)
        """
        + _MERGE,
        f"{PROJECTIONS}, {_SPLIT}, {_MERGED}, int64[1] one = {{1}}, float[4, 1, 1] slope",
        103,
    ),
    "Attention 4D, one mask a head for all rows": _standard(
        PROJECT
        + TO_HEADS
        + """
        turned = Transpose <perm = [0, 2, 1]> (x)
        pairs = MatMul (x, turned)
        grid = ReduceMax (pairs, first)
        mask = Mul (grid, slope)
        heads = Attention <scale = 0.3> (q, k, v, mask)
        """
        + _MERGE,
        f"{PROJECTIONS}, {_SPLIT}, {_MERGED}, int64[1] first = {{0}}, float[4, 1, 1] slope",
        103,
    ),
    "Attention 3D": _standard(
        PROJECT + "heads = Attention <q_num_heads = 4, kv_num_heads = 4> (q1, k1, v1) y = MatMul (heads, Wo)",
        f"{PROJECTIONS}, {_OUT}",
        102,
    ),
    "Attention 3D, grouped": _standard(
        """
        q = MatMul (x, Wq)
        k = MatMul (x, Wk)
        v = MatMul (x, Wv)
        heads = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v)
        y = MatMul (heads, Wo)
        """,
        f"float[8, 12] Wq, float[8, 6] Wk, float[8, 6] Wv, {_OUT}",
        48,
        2,
        48,
    ),
    "com.microsoft.Attention": Layer(
        "heads = com.microsoft.Attention <num_heads = 4> (x, Wqkv, bqkv) y = MatMul (heads, Wo)",
        f"float[8, 36] Wqkv, float[36] bqkv, {_OUT}",
        105,
    ),
    "com.microsoft.Attention, values wider": Layer(
        """
        heads = com.microsoft.Attention <num_heads = 4, qkv_hidden_sizes = [8, 8, 12], unidirectional = 1> (x, W, b)
        y = MatMul (heads, Wo)
        """,
        f"float[8, 28] W, float[28] b, {_OUT}",
        9 * 7 + 24,
    ),
    "com.microsoft.Attention, bias a head": Layer(
        """
        turned = Transpose <perm = [0, 2, 1]> (x)
        pairs = MatMul (x, turned)
        grid = Unsqueeze (pairs, one)
        bias = Mul (grid, slope)
        heads = com.microsoft.Attention <num_heads = 4> (x, Wqkv, bqkv, , , bias)
        y = MatMul (heads, Wo)
        """,
        f"float[8, 36] Wqkv, float[36] bqkv, int64[1] one = {{1}}, float[4, 1, 1] slope, {_OUT}",
        106,
    ),
    "MultiHeadAttention": Layer(
        PROJECT + "heads = com.microsoft.MultiHeadAttention <num_heads = 4> (q1, k1, v1) y = MatMul (heads, Wo)",
        f"{PROJECTIONS}, {_OUT}",
        102,
    ),
    "MultiHeadAttention with bias": Layer(
        """
        q = MatMul (x, Wq)
        k = MatMul (x, Wk)
        v = MatMul (x, Wv)
        heads = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v, b)
        y = MatMul (heads, Wo)
        """,
        f"float[8, 12] Wq, float[8, 12] Wk, float[8, 12] Wv, float[36] b, {_OUT}",
        105,
    ),
    "MultiHeadAttention with a bias of scores": Layer(
        PROJECT
        + """
        turned = Transpose <perm = [0, 2, 1]> (x)
        pairs = MatMul (x, turned)
        grid = Unsqueeze (pairs, one)
        bias = Mul (grid, slope)
        heads = com.microsoft.MultiHeadAttention <num_heads = 4> (q1, k1, v1, , , bias)
        y = MatMul (heads, Wo)
        """,
        f"{PROJECTIONS}, int64[1] one = {{1}}, float[4, 1, 1] slope, {_OUT}",
        103,
    ),
    "MultiHeadAttention, keys and values by head": Layer(
        PROJECT
        + TO_HEADS
        + "heads = com.microsoft.MultiHeadAttention <num_heads = 4> (q1, k, v) y = MatMul (heads, Wo)",
        f"{PROJECTIONS}, {_SPLIT}, {_OUT}",
        102,
    ),
    "GroupQueryAttention": Layer(
        """
        q = MatMul (x, Wq)
        k = MatMul (x, Wk)
        v = MatMul (x, Wv)
        """
        + _LENGTHS
        + """
        heads, pk, pv = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (q, k, v, , , last, total)
        y = MatMul (heads, Wo)
        """,
        f"float[8, 32] Wq, float[8, 16] Wk, float[8, 16] Wv, {_LENGTHS_WEIGHTS}, float[32, 8] Wo",
        128,
        2,
        128,
        head_dim=8,
    ),
    "GroupQueryAttention, packed and rotary": Layer(
        "qkv = MatMul (x, Wqkv)"
        + _LENGTHS
        + """
        heads, pk, pv = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, do_rotary = 1>
            (qkv, , , , , last, total, cos, sin)
        y = MatMul (heads, Wo)
        """,
        f"float[8, 128] Wqkv, {_LENGTHS_WEIGHTS}, float[64, 8] Wo, float[9, 8] cos, float[9, 8] sin",
        256,
        2,
        256,
        head_dim=16,
    ),
}
