"""A fused attention with a bias of its scores becomes a product and an attention; others stay."""

from __future__ import annotations

import pytest

from graph_passes.passes import SeparateProjections
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten

INPUTS = "float[B, S, 8] x, float[B, 1, S, S] mask"
ROWS = "float[B, S, 8] y"
WEIGHTS = "float[8, 24] w, float[24] b"
ATTENTION = "com.microsoft.Attention"


@pytest.mark.parametrize(
    "attributes", ["num_heads = 2", "num_heads = 4, scale = 0.7", "num_heads = 2, unidirectional = 1"]
)
def test_an_attention_with_a_mask_is_separated(attributes: str) -> None:
    result = rewritten(
        SeparateProjections(),
        graph(f"y = {ATTENTION} <{attributes}> (x, w, b, , , mask)", WEIGHTS, inputs=INPUTS, outputs=ROWS),
    )
    assert operators(result.model) == ["Constant", "MatMul", "Split", "MultiHeadAttention"]
    assert len(result.report) == 1


def test_sizes_that_are_stated_are_kept() -> None:
    body = f"y = {ATTENTION} <num_heads = 2, qkv_hidden_sizes = [8, 8, 4]> (x, w, b, , , mask)"
    weights = "float[8, 20] w, float[20] b"
    rewritten(SeparateProjections(), graph(body, weights, inputs=INPUTS, outputs="float[B, S, 4] y"))


@pytest.mark.parametrize(
    ("body", "inputs", "outputs"),
    [
        (f"y = {ATTENTION} <num_heads = 2> (x, w, b)", "float[B, S, 8] x", ROWS),
        (f"y = {ATTENTION} <num_heads = 2> (x, w, b, lengths, , mask)", f"{INPUTS}, int32[B] lengths", ROWS),
        (
            f"y, cache = {ATTENTION} <num_heads = 2> (x, w, b, , , mask)",
            INPUTS,
            f"{ROWS}, float[2, B, 2, S, 4] cache",
        ),
    ],
    ids=["no mask", "lengths", "cache"],
)
def test_others_stay(body: str, inputs: str, outputs: str) -> None:
    assert_untouched(SeparateProjections(), graph(body, WEIGHTS, inputs=inputs, outputs=outputs))
