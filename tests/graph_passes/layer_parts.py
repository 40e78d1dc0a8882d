"""Parts of the attention layers of the tests: their description, projections and attention as ONNX text."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from tests.graph_passes.graphs import graph


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as ONNX text.

    Attributes:
        body: nodes that compute the queries, keys and values, and the attention with its gate.
        weights: declarations of the weights that they read.
        weights_a_head: elements of the weights that belong to one query head.
        kv_heads: number of key/value heads.
        weights_a_kv_head: elements of the weights that belong to one key/value head.
    """

    body: str
    weights: str
    weights_a_head: int
    kv_heads: int = 4
    weights_a_kv_head: int = 0
    head_dim: int = 3
    opset: int = 18

    def graph(self) -> ir.Model:
        return graph(self.body, self.weights, opset=self.opset)

    def weights_of(self, kept: list[int]) -> int:
        """Elements of the weights of the heads that are kept."""
        groups = {head * self.kv_heads // 4 for head in kept}
        return len(kept) * self.weights_a_head + len(groups) * self.weights_a_kv_head


CORE = """
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    scores = MatMul (q, kt)
    p = Softmax <axis = -1> (scores)
    heads = MatMul (p, v)
    gated = Mul (heads, "a.head_gate")
    back = Transpose <perm = [0, 2, 1, 3]> (gated)
    merged = Reshape (back, merge)
    y = MatMul (merged, Wo)
"""
OUTPUT = 'float[4, 1, 1] "a.head_gate", float[12, 8] Wo, int64[3] merge = {0, 0, 12}'
SPLIT = "int64[4] split = {0, 0, 4, 3}"

PROJECT = """
    q0 = MatMul (x, Wq)
    q1 = Add (q0, bq)
    k1 = MatMul (x, Wk)
    v0 = MatMul (x, Wv)
    v1 = Add (v0, bv)
"""
PROJECTIONS = "float[8, 12] Wq, float[12] bq, float[8, 12] Wk, float[8, 12] Wv, float[12] bv"
TO_HEADS = """
    q2 = Reshape (q1, split)
    q = Transpose <perm = [0, 2, 1, 3]> (q2)
    k2 = Reshape (k1, split)
    k = Transpose <perm = [0, 2, 1, 3]> (k2)
    v2 = Reshape (v1, split)
    v = Transpose <perm = [0, 2, 1, 3]> (v2)
"""
