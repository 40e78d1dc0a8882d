"""Blocks of attention maps are dropped from the heads that a budget left, in the same run or in a second one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compressor
from compressor.config.run import Recipe
from compressor.config.steps import Blocks, Units
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import NoteCode, Report
from graph_passes import BlockMask, Plan
from tests.faults import fails_with
from tests.run.budgets.budget_runs import codes
from tests.run.listeners import RecordingListener
from tests.run.runs import learning_recipe


def blocks_recipe(inputs: Path, model: Path, out: Path, **fields: Any) -> Recipe:
    """Half of the pairs of positions are dropped from the heads of a model folder."""
    blocks = {"drop_blocks": 0.5, "block_size": 1, "mask_all_sites": True, "keep": None, "training_steps": 2}
    return learning_recipe(inputs, out, model=model, **{**blocks, **fields})


@pytest.mark.zoo
def test_heads_that_a_budget_left_get_masks(inputs: Path, tmp_path: Path, pruned: tuple[Path, Report]) -> None:
    first, _ = pruned
    report = compressor.compress(blocks_recipe(inputs, first, tmp_path / "out"))
    before, after = Plan.load(first / "plan.json"), Plan.load(tmp_path / "out" / "plan.json")
    assert before.heads_kept < before.heads
    assert [group.kept for group in after.groups] == [group.kept for group in before.groups]
    assert set(after.masks) == {site.name for site in before.sites if site.kept}
    assert all(proof.holds for proof in report.proofs)
    assert report.compressed.parameters < report.dense.parameters
    assert {NoteCode.PLAN_FOLLOWED, NoteCode.TRAINED_ALONG} <= codes(report)
    assert NoteCode.WEIGHTS_CHANGED not in codes(report)


def test_units_and_then_blocks_are_dropped_by_one_list(inputs: Path, tmp_path: Path) -> None:
    units = Units(macs=0.6, prune_rows=16)
    blocks = Blocks(share=0.5, block_size=1, mask_all_sites=True, training_steps=2, batch_size=8)
    fields: dict[str, Any] = {"batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1, "max_length": 8}
    report = compressor.compress(
        Recipe(
            model=inputs / "model", data=str(inputs / "rows.tsv"), steps=[units, blocks], out=tmp_path / "out", **fields
        )
    )
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert plan.heads_kept + plan.neurons_kept < plan.heads + plan.neurons
    assert set(plan.masks) == {site.name for site in plan.sites if site.kept}
    assert all(proof.holds for proof in report.proofs)
    (row,) = report.budget
    assert (row.unit, row.met) == ("macs", True)
    assert {NoteCode.BUDGET_MET, NoteCode.TRAINED_ALONG} <= codes(report)


@pytest.mark.parametrize("fault", ["masks", "weights", "heads"])
def test_a_plan_whose_heads_cannot_get_masks_is_refused(
    inputs: Path, tmp_path: Path, pruned: tuple[Path, Report], fault: str
) -> None:
    first, _ = pruned
    model, plan = tmp_path / "model", Plan.load(first / "plan.json")
    model.mkdir()
    for file in first.iterdir():
        if file.is_file():
            (model / file.name).write_bytes(file.read_bytes())
    if fault == "masks":
        (site,) = plan.sites
        plan = plan.masked({site.name: BlockMask(np.ones((site.heads, 8, 8), np.bool_), 1)})
    elif fault == "weights":
        plan = plan.model_copy(update={"model": "another"})
    else:
        plan = plan.replace_groups([replace(site, kept=(), scale=()) for site in plan.sites])
    plan.save(model / "plan.json")
    listener = RecordingListener()
    code = ErrorCode.FILE_MISMATCH if fault == "weights" else ErrorCode.PLAN_MISMATCH
    with fails_with(code, InputError, path=model / "plan.json"):
        compressor.compress(blocks_recipe(inputs, model, tmp_path / "out"), listener)
    assert not any(stage.startswith("learning") for stage in listener.stages)


@pytest.mark.parametrize(("fields", "field"), [({"keep": 1}, "keep"), ({"method": "taylor", "max_drop": 1}, "method")])
def test_no_heads_are_selected_beside_those_of_the_plan(
    inputs: Path, tmp_path: Path, pruned: tuple[Path, Report], fields: dict[str, Any], field: str
) -> None:
    first, _ = pruned
    with fails_with(ErrorCode.CONTRADICTION, UsageError) as caught:
        blocks_recipe(inputs, first, tmp_path / "out", **fields)
    assert caught.value.details["fields"] == (field, "drop_blocks")
