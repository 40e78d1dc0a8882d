"""Points of images are sampled for each row and channel apart, as deformable attention does for each head."""

from __future__ import annotations

from tests.graph_passes.graphs import graph, plan, shape, shrink_and_compare


def test_heads_whose_values_are_sampled_are_cut() -> None:
    # Values and points of 4 heads of width 3: [row * head, width, height, 1] and [row * head, height, 1, 2].
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
