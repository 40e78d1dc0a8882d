"""The function and the kernel equal attention over the entries of a mask, at every length up to the mask's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes import BlockMask
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model
from graph_passes.block_sparse.row_buckets import buckets
from tests.kernels import compiled

LOWEST = float(np.finfo(np.float32).min)
DIMS = (4, 6)
SCALE = 0.7


@pytest.fixture(params=["function", "kernel"], scope="module")
def library(request: pytest.FixtureRequest) -> Path | None:
    """Nothing, so that the function's body runs, or the compiled kernel."""
    return compiled() if request.param == "kernel" else None


class Case:
    """One function in a session of its own, and what it should compute."""

    def __init__(
        self,
        mask: BlockMask,
        library: Path | None = None,
        *,
        causal: bool = False,
        row: bool = False,
        full: int = 0,
        persistent: int = 0,
    ):
        self.mask, self.causal, self.row, self.full, self.persistent = mask, causal, row, full, persistent
        function = block_sparse_attention(
            mask, *DIMS, scale=SCALE, causal=causal, row=row, full=full, persistent=persistent, site="a.b"
        )
        proto = ir.to_proto(standalone_model(function))
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        if library is not None:
            options.register_custom_ops_library(str(library))
        self.session = ort.InferenceSession(proto.SerializeToString(), options)

    def feeds(self, queries: int, keys: int, batch: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
        rng, heads = np.random.default_rng(seed), len(self.mask.kept)
        keys += self.persistent
        padding = np.where(rng.random((batch, 1, 1, keys)) < 0.3, LOWEST, 0)
        pairs = (batch, max(self.full, 1), queries, keys)
        feeds = {
            "query": rng.normal(size=(batch, queries, heads, DIMS[0])),
            "key": rng.normal(size=(batch, keys, heads, DIMS[0])),
            "value": rng.normal(size=(batch, keys, heads, DIMS[1])),
            "row": padding,
            "full": np.where(rng.random(pairs) < 0.2, LOWEST, rng.normal(size=pairs)),
        }
        names = {value.name for value in self.session.get_inputs()}
        return {
            **{name: value.astype(np.float32) for name, value in feeds.items() if name in names},
            "block_mask": self.mask.kept,
        }

    def run(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        return self.session.run(None, feeds)[0]

    def expected(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        queries, keys = feeds["query"].shape[1], feeds["key"].shape[1]
        own = keys - self.persistent
        allowed = self.mask.entries(queries, own, memory=own - queries if self.mask.memory else 0)[None]
        allowed = np.pad(allowed, ((0, 0), (0, 0), (0, 0), (0, self.persistent)), constant_values=True)
        scores = np.einsum("bqhd,bkhd->bhqk", feeds["query"], feeds["key"]).astype(np.float64) * SCALE
        if self.causal:
            allowed = allowed & np.tri(queries, dtype=np.bool_)
        for name in ("row", "full"):
            if name in feeds:
                allowed = allowed & (feeds[name] > LOWEST / 2)
                scores = scores + np.where(feeds[name] > LOWEST / 2, feeds[name], 0)
        scores = np.where(allowed, scores, -np.inf)
        weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
        return np.einsum("bhqk,bkhd->bqhd", weights, feeds["value"])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_equals_masked_attention(library: Path | None, data: st.DataObject) -> None:
    draw = data.draw
    block, heads, rows = draw(st.sampled_from((8, 16, 64, 128))), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(("bidirectional", "causal", "cross", "memory", "persistent")))
    memory = draw(st.sampled_from((8, 16, 24))) if kind in ("memory", "persistent") else 0
    columns = draw(st.integers(1, 4)) if kind == "cross" else -(-(rows * block + memory) // block)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mask = BlockMask(rng.random((heads, rows, columns)) < draw(st.sampled_from((0.0, 0.2, 0.6, 1.0))), block, memory)
    mask.kept[: draw(st.integers(0, heads))] = True  # heads that stay dense
    persistent = 3 if kind == "persistent" else 0
    full = draw(st.sampled_from((0, 1, heads)))
    case = Case(mask, library, causal=kind == "causal", row=draw(st.booleans()), full=full, persistent=persistent)
    for _ in range(2):
        queries = draw(st.integers(1, rows * block))
        keys = draw(st.integers(1, columns * block)) if kind == "cross" else queries + draw(st.integers(0, memory))
        feeds = case.feeds(queries, keys, batch=draw(st.integers(1, 2)))
        np.testing.assert_allclose(case.run(feeds), case.expected(feeds), atol=1e-5)


def test_rows_without_a_key_are_zero(library: Path | None) -> None:
    kept = np.ones((1, 2, 2), np.bool_)
    kept[0, 1] = False
    case = Case(BlockMask(kept, 8), library, row=True)
    feeds = case.feeds(12, 12)
    feeds["row"][1] = LOWEST
    output = case.run(feeds)
    assert not output[0, 8:].any()
    assert output[0, :8].all()
    assert not output[1].any()


def test_later_keys_never_reach_earlier_queries(library: Path | None) -> None:
    case = Case(BlockMask(np.ones((2, 4, 4), np.bool_), 8), library, causal=True, row=True)
    feeds = case.feeds(29, 29)
    before = case.run(feeds)
    for name in ("key", "value"):
        feeds[name][:, 13:] = 100.0
    after = case.run(feeds)
    np.testing.assert_array_equal(after[:, :13], before[:, :13])
    assert (after[:, 13:] != before[:, 13:]).any()


def test_longer_than_the_mask_is_refused(library: Path | None) -> None:
    case = Case(BlockMask(np.ones((1, 2, 2), np.bool_), 8), library)
    with pytest.raises(Exception, match=r"out of data bounds|does not reach"):
        case.run(case.feeds(17, 17))


def test_causality_over_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="give the mask in full"):
        Case(BlockMask(np.ones((1, 2, 3), np.bool_), 8, 8), causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_a_head_that_keeps_every_block_stays_dense(library: Path | None, causal: bool) -> None:
    kept = np.random.default_rng(0).random((3, 9, 9)) < 0.3
    kept[1] = True
    mask = BlockMask(kept, 8)
    assert {head for bucket in buckets(mask, 64, causal=causal) for head in bucket.heads} == {0, 2}
    case = Case(mask, library, causal=causal, row=True)
    for length in (5, 70, 72):
        feeds = case.feeds(length, length)
        np.testing.assert_allclose(case.run(feeds), case.expected(feeds), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_hold_every_block_once(causal: bool) -> None:
    kept = np.random.default_rng(0).random((3, 9, 9)) < 0.3
    mask = BlockMask(kept, 64)
    found = np.zeros_like(kept, dtype=np.int64)
    for bucket in buckets(mask, 64, causal=causal):
        assert (np.diff(bucket.rows) >= 0).all()
        for head, row, columns in zip(bucket.heads, bucket.rows, bucket.columns, strict=True):
            found[head, row, columns[columns >= 0]] += 1
            assert columns[-1] == row or not bucket.diagonal
    np.testing.assert_array_equal(found, kept & np.tri(9, dtype=np.bool_) if causal else kept)
