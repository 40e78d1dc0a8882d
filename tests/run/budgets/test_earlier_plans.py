"""Runs under a budget that go on from something earlier: heads of another method, another run, an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

import compressor
from compressor.errors import ErrorCode, InputError
from compressor.results import NoteCode
from graph_passes import Plan
from tests import folders
from tests.faults import fails_with
from tests.run.budgets.budget_runs import bound, budget_recipe, codes, run
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learning_recipe


@pytest.mark.zoo
def test_a_plan_after_heads_of_another_method_is_timed_as_it_is(
    inputs: Path, tmp_path: Path, times_by_macs: list[tuple[float, float]]
) -> None:
    """Where times are proportional to multiply-accumulates, the table predicts what is measured."""
    report = compressor.compress(learning_recipe(inputs, tmp_path / "out", speedup=1.4))
    assert report.plan.heads_kept == 1
    assert times_by_macs
    for predicted, measured in times_by_macs:
        assert measured == pytest.approx(predicted, rel=1e-3)


@pytest.mark.zoo
def test_what_an_earlier_run_removed_stays_removed(inputs: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    earlier = run(inputs, start, macs="88%", prune_units="heads")
    report = run(inputs, tmp_path / "out", macs="53%", start_from=start, prune_units="neurons")
    before, after = (Plan.load(folder / "plan.json") for folder in (start, tmp_path / "out"))
    assert earlier.plan.heads_kept < earlier.plan.heads
    assert [site.kept for site in before.sites] == [site.kept for site in after.sites]
    assert report.plan.neurons_kept < earlier.plan.neurons_kept
    assert all(proof.holds for proof in report.proofs)
    assert all(row.met for row in report.budget)
    assert report.compressed.macs is not None
    assert report.compressed.macs <= bound(report.budget[0])


@pytest.mark.zoo
@pytest.mark.parametrize("first", ["query", "kv"])
def test_a_start_by_another_grouping_of_heads_is_refused(inputs: Path, tmp_path: Path, first: str) -> None:
    sizes: dict[str, Any] = {**folders.SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    config = hf.LlamaConfig(**{**sizes, "num_hidden_layers": 1}, pad_token_id=0)
    folders.save(hf.LlamaForSequenceClassification(config), tmp_path / "model")
    fields = {"prune_units": "heads", "model": tmp_path / "model", "method": "reconstruct"}
    run(inputs, tmp_path / "start", macs="80%", group_by=first, **fields)
    second = {"query": "kv", "kv": "query"}[first]
    with fails_with(ErrorCode.FILE_MISMATCH, InputError, field="group_by"):
        run(inputs, tmp_path / "out", macs="70%", group_by=second, start_from=tmp_path / "start", **fields)


@pytest.mark.zoo
@pytest.mark.parametrize("fields", [{}, {"distill": True, "distill_steps": 2}])
def test_a_resumed_run_has_the_notes_of_its_plan(fields: dict[str, Any], inputs: Path, tmp_path: Path) -> None:
    fields = {"macs": "60%", **fields}
    listener = RecordingListener("compressed: exporting", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(budget_recipe(inputs, tmp_path / "out", **fields), listener)
    report = run(inputs, tmp_path / "out", **fields)
    assert {NoteCode.RESUMED, NoteCode.BUDGET_MET} <= codes(report)
    assert len(report.notes) == len(set(report.notes))


@pytest.mark.zoo
def test_a_resumed_run_delivers_the_engine_that_its_plan_was_made_for(inputs: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"target": "auto", "precision": "fp32", "macs": "60%"}
    listener = RecordingListener("gathering statistics", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(budget_recipe(inputs, tmp_path / "out", **fields), listener)
    (chosen,) = tmp_path.rglob("learning/units/engine/result.json")
    # Whichever was faster by a little, the resumed run has to deliver this one.
    label = {"ort fp32": "openvino fp32", "openvino fp32": "ort fp32"}[json.loads(chosen.read_text())[0]]
    chosen.write_text(json.dumps([label]))
    report = run(inputs, tmp_path / "out", **fields)
    assert [row.label for row in report.candidates if row.chosen] == [label]


@pytest.mark.zoo
def test_heads_by_another_method_come_first(inputs: Path, tmp_path: Path) -> None:
    report = compressor.compress(learning_recipe(inputs, tmp_path / "out", parameters="80%"))
    plan, (row,) = report.plan, report.budget
    assert row.requested == pytest.approx(0.8 * row.dense)
    assert {NoteCode.HEADS_SELECTED_FIRST, NoteCode.TRAINED_ALONG, NoteCode.WEIGHTS_CHANGED} <= codes(report)
    assert plan.heads_kept == 1
    assert plan.neurons_kept < plan.neurons
    assert plan.method == "dsp+reconstruct"
