"""A run on questions: the report compares F1 on the built engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compressor
from compressor.config.run import Recipe
from compressor.model_folder import example_inputs, load
from compressor.models.forwards import tensors_of
from compressor.results import MetricUnit, NoteCode, Report
from compressor.tasks import open_data, statistics
from compressor.tasks.question_answering import Answer
from tests.folders import rows_config
from tests.report.reports import FLOAT_STAGES
from tests.tasks.questions import WORDS, bert, forward_of, row, wordpieces
from tests.tasks.rows import jsonl


def city_question(seed: int) -> dict[str, Any]:
    """A question whose answer is the city among the words of the context."""
    rng = np.random.default_rng(seed)
    words = [WORDS[number] for number in rng.integers(2, 7, rng.integers(2, 24))]
    words[position := int(rng.integers(len(words)))] = str(rng.choice(["paris", "rome"]))
    start = len(" ".join(words[:position])) + (position > 0)
    return row(" ".join(words), "who built", Answer(words[position], start))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of rows and of a BERT that learned to find the city."""
    path = tmp_path_factory.mktemp("answers")
    rows = jsonl(path / "rows.jsonl", *(city_question(seed) for seed in range(48)))
    torch.manual_seed(0)
    bert().save_pretrained(path / "model")
    wordpieces().save_pretrained(path / "model")
    folder = load(path / "model")
    data = open_data(rows_config(rows, rows, rows, max_length=16, stride=3), folder)
    batch = tensors_of(data.task.loss_inputs(data.task.collate(list(data.train))))
    optimizer = torch.optim.Adam(folder.model.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        folder.model(**batch).loss.backward()
        optimizer.step()
    folder.model.save_pretrained(path / "model")
    return path


def test_the_task_follows_from_the_class(trained: Path) -> None:
    folder = load(trained / "model")
    assert folder.task == "question-answering"
    assert set(example_inputs(folder, 2, 8)) == {"input_ids", "attention_mask", "token_type_ids"}


@pytest.fixture(scope="module", params=[pytest.param(method, marks=pytest.mark.zoo) for method in ("dsp", "taylor")])
def report(request: pytest.FixtureRequest, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return compressor.compress(
        Recipe(
            model=trained / "model",
            data=str(trained / "rows.jsonl"),
            method=request.param,
            keep="50%",
            training_steps=4,
            batch_size=8,
            max_length=16,
            stride=3,
            batch=(1,),
            seq=(8,),
            seconds=0.01,
            threads=1,
            options={"evaluations": 2} if request.param == "dsp" else {},
            out=tmp_path_factory.mktemp("out") / "out",
        )
    )


def test_the_report_compares_f1_on_the_engines(report: Report, trained: Path) -> None:
    folder = load(trained / "model")
    data = open_data(rows_config(str(trained / "rows.jsonl"), max_length=16, stride=3), folder)
    (score,) = report.scores
    assert score.dense == data.task.score(statistics(data.task, data.test, forward_of(data.task, folder.model)))
    assert (report.task, score.metric, score.rows) == ("question-answering", "f1", len(data.test))
    assert score.unit is MetricUnit.POINTS
    assert score.dense > 0.8
    assert report.plan.heads_kept == 1
    assert sum(proof.stage in FLOAT_STAGES for proof in report.proofs) == 6
    assert all(proof.holds for proof in report.proofs)
    (note,) = (note for note in report.notes if note.code is NoteCode.TEXT_COLUMNS)
    assert "windows that share 3 tokens" in note.text
    assert any("eval_f1" in point.values for point in report.curves)
