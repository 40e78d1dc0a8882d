"""All timed forms compute the same attention, with the inputs of the site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.block_masks.mask_selector import (
    AttentionExtras,
    AttentionTimer,
    SiteTimes,
    find_attention_extras,
    median_milliseconds,
)
from compressor.config.run import Recipe
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime import ort_session
from graph_passes import BlockMask, Kind, SitePlan
from tests.zoo import FAMILIES, PERSISTENT

RECIPE = Recipe(model=Path("m"), data="d", drop_blocks=0.5, threads=1)


class RunOnce:
    """A timer that calls each form once and records the outputs."""

    def __init__(self) -> None:
        self.outputs: dict[str, np.ndarray] = {}

    def __call__(self, sessions: Mapping[str, Any], feeds: Feeds) -> dict[str, float]:
        self.outputs = {
            form: ort_session.run_session(session, feeds)["output"].reshape(3, -1, 8)
            for form, session in sessions.items()
        }
        return dict.fromkeys(sessions, 1.0)


@pytest.mark.parametrize("extras", [AttentionExtras(), AttentionExtras(bias=2), AttentionExtras(persistent=3, bias=2)])
@pytest.mark.parametrize(("kind", "memory"), [("bidirectional", 0), ("causal", 0), ("causal", 8), ("cross", 0)])
@pytest.mark.parametrize("length", [6, 11])
def test_all_forms_are_equal_under_a_mask_that_keeps_every_block(
    kind: Kind, memory: int, extras: AttentionExtras, length: int
) -> None:
    site = SitePlan("a", kind, 2, 1, 4, (0, 1))
    mask = BlockMask(np.ones((2, 2, 2 + memory // 8), np.bool_), 8, memory)
    measure = RunOnce()
    times = AttentionTimer(RECIPE, {"a": extras}, measure).times(site, mask, length, 3, masked=True)
    assert times == SiteTimes(length, {"whole": 1.0, "masked": 1.0, "block-sparse": 1.0}, 3)
    for output in measure.outputs.values():
        np.testing.assert_allclose(output, measure.outputs["whole"], atol=1e-5)


@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
def test_masked_and_block_sparse_attention_drop_the_same_blocks(kind: Kind) -> None:
    kept = np.ones((2, 2, 2), np.bool_)
    kept[0, 1, 0] = kept[1, 0, 1] = False
    measure = RunOnce()
    site = SitePlan("a", kind, 2, 2, 4, (0, 1))
    AttentionTimer(RECIPE, measure=measure).times(site, BlockMask(kept, 8), 16, 3, masked=True)
    np.testing.assert_allclose(measure.outputs["block-sparse"], measure.outputs["masked"], atol=1e-5)
    assert np.abs(measure.outputs["whole"] - measure.outputs["masked"]).max() > 1e-3


def test_single_entries_have_no_block_sparse_form() -> None:
    site, mask = SitePlan("a", "bidirectional", 2, 2, 4, (0, 1)), BlockMask(np.ones((2, 8, 8), np.bool_))
    times = AttentionTimer(RECIPE, measure=RunOnce()).times(site, mask, 8, 3, masked=False)
    assert set(times.milliseconds) == {"whole"}
    assert times.gain == 0.0


def test_every_form_is_timed() -> None:
    site, mask = SitePlan("a", "bidirectional", 2, 2, 4, (0, 1)), BlockMask(np.ones((2, 1, 1), np.bool_), 8)
    times = AttentionTimer(RECIPE, measure=median_milliseconds).times(site, mask, 8, 1, masked=True)
    assert all(milliseconds > 0 for milliseconds in times.milliseconds.values())
    assert times.gain == times.milliseconds["whole"] / times.milliseconds["block-sparse"]


@pytest.mark.parametrize(
    ("family", "extras"),
    [
        ("bert", {AttentionExtras()}),
        ("gpt2", {AttentionExtras()}),
        ("all_attention", {AttentionExtras(PERSISTENT, 4)}),
        ("t5", {AttentionExtras(bias=4), AttentionExtras()}),  # cross attention has no bias
    ],
)
def test_extra_inputs_of_a_site_are_found(family: str, extras: set[AttentionExtras]) -> None:
    model, inputs = FAMILIES[family](0)
    assert set(find_attention_extras(model, inputs).values()) == extras
