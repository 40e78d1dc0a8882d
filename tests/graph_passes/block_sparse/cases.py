"""Properties of block-sparse attention, for the function's body and for kernels that replace it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import strategies as st

from graph_passes import BlockMask
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model
from graph_passes.block_sparse.spec import AttentionSpec

LOWEST = float(np.finfo(np.float32).min)
HEAD_DIM, VALUE_DIM, SCALE = 4, 6, 0.7


@dataclasses.dataclass
class Case:
    """A session of one function, and masked attention in NumPy to compare it with.

    Attributes:
        mask: the mask of the function.
        library: library of a kernel; None: the function's body runs.
        causal, row, full, persistent: see `block_sparse_attention`.
    """

    mask: BlockMask
    library: Path | None = None
    causal: bool = False
    row: bool = False
    full: int = 0
    persistent: int = 0

    def __post_init__(self) -> None:
        spec = AttentionSpec(self.mask, HEAD_DIM, VALUE_DIM, SCALE, self.causal, self.persistent, self.full)
        function = block_sparse_attention(spec, row=self.row, site="a.b")
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        if self.library is not None:
            options.register_custom_ops_library(str(self.library))
        proto = ir.to_proto(standalone_model(function))
        self.session = ort.InferenceSession(proto.SerializeToString(), options)

    def feeds(self, queries: int, keys: int, batch: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
        """Random inputs; some keys of `row` and some pairs of `full` are hidden."""
        rng, heads = np.random.default_rng(seed), len(self.mask.kept)
        keys += self.persistent
        padding = np.where(rng.random((batch, 1, 1, keys)) < 0.3, LOWEST, 0)
        pairs = (batch, max(self.full, 1), queries, keys)
        feeds = {
            "query": rng.normal(size=(batch, queries, heads, HEAD_DIM)),
            "key": rng.normal(size=(batch, keys, heads, HEAD_DIM)),
            "value": rng.normal(size=(batch, keys, heads, VALUE_DIM)),
            "row": padding,
            "full": np.where(rng.random(pairs) < 0.2, LOWEST, rng.normal(size=pairs)),
        }
        names = {value.name for value in self.session.get_inputs()}
        return {
            **{name: value.astype(np.float32) for name, value in feeds.items() if name in names},
            "block_mask": self.mask.kept,
        }

    def run(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """The output of the function."""
        return self.session.run(None, feeds)[0]

    def expected(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """The output of masked attention, in float64."""
        queries, keys = feeds["query"].shape[1], feeds["key"].shape[1] - self.persistent
        allowed = self.mask.entries(queries, keys, memory=keys - queries if self.mask.memory else 0)[None]
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


def check_masked_attention(library: Path | None, data: st.DataObject) -> None:
    """Any mask of any kind computes masked attention at any length that it covers."""
    draw = data.draw
    block, heads, rows = draw(st.sampled_from((8, 16, 64, 128))), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(("bidirectional", "causal", "cross", "memory", "persistent")))
    memory = draw(st.sampled_from((8, 16, 24))) if kind in ("memory", "persistent") else 0
    columns = draw(st.integers(1, 4)) if kind == "cross" else -(-(rows * block + memory) // block)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mask = BlockMask(rng.random((heads, rows, columns)) < draw(st.sampled_from((0.0, 0.2, 0.6, 1.0))), block, memory)
    mask.kept[: draw(st.integers(0, heads))] = True  # Heads that keep every block are computed densely.
    persistent = 3 if kind == "persistent" else 0
    full = draw(st.sampled_from((0, 1, heads)))
    case = Case(mask, library, causal=kind == "causal", row=draw(st.booleans()), full=full, persistent=persistent)
    for _ in range(2):
        queries = draw(st.integers(1, rows * block))
        keys = draw(st.integers(1, columns * block)) if kind == "cross" else queries + draw(st.integers(0, memory))
        feeds = case.feeds(queries, keys, batch=draw(st.integers(1, 2)))
        np.testing.assert_allclose(case.run(feeds), case.expected(feeds), atol=1e-5)


def check_rows_without_a_key(library: Path | None) -> None:
    """Queries that may attend to no key get zero."""
    kept = np.ones((1, 2, 2), np.bool_)
    kept[0, 1] = False
    case = Case(BlockMask(kept, 8), library, row=True)
    feeds = case.feeds(12, 12)
    feeds["row"][1] = LOWEST
    output = case.run(feeds)
    assert not output[0, 8:].any()
    assert output[0, :8].all()
    assert not output[1].any()


def check_causality(library: Path | None) -> None:
    """Later keys never reach earlier queries."""
    case = Case(BlockMask(np.ones((2, 4, 4), np.bool_), 8), library, causal=True, row=True)
    feeds = case.feeds(29, 29)
    before = case.run(feeds)
    for name in ("key", "value"):
        feeds[name][:, 13:] = 100.0
    after = case.run(feeds)
    np.testing.assert_array_equal(after[:, :13], before[:, :13])
    assert (after[:, 13:] != before[:, 13:]).any()


def check_longer_inputs_are_refused(library: Path | None) -> None:
    """The runtime refuses inputs that the mask does not cover."""
    case = Case(BlockMask(np.ones((1, 2, 2), np.bool_), 8), library)
    with pytest.raises(Exception, match=r"out of data bounds|covers fewer positions"):
        case.run(case.feeds(17, 17))


def check_whole_heads(library: Path | None, *, causal: bool) -> None:
    """A head that keeps every block next to heads that do not."""
    kept = np.random.default_rng(0).random((3, 9, 9)) < 0.3
    kept[1] = True
    case = Case(BlockMask(kept, 8), library, causal=causal, row=True)
    for length in (5, 70, 72):
        feeds = case.feeds(length, length)
        np.testing.assert_allclose(case.run(feeds), case.expected(feeds), atol=1e-5)
