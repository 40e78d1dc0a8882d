"""Operators that divide an axis lose dropped heads in every operator set; so do those that sample images for heads."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from tests.graph_passes.graphs import graph, plan, shape, shrink_and_compare
from tests.graph_passes.layer_parts import CORE, OUTPUT, SPLIT, TO_HEADS
from tests.graph_passes.layers import FUSED_PROJECTION


@pytest.mark.parametrize("opset", [11, 13, 17])
def test_a_split_in_equal_parts_has_the_sizes_of_what_is_left(opset: int) -> None:
    body = FUSED_PROJECTION + "q1, k1, v1 = Split <axis = 2> (qkv)" + TO_HEADS + CORE
    model = graph(body, f"float[8, 36] Wqkv, float[36] bqkv, {SPLIT}, {OUTPUT}", opset=opset)
    shrunk = shrink_and_compare(model, plan([0, 2, 3]))
    assert shrunk.refused == ()
    onnx.checker.check_model(ir.to_proto(shrunk.model), full_check=True)


def test_heads_whose_values_are_sampled_are_cut() -> None:
    # As in deformable attention: 4 heads of width 3, [row * head, width, height, 1] and [row * head, height, 1, 2].
    body = """
        shape = Shape (x) length = Gather (shape, one) image = Concat <axis = 0> (minus, width, length, one)
        grid = Concat <axis = 0> (minus, length, one, pair) unmerge = Concat <axis = 0> (minus, heads, width, length)
        v = MatMul (x, Wv) v1 = Reshape (v, split) v2 = Transpose <perm = [0, 2, 3, 1]> (v1) v3 = Reshape (v2, image)
        p = MatMul (x, Wp) t = Tanh (p) p1 = Reshape (t, points) p2 = Transpose <perm = [0, 2, 1, 3]> (p1)
        p3 = Reshape (p2, grid) sampled = GridSample (v3, p3) s1 = Reshape (sampled, unmerge)
        s2 = Transpose <perm = [0, 1, 3, 2]> (s1) gated = Mul (s2, "a.head_gate")
        back = Transpose <perm = [0, 2, 1, 3]> (gated) merged = Reshape (back, merge) y = MatMul (merged, Wo)
    """
    model = graph(
        body,
        "float[8, 12] Wv, float[8, 8] Wp, int64[4] split = {0, 0, 4, 3}, int64[4] points = {0, 0, 4, 2}",
        "int64[1] one = {1}, int64[1] minus = {-1}, int64[1] width = {3}, int64[1] pair = {2}, int64[1] heads = {4}",
        'float[4, 1, 1] "a.head_gate", float[12, 8] Wo, int64[3] merge = {0, 0, 12}',
    )
    shrunk = shrink_and_compare(model, plan([0, 2]))
    assert shrunk.refused == ()
    assert [shape(shrunk.model, name) for name in ("Wv", "Wp", "Wo")] == [(8, 6), (8, 4), (6, 8)]
