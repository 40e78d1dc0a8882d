"""Runs on rows without labels: units are removed and trained, nothing is scored, and what needs labels is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor.errors import ErrorCode, InputError
from compressor.results import DropStatus, NoteCode
from tests import folders
from tests.faults import fails_with
from tests.run.budgets.budget_runs import budget_recipe, codes, run
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learn, learning_recipe
from tests.tasks.test_answers_as_labels import QUESTIONS, SOURCES, TEXTS, save_reader, save_translator


@pytest.fixture
def unlabelled(inputs: Path, tmp_path: Path) -> str:
    """The rows of `inputs` without their labels."""
    path = tmp_path / "unlabelled.tsv"
    path.write_text("".join(row.partition("\t")[2] + "\n" for row in (inputs / "rows.tsv").read_text().splitlines()))
    return str(path)


@pytest.mark.zoo
def test_a_budget_needs_no_labels(inputs: Path, tmp_path: Path, unlabelled: str) -> None:
    report = run(inputs, tmp_path / "out", macs="60%", data=unlabelled)
    assert {NoteCode.ROWS_UNLABELLED, NoteCode.NO_METRIC, NoteCode.BUDGET_MET} <= codes(report)
    assert NoteCode.TEST_IS_EVAL not in codes(report)
    assert (report.scores, report.answers, report.drop_status) == ((), (), DropStatus.NOT_CHECKED)
    assert report.plan.neurons_kept + report.plan.heads_kept < report.plan.neurons + report.plan.heads
    assert all(proof.holds for proof in report.proofs)


@pytest.mark.zoo
def test_a_distillation_needs_no_labels(inputs: Path, tmp_path: Path, unlabelled: str) -> None:
    learned = learn(budget_recipe(inputs, tmp_path / "out", macs="60%", data=unlabelled, distill=True, distill_steps=4))
    assert NoteCode.ROWS_UNLABELLED in learned.codes
    names = set[str]().union(*(point.values for point in learned.selected.curves))
    assert "eval_divergence" in names
    assert "eval_accuracy" not in names


@pytest.mark.zoo
def test_an_engine_is_chosen_without_labels(inputs: Path, tmp_path: Path, unlabelled: str) -> None:
    fields = {"target": "auto", "precision": "fp32", "macs": "60%", "data": unlabelled}
    listener = RecordingListener("gathering statistics", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(budget_recipe(inputs, tmp_path / "out", **fields), listener)
    assert NoteCode.ENGINE_CHOSEN in listener.codes
    assert not any("scoring" in stage for stage in listener.stages)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"macs": "60%", "label_column": "sentiment"}, "label_column"),
        ({"macs": "60%", "method": "dsp"}, "label_column"),
        ({"keep": 1, "method": "taylor"}, "label_column"),
    ],
)
def test_what_needs_labels_is_refused_without_them(
    inputs: Path, tmp_path: Path, unlabelled: str, fields: dict[str, Any], field: str
) -> None:
    recipe = learning_recipe(
        inputs, tmp_path / "out", **{"keep": None, "training_steps": None, "data": unlabelled, **fields}
    )
    listener = RecordingListener()
    with fails_with(ErrorCode.COLUMN_MISSING, InputError, field=field):
        compressor.compress(recipe, listener)
    assert listener.stages[-1] == "reading the rows"


def test_a_loss_is_bounded_by_the_agreement_with_the_whole_model(inputs: Path, tmp_path: Path, unlabelled: str) -> None:
    report = run(inputs, tmp_path / "out", macs="60%", max_drop=0.99, data=unlabelled)
    assert NoteCode.ANSWERS_AS_LABELS in codes(report)
    assert report.drop_status is DropStatus.PASSED
    assert {score.split for score in report.scores} == {"eval", "test"}
    assert {score.dense for score in report.scores} == {1.0}
    assert {score.metric for score in report.scores} == {"agreement (accuracy)"}


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("save", "task", "header", "rows", "metric"),
    [
        (folders.save_sentence_encoder, None, "text", TEXTS, "agreement (cosine)"),
        (save_translator, "translation", "de", SOURCES, "agreement (bleu)"),
        (save_reader, None, "question\tcontext", QUESTIONS, "agreement (f1)"),
    ],
)
def test_every_task_has_an_agreement_with_the_whole_model(
    save: Callable[[Path], Path], task: str | None, header: str, rows: Sequence[str], metric: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.tsv").write_text("\n".join([header, *rows, ""]))
    fields = {"model": save(tmp_path / "model"), "task": task, "max_length": 24}
    report = run(tmp_path, tmp_path / "out", macs="60%", max_drop=0.99, **fields)
    assert {score.metric for score in report.scores} == {metric}
    assert {score.split for score in report.scores} == {"eval", "test"}
    assert all(score.dense == pytest.approx(100.0 if task else 1.0, rel=1e-3) for score in report.scores)
    assert all(proof.holds for proof in report.proofs)
    assert report.plan.neurons_kept + report.plan.heads_kept < report.plan.neurons + report.plan.heads


def test_test_rows_with_labels_are_no_evaluation_rows(inputs: Path, tmp_path: Path, unlabelled: str) -> None:
    rows = {"data": unlabelled, "test_data": str(inputs / "rows.tsv")}
    learned = learn(budget_recipe(inputs, tmp_path / "out", max_drop=0.5, macs="60%", **rows))
    assert NoteCode.BUDGET_MET in learned.codes
