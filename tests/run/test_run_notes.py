"""What a run tells beside its numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.config.run import Recipe
from compressor.run import run_notes
from graph_passes import BlockMask, Plan, SitePlan


def recipe(**more: object) -> Recipe:
    return Recipe.model_validate({"model": Path("model"), "out": Path("out"), **more})


@pytest.mark.parametrize(
    ("learns", "asked", "said"),
    [
        (
            True,
            {"block_size": 32, "kernel": "k.so"},
            "no blocks are to go (--blocks, --prune): --block-size and --kernel",
        ),
        (True, {"block_size": 32, "blocks": 0.5, "data": "rows.tsv"}, ""),
        (False, {"everywhere": True, "entmax": True}, "no masks are learned: --everywhere and --entmax"),
        (False, {"kernel": "k.so"}, ""),  # a plan may bring masks
    ],
)
def test_what_had_no_effect(learns: bool, asked: dict[str, object], said: str) -> None:
    found = list(run_notes.unused(recipe(**asked), None, learns=learns))
    assert found == ([f"{said} had no effect"] if said else [])


@pytest.mark.parametrize(
    ("lengths", "longest", "said"),
    [
        ((16, None), None, ""),
        ((8, 16, 12), None, "the masks are of rows of up to 16 tokens; at 8, 12 their beginning counts"),
        ((8, 12), 12, "the masks are of rows of up to 12 tokens; at 8 their beginning counts"),
        ((24,), 40, ""),
    ],
)
def test_lengths_that_masks_are_not_of(lengths: tuple[int | None, ...], longest: int | None, said: str) -> None:
    whole = Plan(sites=(SitePlan("a", "bidirectional", 2, 2, 4, (0, 1)),))
    masked = whole.masked({"a": BlockMask(np.ones((2, 2, 2), np.bool_), 8)})
    assert list(run_notes.aligned(masked, lengths, longest)) == ([said] if said else [])
    assert not list(run_notes.aligned(whole, lengths, longest))
