"""Engines are built for every size that a run proves, times and scores."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compressor.config.run import Recipe
from compressor.engines.build import spans_of
from compressor.run.stages import build_options

LENGTHS = (128, 384)
PROVEN = [{"input_ids": np.zeros((3, 5)), "memory_0": np.zeros((3, 7, 4))}]


@pytest.fixture
def recipe() -> Recipe:
    return Recipe(model="model", batch=(8, 1, 32), seq=LENGTHS, workspace=64, target="trt")


def rows(
    length: list[int], beams: int = 1, max_new_tokens: int = 0, evaluated: Sequence[int] = (), windows: int = 1
) -> Any:
    """Test and evaluation rows of these lengths, of a task that generates."""
    task = SimpleNamespace(
        beams=beams, max_new_tokens=max_new_tokens, size_limits=lambda rows: (windows, max(rows["length"], default=1))
    )
    return SimpleNamespace(test={"length": length}, eval={"length": evaluated}, task=task)


def test_sizes_that_are_timed_are_the_usual_ones(recipe: Recipe) -> None:
    options = build_options(recipe, LENGTHS, PROVEN)
    assert (options.batch, options.seq, options.memory) == ((1, 8, 32), (1, 384, 384), (0, 7, 7))
    assert options.workspace == 64 << 20


def test_rows_that_are_scored_fit(recipe: Recipe) -> None:
    options = build_options(recipe, LENGTHS, PROVEN, rows([400, 9]))
    assert (options.batch, options.seq) == ((1, 8, 32), (1, 384, 400))
    assert build_options(recipe, LENGTHS, PROVEN, rows([400, 9], evaluated=[410])).seq == (1, 384, 410)


def test_several_rows_of_an_example_fit(recipe: Recipe) -> None:
    assert build_options(recipe, LENGTHS, PROVEN, rows([9], windows=3)).batch == (1, 8, 3 * 32)


def test_beams_and_generated_tokens_fit(recipe: Recipe) -> None:
    options = build_options(recipe, LENGTHS, PROVEN, rows([9], beams=5, max_new_tokens=512))
    assert (options.batch, options.seq) == ((1, 8, 5 * 32), (1, 384, 512))


def test_spans_cover_the_axes_that_differ() -> None:
    """A first axis may count tokens, and widths are fixed."""
    batches = [
        {"x": np.zeros((2, 5, 32)), "tokens": np.zeros((10, 32))},
        {"x": np.zeros((3, 7, 32)), "tokens": np.zeros((21, 32))},
    ]
    assert spans_of(batches) == ((2, 10, 21), (5, 7, 7))
    assert spans_of(batches[:1]) == ((1, 1, 1), (1, 1, 1))


def test_timed_sizes_are_shapes_of_engines_that_are_chosen(recipe: Recipe) -> None:
    """Whatever the inputs are: a target leaves them out where its graph has other axes."""
    chosen = build_options(recipe.updated(target="auto", workspace=None), LENGTHS, PROVEN)
    assert set(chosen.shapes) == {(1, 128), (32, 128), (1, 384), (32, 384)}
    assert not chosen.requires_shapes
    assert not build_options(recipe, LENGTHS, PROVEN).shapes
