"""A fused attention reads the padding mask where its bias is computed from that alone; others stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.passes import UsePaddingMask
from tests.graph_passes.graphs import graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched, rewritten

INPUTS = "float[B, S, 8] x, int64[B, S] attention_mask"
WEIGHTS = "float[8, 24] w, float[24] b, float zero = {0}, float lowest = {-3.4028234663852886e38}"
ATTENTION = "com.microsoft.Attention <num_heads = 2>"
PADDING = """
    kept = Cast <to = 9> (attention_mask)
    rows = Constant <value = int64[2] {1, 2}> ()
    keys = Unsqueeze(kept, rows)
    one = Constant <value = int64[1] {1}> ()
    length = Shape <start = 1, end = 2> (x)
    batch = Shape <start = 0, end = 1> (x)
    pairs = Concat <axis = 0> (batch, one, length, length)
    allowed = Expand(keys, pairs)
    bias = Where(allowed, zero, lowest)
"""
TRIANGLE = """
    row = Constant <value = int64[1] {0}> ()
    column = Constant <value = int64[1] {1}> ()
    n = Squeeze(length, row)
    start = Constant <value = int64 {0}> ()
    step = Constant <value = int64 {1}> ()
    positions = Range(start, n, step)
    queries = Unsqueeze(positions, column)
    before = Unsqueeze(positions, row)
    distance = Sub(queries, before)
"""


def masked(body: str, *, inputs: str = INPUTS) -> ir.Model:
    return graph(body, WEIGHTS, inputs=inputs)


def test_padding_is_read_from_the_input() -> None:
    model = masked(f"{PADDING} h = {ATTENTION} (x, w, b, , , bias) y = {ATTENTION} (h, w, b, , , bias)")
    result = rewritten(UsePaddingMask(), model)
    assert operators(result.model) == ["Cast", "Attention", "Attention"]
    assert len(result.report) == 2


def test_rows_without_any_key_are_computed_as_before() -> None:
    model = masked(f"{PADDING} y = {ATTENTION} (x, w, b, , , bias)")
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0]])
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32), "attention_mask": mask}
    (expected,) = run(model, feeds)
    (actual,) = run(UsePaddingMask()(model).model, feeds)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        f"{PADDING} {TRIANGLE} past = GreaterOrEqual(distance, start) both = And(allowed, past)"
        f" causal = Where(both, zero, lowest) y = {ATTENTION} (x, w, b, , , causal)",
        f"{PADDING} {TRIANGLE} reach = Constant <value = int64 {{100}}> () near = Less(distance, reach)"
        f" both = And(allowed, near) window = Where(both, zero, lowest) y = {ATTENTION} (x, w, b, , , window)",
        f"{PADDING} scale = Constant <value = float {{0.5}}> () weak = Mul(bias, scale) extra = Add(weak, bias)"
        f" soft = Exp(extra) y = {ATTENTION} (x, w, b, , , soft)",
        f"y = {ATTENTION} (x, w, b)",
    ],
    ids=["causal", "sliding window", "other numbers", "no mask"],
)
def test_other_masks_stay(body: str) -> None:
    assert_untouched(UsePaddingMask(), masked(body))
