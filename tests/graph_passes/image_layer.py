"""A feed-forward on the patches of images whose channels, height and width have names in place of sizes."""

from __future__ import annotations

import onnx_ir as ir

from tests.graph_passes.graphs import graph

SHAPE = (2, 3, 12, 12)
"""A shape of images `[row, channel, height, width]` that the graph runs on."""


def image_layer() -> ir.Model:
    """9 patches of 4 x 4, with positions, and a feed-forward of 20 neurons."""
    body = """
        c = Conv <kernel_shape = [4, 4], strides = [4, 4]> (x, W)
        r = Reshape (c, flat) p = Transpose <perm = [0, 2, 1]> (r) e = Add (p, positions)
        u = MatMul (e, U) a = Relu (u) d = MatMul (a, D) y = Add (d, e)
    """
    weights = "float[8, 3, 4, 4] W, float[1, 9, 8] positions, float[8, 20] U, float[20, 8] D"
    shape = "int64[3] flat = {0, 8, -1}"
    return graph(body, weights, shape, inputs="float[B, C, H, W] x", outputs="float[B, 9, 8] y")
