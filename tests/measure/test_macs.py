"""Multiply-accumulates of operators, of attention in all its forms, and of a model."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from compressor.measure import macs
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH
from graph_passes import BlockMask, load
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model
from graph_passes.block_sparse.spec import AttentionSpec
from tests.targets.graphs import parsed, pruned

COUNTED = [
    ("y = MatMul(x, w)", "float[B, S, 3] x", "float[3, 5] w", 2 * 7 * 3 * 5),
    ("y = MatMul(x, z)", "float[B, 4, S, 3] x, float[B, 4, 3, S] z", "", 2 * 4 * 7 * 7 * 3),
    ("y = Gemm <transA = 1, transB = 1> (x, w)", "float[3, S] x", "float[5, 3] w", 7 * 3 * 5),
    ("y = Conv <group = 2> (x, w)", "float[B, 4, S] x", "float[6, 2, 3] w", 2 * 6 * 5 * 2 * 3),
    ('y = Einsum <equation = "bik, bjk -> bij"> (x, z)', "float[B, S, 3] x, float[B, S, 3] z", "", 2 * 7 * 7 * 3),
    ('y = Einsum <equation = "bij -> bji"> (x)', "float[B, S, 3] x", "", 0),
    ("y = Add(x, w)", "float[B, S, 3] x", "float[3] w", 0),
    ("i = MatMulInteger(x, w)  y = Cast <to = 1> (i)", "uint8[B, S, 3] x, int8[3, 5] w", "", 2 * 7 * 3 * 5),
    ("i = ConvInteger(x, w)  y = Cast <to = 1> (i)", "uint8[B, 4, S] x, int8[6, 4, 3] w", "", None),
    (
        "y = com.microsoft.FusedMatMul <transB = 1> (x, z)",
        "float[B, S, 3] x, float[B, S, 3] z",
        "",
        2 * 7 * 7 * 3,
    ),
    (
        "y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, z, v)",
        "float[B, S, 8] x, float[B, 5, 8] z, float[B, 5, 6] v",
        "",
        2 * 7 * 5 * (8 + 6),
    ),
    (
        "y = com.microsoft.Attention <num_heads = 2> (x, w, b)",
        "float[B, S, 8] x",
        "float[8, 12] w, float[12] b",
        2 * 7 * 8 * 12 + 2 * 2 * 7 * 7 * 4,
    ),
    (
        "y = com.microsoft.Attention <num_heads = 2, qkv_hidden_sizes = [4, 4, 6]> (x, w, b)",
        "float[B, S, 8] x",
        "float[8, 14] w, float[14] b",
        2 * 7 * 8 * 14 + 2 * 7 * 7 * (4 + 6),
    ),
    (
        "y = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (x, k, v, , , l, t)",
        "float[B, S, 8] x, float[B, S, 4] k, float[B, S, 4] v, int32[B] l, int32 t",
        "",
        2 * 7 * 7 * (8 + 8),
    ),
]


@pytest.mark.parametrize(("body", "inputs", "weights", "count"), COUNTED)
def test_macs_of_operators(body: str, inputs: str, weights: str, count: int | None) -> None:
    model = parsed(body, inputs, "float y", weights)
    before = [str(value.shape) for value in model.graph.inputs]
    assert macs(model, 2, 7) == count
    assert [str(value.shape) for value in model.graph.inputs] == before, "the graph stays unchanged"


def test_macs_of_attention_of_the_onnx_standard() -> None:
    model = parsed(
        "y = Attention(q, k, v)", "float[B, 4, S, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 6] v", "float y", opset=23
    )
    assert macs(model, 2, 7) == 2 * 4 * 7 * 7 * (8 + 6)


def test_a_causal_head_that_keeps_every_block_is_computed_as_dense() -> None:
    kept = np.stack([np.ones((2, 2), np.bool_), np.eye(2, dtype=np.bool_)])
    model = standalone_model(block_sparse_attention(AttentionSpec(BlockMask(kept, 8), 4, 6, 1.0, causal=True)))
    *tensors, mask = model.graph.inputs
    for value, width in zip(tensors, (4, 4, 6), strict=True):
        value.shape = ir.Shape([1, "S", 2, width])
    mask.const_value = ir.tensor(kept)
    assert macs(model, 1, 16) == (16 * 16 + 2 * 8 * 8) * (4 + 6)


@pytest.mark.parametrize(("longest", "positions", "memory"), [("3", "99", 3), ("64", "9", 2), (None, None, 7)])
def test_memories_have_the_length_that_is_timed(longest: str | None, positions: str | None, memory: int) -> None:
    """Without metadata, a memory is as long as the text; caches are empty."""
    model = parsed(
        "a = Concat <axis = 1> (memory_0, x)  y = MatMul(a, w)  z = MatMul(cache, w)",
        "float[batch, memory, 8] memory_0, float[batch, sequence, 8] x, float[batch, past_length, 8] cache",
        "float y, float z",
        "float[8, 4] w",
    )
    if longest is not None and positions is not None:
        model.metadata_props.update({MEMORY_LENGTH: longest, MAX_POSITIONS: positions})
    assert macs(model, 2, 7) == 2 * (memory + 7) * 8 * 4


def test_unknown_shapes_give_no_count() -> None:
    model = parsed(
        "n = NonZero(x)  c = Cast <to = 1> (n)  t = Transpose(c)  y = MatMul(c, t)", "float[B, S] x", "float y"
    )
    assert macs(model, 2, 7) is None


def test_macs_of_a_model_follow_the_formula() -> None:
    """BERT: projections and attention of the kept heads, the kept neurons, pooler and classifier."""
    bert = pruned("bert")
    config = bert.model.config
    hidden, width = config.hidden_size, config.hidden_size // 4
    batch, seq = 3, 11

    def formula(heads: list[int], neurons: list[int]) -> int:
        rows = batch * seq
        attentions = sum(rows * 4 * hidden * width * kept + 2 * rows * seq * width * kept for kept in heads)
        feed_forwards = sum(rows * 2 * hidden * kept for kept in neurons)
        return attentions + feed_forwards + batch * hidden * (hidden + config.num_labels)

    heads = [len(site.kept) for site in bert.plan.sites]
    neurons = [len(group.kept) for group in bert.plan.feed_forwards]
    assert macs(load(bert.shrunk), batch, seq) == formula(heads, neurons)
    # The gates of the reference graph multiply without a sum: they do not count.
    every = [site.heads for site in bert.plan.sites], [config.intermediate_size] * len(neurons)
    assert macs(load(bert.reference), batch, seq) == formula(*every)
