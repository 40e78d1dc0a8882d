"""All timed forms compute the same attention; masked sites and their forms are selected from tables of times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.block_masks import mask_selector
from compressor.block_masks.mask_selector import (
    MASKS_FILE,
    AttentionExtras,
    AttentionTimer,
    MaskSelector,
    SelectedMasks,
    SiteTimes,
    find_attention_extras,
    median_milliseconds,
)
from compressor.config.run import Recipe
from compressor.config.step_list import step_of_flags
from compressor.config.steps import Blocks
from compressor.results import NoteCode
from compressor.store import Store
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime import ort_session
from graph_passes import BlockMask, Kind, Plan, SitePlan
from tests.zoo import FAMILIES, PERSISTENT

LONGEST = 16


class TableTimer(AttentionTimer):
    """A timer that returns given times.

    Args:
        table: site -> form -> milliseconds at shorter lengths and at the longest; a form that is missing is not timed.
    """

    def __init__(self, table: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
        self.table = table
        self.calls: list[tuple[str, int]] = []

    def times(self, site: SitePlan, mask: BlockMask, length: int, batch: int, *, masked: bool) -> SiteTimes:
        self.calls.append((site.name, length))
        milliseconds = {form: times[length == LONGEST] for form, times in self.table[site.name].items()}
        return SiteTimes(length, milliseconds, batch)


def selector_of(table: Mapping[str, Mapping[str, tuple[float, float]]], **fields: Any) -> MaskSelector:
    """A selector for rows of up to 16 positions."""
    recipe = Recipe(model=Path("m"), data="d", drop_blocks=0.5, **{"batch": (1,), **fields})
    return MaskSelector(recipe, (), LONGEST, timer=TableTimer(table), blocks=step_of_flags(recipe, Blocks))


def gains(short: float, long: float) -> dict[str, tuple[float, float]]:
    """Times of a site with block-sparse attention `short` or `long` times as fast as whole attention."""
    return {"whole": (short, long), "masked": (2.0, 2.0), "block-sparse": (1.0, 1.0)}


SITES = ("a", "b", "c")
PLAN = Plan(sites=tuple(SitePlan(name, "bidirectional", 4, 4, 4, (0, 1, 2, 3)) for name in SITES))
MASKS = {name: BlockMask(np.ones((4, 2, 2), np.bool_), 8) for name in SITES}
GAINS = {"a": gains(1.0, 1.1), "b": gains(1.0, 1.09), "c": gains(0.99, 5.0)}


def test_masks_must_save_time_at_the_longest_length_and_cost_none_at_others() -> None:
    selected, notes = selector_of(GAINS).select(PLAN, MASKS)
    assert list(selected) == ["a"]
    (note,) = notes
    assert note.code is NoteCode.SITES_UNMASKED
    assert note.text == (
        "2 of 3 sites keep every block, because block-sparse attention would not be faster there on this machine:"
        " b (1.09 times as fast at length 16), c (0.99 times as fast at length 8); --mask-all-sites masks them"
        " nevertheless"
    )


@pytest.mark.parametrize("fields", [{"mask_all_sites": True}, {"block_size": 1}])
def test_nothing_is_timed_if_every_site_is_masked(fields: dict[str, Any]) -> None:
    selector = selector_of({}, **fields)
    assert selector.select(PLAN, MASKS) == (MASKS, ())


def test_there_is_no_note_if_every_mask_saves_time() -> None:
    selected, notes = selector_of(dict.fromkeys(SITES, gains(1.5, 2.0))).select(PLAN, MASKS)
    assert (selected, notes) == (MASKS, ())


def test_a_masked_site_gets_its_faster_form() -> None:
    table = {
        "a": gains(1.0, 1.0),
        "b": {**gains(1.0, 1.0), "masked": (0.5, 0.5)},
        "c": {"whole": (1.0, 1.0), "masked": (0.5, 0.5)},
    }
    selector, masked = selector_of(table), PLAN.masked(MASKS)
    assert selector.lowered(masked) == {"a"}
    results = selector.site_blocks(masked, (), {"a"}, {}, {"a": 3})
    assert [site.form for site in results] == ["block-sparse", "masked", "masked"]
    assert [site.unprojected for site in results] == [3, 0, 0]
    assert results[0].milliseconds[16] == {"whole": 1.0, "masked": 2.0, "block-sparse": 1.0}
    assert [site.form for site in selector.site_blocks(PLAN, {"a"}, (), {})] == ["whole"]


def test_the_reason_why_a_site_is_not_block_sparse_is_reported() -> None:
    selector = selector_of(GAINS)
    (result,) = selector.site_blocks(PLAN.masked({"a": MASKS["a"]}), (), (), {"a": "its keys are shared"})
    assert (result.form, result.why) == ("masked", "its keys are shared")


@pytest.mark.parametrize(("kind", "share"), [("bidirectional", 0.75), ("causal", 2 / 3)])
def test_the_share_of_kept_blocks_excludes_future_positions(kind: Any, share: float) -> None:
    site = SitePlan("a", kind, 2, 2, 4, (0,))
    kept = np.ones((2, 2, 2), np.bool_)
    kept[0, 1, 0] = False
    plan = Plan(sites=(site,)).masked({"a": BlockMask(kept, 8)})
    (result,) = selector_of({}).site_blocks(plan, (), (), {})
    assert result.share == pytest.approx(share)


@pytest.mark.parametrize(("lengths", "timed"), [((), (50, 75, 100)), ((128,), (50, 75, 100, 128))])
def test_shorter_rows_than_the_longest_are_always_timed(lengths: tuple[int, ...], timed: tuple[int, ...]) -> None:
    recipe = Recipe(model=Path("m"), data="d", drop_blocks=0.5)
    assert MaskSelector(recipe, lengths, 100).lengths == timed


def test_times_of_an_interrupted_run_are_reused(tmp_path: Path) -> None:
    timer = TableTimer(GAINS)
    first, second = selector_of(GAINS), MaskSelector(selector_of({}).recipe, (), LONGEST, timer=timer)
    expected = first.times(PLAN.sites[0], MASKS["a"])
    store = Store(tmp_path, version=1)
    store.memo(mask_selector.MASKS, {}, lambda _: SelectedMasks((), (), first.timed), MASKS_FILE)
    second.recall(store)
    assert second.times(PLAN.sites[0], MASKS["a"]) == expected
    assert timer.calls == []
    second.recall(Store(tmp_path / "missing"))


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
