"""The selection of masked sites and of their forms, from tables of times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.block_masks import mask_selector
from compressor.block_masks.mask_selector import MASKS_FILE, AttentionTimer, MaskSelector, SelectedMasks, SiteTimes
from compressor.config.run import Recipe
from compressor.config.step_list import blocks_of
from compressor.results import NoteCode
from compressor.store import Store
from graph_passes import BlockMask, Plan, SitePlan

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
    return MaskSelector(recipe, (), LONGEST, timer=TableTimer(table), blocks=blocks_of(recipe))


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
