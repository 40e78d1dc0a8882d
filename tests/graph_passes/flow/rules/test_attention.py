"""Operators that compute a whole attention lose heads in their inputs, their packed weights and their attributes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import Plan, find_attention, shrink
from graph_passes.attention.gate_initializers import find_gates
from graph_passes.flow.refusal import RefusalCode
from tests.graph_passes.fused_layers import FUSED
from tests.graph_passes.graphs import (
    assert_same,
    content,
    gated,
    graph,
    operators,
    plan,
    shape,
    shrink_and_compare,
    site,
)
from tests.graph_passes.layer_parts import PROJECT, PROJECTIONS
from tests.quick_cases import quick

KEPT = [[0, 3], [1], [0, 1, 2], [0, 1, 2, 3]]


def plan_of(name: str, kept: list[int]) -> Plan:
    """A plan of a fused layer, with a different scale for each kept head."""
    layer = FUSED[name]
    scale = [0.5 + head for head in kept]
    return plan(site(kept, kv_heads=layer.kv_heads, head_dim=layer.head_dim, scale=scale))


@pytest.mark.parametrize("name", FUSED)
def test_the_operator_states_its_heads(name: str) -> None:
    layer = FUSED[name]
    (attention,) = find_attention(layer.graph())
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (4, layer.kv_heads, layer.head_dim)


@pytest.mark.parametrize("kept", quick(KEPT, [[0, 1, 2]]), ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_an_operator_loses_exactly_the_weights_of_its_dropped_heads(name: str, kept: list[int]) -> None:
    layer = FUSED[name]
    shrunk = shrink_and_compare(layer.graph(), plan_of(name, kept))
    assert shrunk.refused == ()
    assert not find_gates(shrunk.model.graph)
    before, after = shrunk.parameters
    assert before - after == layer.weights_of([0, 1, 2, 3]) - layer.weights_of(kept)


@pytest.mark.parametrize("name", quick(FUSED, ("Attention 4D", "com.microsoft.Attention", "MultiHeadAttention")))
def test_an_operator_without_heads_is_removed(name: str) -> None:
    shrunk = shrink_and_compare(FUSED[name].graph(), plan_of(name, []))
    assert shrunk.refused == ()
    assert shrunk.parameters[1] == 0
    assert "Attention" not in " ".join(operators(shrunk.model))


def test_attributes_state_the_remaining_heads() -> None:
    shrunk = shrink(FUSED["com.microsoft.Attention, values wider"].graph(), plan([0, 2, 3]))
    (node,) = [node for node in shrunk.model.graph if node.op_type == "Attention"]
    assert node.attributes["num_heads"].as_int() == 3
    assert node.attributes["qkv_hidden_sizes"].as_ints() == (6, 6, 9)


def test_key_heads_are_repeated_if_query_heads_share_them_unevenly() -> None:
    # Query heads 0 and 1 share key head 0, head 2 uses key head 1: each gets its own copy, at run time and not in the
    # file.
    shrunk = shrink(FUSED["Attention 3D, grouped"].graph(), plan(site([0, 1, 2], kv_heads=2)))
    (node,) = [node for node in shrunk.model.graph if node.op_type == "Attention"]
    assert node.attributes["q_num_heads"].as_int() == node.attributes["kv_num_heads"].as_int() == 3
    assert shape(shrunk.model, "Wk") == (8, 6)


def test_packed_query_key_value_is_cut_by_head() -> None:
    # ONNX Runtime runs this layout only on a GPU, so the weights are checked instead of the numbers.
    model = graph(
        """
        qkv = MatMul (x, Wqkv)
        packed = Reshape (qkv, five)
        heads = com.microsoft.MultiHeadAttention <num_heads = 4> (packed)
        y = MatMul (heads, Wo)
        """,
        "float[8, 36] Wqkv, int64[5] five = {0, 0, 4, 3, 3}, float[12, 8] Wo",
    )
    before = content(model, "Wqkv").copy()
    shrunk = shrink(model, plan(site([1, 3])))
    assert shrunk.refused == ()
    np.testing.assert_array_equal(content(shrunk.model, "Wqkv"), np.delete(before, [*range(9), *range(18, 27)], axis=1))


PAST = PROJECT + (
    "heads, ck, cv = com.microsoft.MultiHeadAttention <num_heads = 4> (q1, k1, v1, , , , pk, pv) y = MatMul (heads, Wo)"
)
CACHE = "float[B, S, 8] x, float[B, 4, P, 3] pk, float[B, 4, P, 3] pv"


@pytest.mark.parametrize(
    ("outputs", "op", "code"),
    [
        ("float[B, S, 8] y", "graph input", RefusalCode.GRAPH_INPUT),
        (
            "float[B, S, 8] y, float[B, 4, N, 3] ck, float[B, 4, N, 3] cv",
            "MultiHeadAttention",
            RefusalCode.UNKNOWN_SHAPE,
        ),
    ],
)
def test_a_key_value_cache_that_the_caller_holds_is_refused(outputs: str, op: str, code: RefusalCode) -> None:
    model = graph(PAST, f"{PROJECTIONS}, float[12, 8] Wo", inputs=CACHE, outputs=outputs)
    shrunk = shrink_and_compare(model, plan([0, 2]))
    assert {(refusal.op, refusal.code) for refusal in shrunk.refused} == {(op, code)}
    assert shrunk.removed == ()
    assert shape(shrunk.model, "Wq") == (8, 12)


def test_rotary_embedding_of_the_runtime_rotates_heads_independently() -> None:
    model = graph(
        """
        s = Shape (x)
        length = Gather (s, i1)
        row = Range (i0, length, i1)
        grid = Unsqueeze (row, at0)
        batch = Slice (s, at0, at1)
        rows = Concat <axis = 0> (batch, at1)
        places = Expand (grid, rows)
        q0 = MatMul (x, Wq)
        q = com.microsoft.RotaryEmbedding <num_heads = 4> (q0, places, cos, sin)
        k0 = MatMul (x, Wk)
        k = com.microsoft.RotaryEmbedding <num_heads = 4> (k0, places, cos, sin)
        v = MatMul (x, Wv)
        heads = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v)
        y = MatMul (heads, Wo)
        """,
        "float[8, 32] Wq, float[8, 32] Wk, float[8, 32] Wv, float[32, 8] Wo, float[9, 4] cos, float[9, 4] sin, "
        "int64 i0 = {0}, int64 i1 = {1}, int64[1] at0 = {0}, int64[1] at1 = {1}",
    )
    shrunk = shrink_and_compare(model, plan(site([1, 2], head_dim=8, scale=[0.5, 2])))
    assert shrunk.refused == ()
    assert shape(shrunk.model, "Wq") == shape(shrunk.model, "Wk") == (8, 16)


def test_rotary_embedding_of_the_standard_rotates_heads_independently() -> None:
    model = graph(
        """
        s = Shape (x)
        length = Gather (s, i1)
        row = Range (i0, length, i1)
        grid = Unsqueeze (row, at0)
        batch = Slice (s, at0, at1)
        rows = Concat <axis = 0> (batch, at1)
        places = Expand (grid, rows)
        q0 = MatMul (x, Wq)
        q = RotaryEmbedding <num_heads = 4> (q0, cos, sin, places)
        k = MatMul (x, Wk)
        v = MatMul (x, Wv)
        heads = Attention <q_num_heads = 4, kv_num_heads = 4> (q, k, v)
        y = MatMul (heads, Wo)
        """,
        "float[8, 32] Wq, float[8, 32] Wk, float[8, 32] Wv, float[32, 8] Wo, float[9, 4] cos, float[9, 4] sin, "
        "int64 i0 = {0}, int64 i1 = {1}, int64[1] at0 = {0}, int64[1] at1 = {1}",
        opset=23,
    )
    shrunk = shrink_and_compare(model, plan(site([1, 2], head_dim=8, scale=[0.5, 2])))
    assert shrunk.refused == ()
    assert shape(shrunk.model, "Wq") == (8, 16)


def test_a_gated_graph_keeps_every_weight() -> None:
    model = FUSED["MultiHeadAttention"].graph()
    copy = gated(model, plan([0, 2]))
    assert isinstance(copy, ir.Model)
    assert shape(copy, "Wq") == (8, 12)
    assert_same(copy, copy)
