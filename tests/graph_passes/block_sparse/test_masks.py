"""Block masks by positions."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes import BlockMask

KEPT = np.random.default_rng(0).random((2, 3, 4)) < 0.5


def test_entries_repeat_blocks() -> None:
    mask = BlockMask(KEPT, 8, memory=8)
    whole = mask.entries(24, 32, memory=8)
    np.testing.assert_array_equal(whole, KEPT.repeat(8, 1).repeat(8, 2))
    np.testing.assert_array_equal(mask.entries(5, 9, past=3, memory=2), whole[:, 3:8, 6:15])


def test_a_mask_covers_its_positions() -> None:
    mask = BlockMask(KEPT, 8, memory=8)
    assert (mask.queries, mask.keys) == (24, 24)
    assert mask.density == KEPT.mean()


def test_masks_are_equal_by_content() -> None:
    assert BlockMask(KEPT, 8) == BlockMask(KEPT.copy(), 8)
    assert BlockMask(KEPT, 8) != BlockMask(~KEPT, 8)
    assert BlockMask(KEPT, 8) != BlockMask(KEPT, 16)
    assert BlockMask(KEPT, 8) != BlockMask(KEPT, 8, memory=8)
    assert BlockMask(KEPT, 8) != KEPT.tolist()


@pytest.mark.parametrize(
    ("kept", "block", "memory"),
    [(KEPT.astype(np.int64), 8, 0), (KEPT[0], 8, 0), (KEPT[:, :0], 8, 0), (KEPT, 12, 0), (KEPT, 0, 0), (KEPT, 8, -1)],
)
def test_an_impossible_mask_is_refused(kept: np.ndarray, block: int, memory: int) -> None:
    with pytest.raises(ValueError, match="; give "):
        BlockMask(kept, block, memory)


@pytest.mark.parametrize(
    "sizes",
    [(25, 32, 0, 8), (24, 33, 0, 8), (24, 25, 0, 0), (2, 6, 0, 9), (2, 6, -1, 0), (24, 24, 1, 0)],
    ids=str,
)
def test_positions_outside_the_mask_are_refused(sizes: tuple[int, int, int, int]) -> None:
    queries, keys, past, memory = sizes
    with pytest.raises(ValueError, match="covers"):
        BlockMask(KEPT, 8, memory=8).entries(queries, keys, past=past, memory=memory)
