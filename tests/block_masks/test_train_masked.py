"""Training with masks: interruptions, entmax, the weights to start from, and the settings of masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.block_masks.attention_maps import AttentionMaps, build_masks, collect_attention_maps
from compressor.block_masks.mask_selector import MASKS_FILE, MaskSelector
from compressor.errors import ErrorCode, UsageError
from compressor.results import Note, NoteCode
from compressor.training.checkpoints import digest
from compressor.units import keep_all
from tests.block_masks.test_mask_selector import TableTimer, gains
from tests.block_masks.training import masked_recipe, train
from tests.faults import fails_with
from tests.selection import tiny


@pytest.mark.parametrize("entmax", [False, True])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(entmax: bool, tmp_path: Path) -> None:
    """The interruption is during training with masks, or with entmax before maps are computed."""
    recipe = masked_recipe(training_steps=3, options={"evaluations": 3}, entmax=entmax)
    store = tmp_path / "interrupted"

    def interrupt(step: int, steps: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(store, recipe, on_progress=interrupt)
    assert {path.name for path in store.iterdir()} == ({"maps.unfinished"} if entmax else {"maps", "masks", "work"})
    maps = store / "maps" / "maps.safetensors"
    written = None if entmax else maps.stat().st_mtime_ns
    assert train(store, recipe) == train(tmp_path / "whole", recipe)
    assert written in (None, maps.stat().st_mtime_ns)
    assert not (store / "maps.unfinished").exists()


def test_entmax_changes_the_maps_and_not_the_weights(tmp_path: Path) -> None:
    """Training with masks starts from the weights of the model and not from those trained with entmax."""
    maps = []
    for entmax in (False, True):
        recipe = masked_recipe(drop_blocks=0.0, drop_blocks_by_kind={"bidirectional": 0.0}, keep=8, entmax=entmax)
        store = tmp_path / str(entmax)
        assert train(store, recipe.updated(learning_rate=1e-9)).weights == digest(tiny.classifier())
        maps.append(AttentionMaps.load(store / "maps" / "maps.safetensors").maps)
    plain, sharp = maps
    assert all(np.abs(sharp[site] - plain[site]).max() > 1e-4 for site in plain)


def test_training_can_start_from_other_weights_than_the_maps(tmp_path: Path) -> None:
    """After heads were selected, masks come from the current model, and the original weights are trained."""
    model = tiny.classifier(1)
    sites = tiny.sites_of(model)
    path = tmp_path / "maps.safetensors"
    collect_attention_maps(model, sites, tiny.data(), keep_all(sites), length=9).save(path)
    recipe = masked_recipe(maps=path)
    restarted = train(tmp_path / "restarted", recipe, seed=0, start=tiny.classifier(1).state_dict())
    direct, continued = (train(tmp_path / f"seed-{seed}", recipe, seed=seed) for seed in (1, 0))
    assert (restarted.plan, restarted.weights) == (direct.plan, direct.weights)
    assert restarted.weights != continued.weights


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("random_blocks", {"seed": 7}),
        ("count_causal_zeros", {"count_causal_zeros": True}),
        ("weight_by_count", {"weight_by_count": True}),
        ("allow_empty_rows", {"allow_empty_rows": True}),
    ],
)
def test_settings_of_masks_apply(field: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    plan = train(tmp_path / "store", masked_recipe(training_steps=1, seed=7, **{field: True})).plan
    maps = AttentionMaps.load(tmp_path / "store" / "maps" / "maps.safetensors")
    expected = build_masks(maps, plan.masked({}), {"bidirectional": 0.5}, 1, **arguments)
    assert plan.masks.keys() == expected.keys()
    for name, mask in expected.items():
        np.testing.assert_array_equal(plan.masks[name].kept, mask.kept)


def test_maps_of_an_earlier_run_are_cropped_and_stored(tmp_path: Path) -> None:
    model = tiny.classifier(1)
    sites, path = tiny.sites_of(model), tmp_path / "maps.safetensors"
    collect_attention_maps(model, sites, tiny.data(), keep_all(sites), length=14).save(path)
    trained = train(tmp_path / "store", masked_recipe(training_steps=1, maps=path, max_length=12))
    assert {mask.queries for mask in trained.plan.masks.values()} == {12}
    assert [note.code for note in trained.notes] == [
        NoteCode.MAPS_DIFFER,
        NoteCode.MAPS_CROPPED,
        NoteCode.BLOCKS_UNREACHED,
    ]
    assert "other weights" in trained.notes[0].text
    assert "rows" not in trained.notes[0].text.partition("(")[0], "the rows are the same"
    assert AttentionMaps.load(tmp_path / "store" / "maps" / "maps.safetensors").length == 14
    with fails_with(ErrorCode.TOO_LONG, path=path, maximum=14, length=15):
        train(tmp_path / "longer", masked_recipe(training_steps=1, maps=path, max_length=15))


def test_a_kind_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    recipe = masked_recipe(drop_blocks_by_kind={"cross": 0.5})
    with fails_with(
        ErrorCode.UNSUPPORTED_MODEL,
        UsageError,
        field="drop_blocks_by_kind",
        value="cross",
        choices=("bidirectional",),
    ):
        train(tmp_path / "store", recipe)


def test_the_model_is_not_trained_if_no_mask_saves_time(tmp_path: Path) -> None:
    recipe = masked_recipe(block_size=8, mask_all_sites=False)
    names = [site.name for site in tiny.sites_of(tiny.classifier())]
    selector = MaskSelector(recipe, (), 9, timer=TableTimer(dict.fromkeys(names, gains(0.5, 0.5))))
    trained = train(tmp_path / "store", recipe, selector=selector)
    assert not trained.plan.masks
    assert trained.weights == digest(tiny.classifier())
    assert NoteCode.SITES_UNMASKED in [note.code for note in trained.notes]


def test_selected_masks_are_read_with_their_notes(tmp_path: Path) -> None:
    recipe, store = masked_recipe(training_steps=1), tmp_path / "store"
    expected = train(store, recipe)
    selected = MASKS_FILE.load(store / "masks")
    assert selected.notes == expected.notes
    MASKS_FILE.save(replace(selected, notes=(Note(text="a text"),)), store / "masks")
    resumed = train(store, recipe)
    assert resumed.plan == expected.plan
    assert [(note.text, note.code) for note in resumed.notes] == [("a text", NoteCode.UNSPECIFIED)]
