"""The scripts that print what All-attention's heads are worth: what they ask for, count and tell."""

from __future__ import annotations

import pytest

from benchmarks.all_attention import LEVELS, SIZES, pace


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "dense"), [("tiny", 0.05), ("small", 0.05), ("paper", 4_000 / 160_000)])
def test_warm_up_is_the_papers_and_a_twentieth_of_what_is_shorter(name: str, level: str, dense: float) -> None:
    size = SIZES[name][level]
    assert [pace(steps, size.precision)["warmup"] for steps in (size.steps, size.pruning)] == [dense, 0.05]
