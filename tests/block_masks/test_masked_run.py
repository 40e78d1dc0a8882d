"""A run that drops blocks: its output, a run with its plan, a rebuild, and settings that are refused early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import compressor
from compressor.block_masks.attention_maps import AttentionMaps
from compressor.config.run import Recipe
from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from compressor.model_folder import example_inputs, load
from compressor.results import NoteCode, Report
from compressor.run.rebuild import rebuild
from compressor.units import find_sites
from graph_passes import Plan
from tests import folders
from tests.faults import fails_with
from tests.run.listeners import RecordingListener

QUICK = {"batch": (1,), "seconds": 0.01, "threads": 1}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with four heads, and rows of 4 to 16 tokens."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    config = BertConfig(**{**folders.SIZES, "num_attention_heads": 4})
    folders.save(BertForSequenceClassification(config), folder / "model")
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [f"{n % 2}\tthe {'good' if n % 2 else 'bad'} {' '.join(words[: n % 13])}" for n in range(40)]
    (folder / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return folder


def masked_recipe(inputs: Path, out: Path, **fields: Any) -> Recipe:
    """Drop half of the blocks of eight positions, at every site."""
    defaults = {"training_steps": 2, "batch_size": 8, "max_length": 16, "drop_blocks": 0.5, "block_size": 8, **QUICK}
    defaults |= {"model": inputs / "model", "data": str(inputs / "rows.tsv"), "mask_all_sites": True}
    return Recipe(**{**defaults, "out": out, **fields})


@dataclass(frozen=True)
class FinishedRun:
    """The output folder of a run, its report, and its listener."""

    out: Path
    report: Report
    listener: RecordingListener


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run that selected heads, then blocks."""
    out, listener = tmp_path_factory.mktemp("finished") / "out", RecordingListener()
    recipe = masked_recipe(inputs, out, keep=3, method="taylor", options={"rows": 8})
    return FinishedRun(out, compressor.compress(recipe, listener), listener)


def contents(folder: Path) -> Mapping[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir()}


def test_a_run_selects_heads_and_blocks(finished: FinishedRun) -> None:
    report, plan = finished.report, Plan.load(finished.out / "plan.json")
    assert all(proof.holds for proof in report.proofs)
    assert any("length 16" in case for proof in report.proofs for case in proof.cases)
    (site,), (blocks,) = plan.sites, report.blocks
    assert len(site.kept) == 3
    assert blocks.form in ("masked", "block-sparse")
    assert blocks.share == plan.masks[site.name].kept[list(site.kept)].mean()
    assert set(blocks.milliseconds[max(blocks.milliseconds)]) == {"whole", "masked", "block-sparse"}
    assert (finished.out / "plan.safetensors").is_file()
    assert AttentionMaps.load(finished.out / "maps.safetensors").length == 16
    learned = [stage for stage in finished.listener.stages if stage.startswith("learning")]
    assert learned == ["learning which heads to keep (taylor)", "learning which blocks to drop"]
    assert "of the blocks of 1 of 1 attention layers kept" in report.verdict


@pytest.mark.zoo
def test_the_plan_of_a_run_is_followed_and_a_head_without_blocks_is_dropped(
    finished: FinishedRun, tmp_path: Path
) -> None:
    plan = Plan.load(finished.out / "plan.json")
    (site,) = plan.sites
    mask = plan.masks[site.name]
    mask.kept[site.kept[0]] = False
    plan.masked({site.name: mask}).save(tmp_path / "plan.json")
    out = tmp_path / "out"
    recipe = Recipe(model=finished.out, plan=tmp_path / "plan.json", out=out, seq=(8,), **QUICK)
    report = compressor.compress(recipe)
    assert all(proof.holds for proof in report.proofs)
    assert Plan.load(out / "plan.json").sites[0].kept == site.kept[1:]
    assert f"{len(site.kept) - 1} of {site.heads} heads kept" in report.verdict
    codes = [note.code for note in report.notes]
    assert {NoteCode.PLAN_FOLLOWED, NoteCode.HEADS_EMPTIED, NoteCode.MASKS_LONGER} <= set(codes)


def test_longer_rows_than_the_masks_cover_are_not_built(finished: FinishedRun) -> None:
    before = contents(finished.out)
    with fails_with(ErrorCode.RUNTIME_FAILED, batch=1, seq=17):
        rebuild(finished.out, {"seq": (17,)}, finished.listener)
    assert contents(finished.out) == before


def test_a_rebuild_keeps_the_report_of_the_run(finished: FinishedRun) -> None:
    before = contents(finished.out)
    assert not rebuild(finished.out, {}, finished.listener).speeds
    notes = rebuild(finished.out, {}, finished.listener).notes
    assert len(notes) == len(set(notes))
    assert NoteCode.EARLIER_REPORT_KEPT in [note.code for note in notes]
    for suffix in ("json", "html"):  # measurements that cannot be repeated are kept
        assert (finished.out / f"run-report.{suffix}").read_bytes() == before[finished.out / f"report.{suffix}"]


@pytest.mark.parametrize(
    ("fields", "error", "code", "details"),
    [
        ({"drop_blocks_by_kind": {"cross": 0.5}}, UsageError, ErrorCode.UNSUPPORTED_MODEL, {"value": "cross"}),
        ({"seq": (18,)}, UsageError, ErrorCode.TOO_LONG, {"field": "seq"}),
        ({"maps": "nowhere.safetensors"}, InputError, ErrorCode.FILE_MISSING, {}),
        ({"maps": "short.safetensors"}, InputError, ErrorCode.TOO_LONG, {"maximum": 8, "length": 16}),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_before_a_build(
    fields: dict[str, Any],
    error: type[CompressorError],
    code: ErrorCode,
    details: dict[str, Any],
    inputs: Path,
    tmp_path: Path,
) -> None:
    listener = RecordingListener()
    if "maps" in fields:
        fields = {"maps": tmp_path / fields["maps"]}
        folder = load(inputs / "model")
        (site,) = find_sites(folder.model, example_inputs(folder, 2, 8))
        maps, counts = np.zeros((site.heads, 8, 8), np.float32), np.ones((8, 8), np.float32)
        short = AttentionMaps({site.name: maps}, {site.name: counts}, {site.name: site.kind}, 0, None, None)
        short.save(tmp_path / "short.safetensors")
    with fails_with(code, error, **details):
        compressor.compress(masked_recipe(inputs, tmp_path / "out", **fields), listener)
    assert not any("exporting" in stage for stage in listener.stages)
    assert not (tmp_path / "out").exists()


@pytest.mark.zoo
def test_masks_stay_as_planned_while_what_they_keep_is_distilled(
    inputs: Path, tmp_path: Path, finished: FinishedRun
) -> None:
    heads = {"keep": 3, "method": "taylor", "options": {"rows": 8}}
    distillation = {"distill": True, "distill_steps": 20, "distill_learning_rate": 1e-3}
    report = compressor.compress(masked_recipe(inputs, tmp_path / "out", **heads, **distillation))
    before, after = (Plan.load(folder / "plan.json") for folder in (finished.out, tmp_path / "out"))
    assert NoteCode.DISTILLED in {note.code for note in report.notes}
    assert before.model != after.model
    assert before.groups == after.groups
    assert before.masks.keys() == after.masks.keys()
    for name, mask in before.masks.items():
        assert not mask.kept.all()
        np.testing.assert_array_equal(mask.kept, after.masks[name].kept)
    assert all(proof.holds for proof in report.proofs)
    assert {proof.stage for proof in report.proofs} == {proof.stage for proof in finished.report.proofs}


@pytest.mark.zoo
def test_maps_are_delivered_with_a_distilled_model(inputs: Path, tmp_path: Path) -> None:
    compressor.compress(masked_recipe(inputs, tmp_path / "out", distill=True, distill_steps=2))
    assert AttentionMaps.load(tmp_path / "out" / "maps.safetensors").length == 16
