"""Attention, normalization and activation become operators of ONNX Runtime; block-sparse attention stays."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes import BlockMask
from graph_passes.block_sparse.function import block_sparse_attention, call
from graph_passes.block_sparse.spec import AttentionSpec
from graph_passes.passes import FuseForOrt
from tests.graph_passes.graphs import SIZES, assert_same, draw, error, graph, operators, run

GELU = """
    root = Div(h, two_root)  e = Erf(root)  o = Add(e, one)  m = Mul(h, o)  g = Mul(m, half)
"""
BODY = f"h = MatMul(x, W) {GELU} p = MatMul(g, Wo)  r = Add(p, x)  y = LayerNormalization <axis = -1> (r, scale, bias)"
WEIGHTS = [
    "float[8, 12] W, float[12, 8] Wo, float[8] scale, float[8] bias",
    "float two_root = {1.4142135381698608}, float one = {1.0}, float half = {0.5}",
]


def test_patterns_become_fused_operators() -> None:
    model = graph(BODY, *WEIGHTS)
    result = FuseForOrt()(model.clone())
    assert result.modified
    assert operators(result.model) == ["MatMul", "Gelu", "MatMul", "SkipLayerNormalization"]
    assert result.report == {"gelu": 1, "skip_layer_normalization": 1}
    assert_same(result.model, model)
    again = FuseForOrt()(result.model.clone())
    assert operators(again.model) == operators(result.model)
    assert_same(again.model, model)


def test_a_graph_without_patterns_computes_the_same() -> None:
    model = graph("y = Relu(x)")
    result = FuseForOrt()(model.clone())
    assert not result.report
    assert operators(result.model) == ["Relu"]
    assert_same(result.model, model, tolerance=0)


def test_block_sparse_attention_keeps_its_body() -> None:
    mask = BlockMask(np.ones((2, 1, 1), np.bool_), 8)
    function = block_sparse_attention(AttentionSpec(mask, 4, 4, 0.5))
    model = graph(
        "heads = Reshape(x, split)  a = Relu(heads)  y = Identity(a)",
        "int64[4] split = {0, 0, 2, 4}",
        outputs="float[B, S, 2, 4] y",
    )
    kept = ir.Value(name="kept", const_value=ir.tensor(mask.kept, name="kept"))
    model.graph.register_initializer(kept)
    heads = model.graph[0].outputs[0]
    node = call(function, [heads, heads, heads, kept])
    model.graph.insert_after(model.graph[0], node)
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["B", "S", 2, 4])
    model.graph[2].replace_input_with(0, node.outputs[0])
    model.functions[function.identifier()] = function
    model.graph.opset_imports[function.domain] = 1
    feeds = draw(model, SIZES[0])
    expected = run(model, feeds)
    fused = FuseForOrt()(model.clone()).model
    assert "BlockSparseAttention" in operators(fused)
    assert {inner.domain for inner in fused.functions[function.identifier()]} == {""}
    assert error(run(fused, feeds), expected) <= 1e-5
