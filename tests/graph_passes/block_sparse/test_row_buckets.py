"""Buckets contain the rows of a mask, and each block once."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes import BlockMask
from graph_passes.block_sparse.row_buckets import buckets, dense_heads, visible_blocks

KEPT = np.random.default_rng(0).random((3, 9, 9)) < 0.3
LOWER = np.tri(9, dtype=np.bool_)


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_hold_every_block_once(causal: bool) -> None:
    blocks = np.zeros_like(KEPT, dtype=np.int64)
    for bucket in buckets(BlockMask(KEPT, 64), 64, causal=causal):
        assert (np.diff(bucket.rows) >= 0).all()
        for head, row, columns in zip(bucket.heads, bucket.rows, bucket.columns, strict=True):
            blocks[head, row, columns[columns >= 0]] += 1
            assert columns[-1] == row or not bucket.diagonal
    np.testing.assert_array_equal(blocks, KEPT & LOWER if causal else KEPT)


@pytest.mark.parametrize("causal", [False, True])
def test_whole_heads_are_in_no_bucket(causal: bool) -> None:
    kept = KEPT.copy()
    kept[1] = LOWER if causal else True
    mask = BlockMask(kept, 8)
    assert dense_heads(mask, causal=causal).tolist() == [False, True, False]
    assert {head for bucket in buckets(mask, 64, causal=causal) for head in bucket.heads} == {0, 2}


def test_rows_without_a_block_are_computed_only_on_request() -> None:
    kept = KEPT.copy()
    kept[0, 4] = False
    for every_row in (False, True):
        rows = {
            (head, row)
            for bucket in buckets(BlockMask(kept, 8), 64, every=every_row)
            for head, row in zip(bucket.heads, bucket.rows, strict=True)
        }
        assert ((0, 4) in rows) == every_row


def test_causality_hides_future_blocks() -> None:
    mask = BlockMask(KEPT, 8)
    np.testing.assert_array_equal(visible_blocks(mask, causal=True), KEPT & LOWER)
    np.testing.assert_array_equal(visible_blocks(mask, causal=False), KEPT)


def test_rows_of_similar_widths_share_a_bucket() -> None:
    kept = np.zeros((1, 64, 64), np.bool_)
    kept[0, :32, :2] = True
    kept[0, 32:, :60] = True
    widths = [(bucket.width, len(bucket.rows)) for bucket in buckets(BlockMask(kept, 64), 64)]
    assert {width for width, _ in widths} == {2, 60}
    assert sum(rows for _, rows in widths) == 64
