"""Groups that the graph passes refuse keep all of their units, and the run says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor.errors import ErrorCode, SiteRefusedError
from compressor.measure.costs import CostTable
from compressor.pruning.measure import CostSource
from compressor.results import NoteCode
from compressor.run.model_units import measure_costs
from tests.faults import fails_with
from tests.run.budgets.budget_runs import budget_recipe
from tests.run.listeners import RecordingListener
from tests.run.runs import refuse_drops

HEADS = "bert.encoder.layer.0.attention.self"


def test_a_refused_group_ends_the_run(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_drops(monkeypatch, HEADS)
    listener = RecordingListener()
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, refused=(HEADS,)):
        compressor.compress(budget_recipe(inputs, tmp_path / "out", macs="90%"), listener)
    assert not any(stage.startswith("gathering statistics") for stage in listener.stages)


@pytest.mark.zoo
def test_a_group_is_skipped_on_request(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_drops(monkeypatch, HEADS)
    report = compressor.compress(budget_recipe(inputs, tmp_path / "out", macs="90%", skip_refused=True))
    (note,) = [note for note in report.notes if note.code is NoteCode.GROUPS_SKIPPED]
    assert HEADS in note.text
    assert "Frobnicate" in note.text
    assert report.plan.heads_kept == report.plan.heads
    assert report.plan.neurons_kept < report.plan.neurons
    assert report.compressed.parameters < report.dense.parameters
    assert all(proof.holds for proof in report.proofs)
    assert all(row.met for row in report.budget)


@pytest.mark.zoo
def test_costs_name_what_cannot_be_removed(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def proportional(source: CostSource, macs: CostTable, *args: Any) -> list[CostTable]:
        return [macs.scaled(1e-3).model_copy(update={"unit": "ms", "dense": 1e-3 * macs.dense})]

    monkeypatch.setattr(CostSource, "measured_tables", proportional)
    refuse_drops(monkeypatch, HEADS)
    listener = RecordingListener()
    costs = measure_costs(budget_recipe(inputs, tmp_path / "out", data=None), listener)
    (note,) = [note for note in listener.notes if note.code is NoteCode.GROUPS_SKIPPED]
    assert HEADS in note.text
    assert "Frobnicate" in note.text
    (table,) = costs.tables
    assert table.saving(HEADS, 0) == 0
    assert table.saving("bert.encoder.layer.0.output.dense", 0) > 0
