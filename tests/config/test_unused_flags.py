"""Flags without effect, and the order of the steps that flags stand for."""

from __future__ import annotations

from typing import Any

import pytest

from compressor.config.run import Recipe
from compressor.config.unused_flags import order_notes, unused_field_notes
from compressor.results import NoteCode


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"data": "x", "keep": 1, "block_size": 32, "kernel": "k.so"}, ("--block-size", "--kernel")),
        ({"block_size": 32, "drop_blocks": 0.5, "data": "rows.tsv"}, ()),
        ({"mask_all_sites": True, "entmax": True}, ("--mask-all-sites", "--entmax")),
        ({"data": "x", "plan": "p", "epochs": 3, "training_steps": 5}, ("--epochs", "--training-steps")),
        ({"kernel": "k.so"}, ()),  # the masks of a plan may use it
        ({"workspace": 3}, ("--workspace",)),
        ({"workspace": 3, "target": "trt"}, ()),
        ({"data": "rows.tsv", "method": "taylor", "keep": 1, "training_steps": 5}, ("--training-steps",)),
        (
            {"data": "rows.tsv", "method": "taylor", "keep": 1, "training_steps": 5, "epochs": 2},
            ("--epochs", "--training-steps"),
        ),
        ({"data": "rows.tsv", "keep": 1, "training_steps": 5, "epochs": 2}, ("--epochs",)),
        ({"data": "x", "macs": 0.5, "epochs": 3, "learning_rate": 1e-3}, ("--epochs", "--learning-rate")),
        ({"data": "x", "method": "fisher", "max_drop": 0.1, "training_steps": 100}, ("--training-steps",)),
        (
            {"data": "x", "method": "magnitude", "keep": 1, "training_steps": 5, "epochs": 2},
            ("--epochs", "--training-steps"),
        ),
        ({"data": "x", "macs": 0.5, "learning_rate": 5e-5}, ()),
        ({"data": "x", "method": "taylor", "keep": 1, "speedup": 2, "training_steps": 5}, ("--training-steps",)),
        ({"data": "x", "method": "dsp", "keep": 1, "speedup": 2, "training_steps": 5, "learning_rate": 1e-3}, ()),
        ({"data": "x", "method": "dsp", "macs": 0.5, "epochs": 2, "learning_rate": 1e-3}, ()),
        ({"data": "x", "method": "taylor", "keep": 1, "drop_blocks": 0.5, "training_steps": 5}, ()),
        ({"data": "rows.tsv", "keep": 1, "training_steps": 5}, ()),
        (
            {"data": "x", "method": "dsp", "keep": 1, "budget_at": "1x8", "prune_units": "neurons", "prune_rows": 100},
            ("--budget-at", "--prune-units", "--prune-rows"),
        ),
        ({"data": "x", "keep": 1, "skip_refused": True, "statistics": "s"}, ("--skip-refused", "--statistics")),
        ({"data": "x", "macs": 0.5, "budget_at": "1x8", "prune_units": "neurons", "skip_refused": True}, ()),
        ({"data": "x", "method": "dsp", "macs": 0.5, "prune_rows": 100}, ()),
        ({"data": "x", "method": "reconstruct", "max_drop": 0.1, "statistics": "s"}, ()),
        ({"data": "x", "method": "fisher", "macs": 0.5, "statistics": "s", "prune_rows": 100}, ()),
        (
            {"data": "x", "method": "magnitude", "macs": 0.5, "statistics": "s", "prune_rows": 100},
            ("--prune-rows", "--statistics"),
        ),
        ({"data": "x", "method": "magnitude", "macs": 0.5, "prune_rows": 2048}, ()),
    ],
)
def test_fields_without_effect_are_noted(fields: dict[str, Any], flags: tuple[str, ...]) -> None:
    notes = list(unused_field_notes(Recipe(model="model", **fields), None))
    assert [note.code for note in notes] == ([NoteCode.NO_EFFECT] if flags else [])
    assert all(flag in notes[0].text for flag in flags)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"keep": "50%", "macs": "50%"}, "dsp selects the heads first (--keep 50%); reconstruct then removes neurons"),
        ({"method": "astar", "max_drop": 0.1, "speedup": 2}, "astar selects the heads first; reconstruct"),
        ({"method": "dsp", "macs": "50%"}, None),
        ({"macs": "50%"}, None),
        ({"keep": "50%"}, None),
        ({"method": "reconstruct", "keep": "50%"}, None),
    ],
)
def test_heads_that_are_selected_before_a_budget_is_met_are_noted(fields: dict[str, Any], text: str | None) -> None:
    notes = list(order_notes(Recipe(model="model", data="rows.tsv", **fields)))
    assert [note.code for note in notes] == ([] if text is None else [NoteCode.HEADS_SELECTED_FIRST])
    assert all(note.text.startswith(text or "") for note in notes)


def test_a_length_beyond_the_model_is_noted() -> None:
    recipe = Recipe(model="model", data="rows.tsv", keep=1, max_length=512)
    (note,) = unused_field_notes(recipe, 128)
    assert note.code is NoteCode.LENGTH_LIMITED
    assert not list(unused_field_notes(recipe, None))
