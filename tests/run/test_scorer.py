"""Scores of a model with successive weights: a module of PyTorch, and the graph of a file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from compressor.model_folder import ModelFolder, load
from compressor.model_folder.access import ModelAccess
from compressor.models.forwards import forward_arguments, tensors_of
from compressor.progress import NullListener, RunLog
from compressor.pruning.bisect import ResampledScore
from compressor.run.scorer import Scorer, metric_sums
from compressor.tasks import Data, open_data
from compressor.training.distillation import Distillation
from tests import folders
from tests.graph.files import arrays, classifier, npz
from tests.tasks import questions
from tests.tasks.rows import jsonl, tsv
from tests.training.students import changed


def regression(path: Path) -> tuple[ModelFolder, Data]:
    """A regression with one row more than a batch holds."""
    rows = [f"{number % 7}\t{' '.join(folders.WORDS[number % 9 : number % 9 + 5])}" for number in range(33)]
    file = tsv(path / "rows.tsv", *rows)
    torch.manual_seed(0)
    folder = load(folders.save(folders.bert(num_labels=1), path / "model"))
    return folder, open_data(folders.rows_config(file, file, file), folder)


def question_answering(path: Path) -> tuple[ModelFolder, Data]:
    """Questions about contexts of several windows."""
    contexts = [" ".join(questions.WORDS[: 2 + number]) for number in range(10)]
    file = jsonl(path / "rows.jsonl", *(questions.row(context) for context in contexts))
    folder = questions.folder_of(questions.wordpieces())
    return folder, open_data(folders.rows_config(file, file, file, max_length=10, stride=2), folder)


def graph(path: Path) -> tuple[ModelFolder, Data]:
    """Arrays, whose labels are the answers of the whole graph."""
    file, rows = classifier(path / "model.onnx"), npz(path / "rows.npz", **arrays(33))
    folder = load(file, rows=arrays(33))
    return folder, open_data(folders.rows_config(*[str(rows)] * 3), folder, drawn_rows=8)


def changed_state(model: ModelAccess) -> dict[str, np.ndarray]:
    """Other weights."""
    rng, state = np.random.default_rng(0), model.state()
    noise = {name: rng.normal(0, 0.05, values.shape) for name, values in state.items()}
    return {name: (values + noise[name]).astype(values.dtype) for name, values in state.items()}


@pytest.mark.parametrize("source", [regression, question_answering, graph])
def test_scores_are_those_of_the_rows(source: Callable[[Path], tuple[ModelFolder, Data]], tmp_path: Path) -> None:
    folder, data = source(tmp_path)
    model, log = folder.access, RunLog(NullListener())
    scorer = Scorer(model, data.task, data.eval, 0, log)
    whole, before = scorer.score_whole(), {name: values.copy() for name, values in scorer.whole_state.items()}
    same = scorer.score("the same weights")
    assert (same.metric, same.divergence) == (whole.metric, pytest.approx(0, abs=1e-9))
    np.testing.assert_array_equal(same.draws, whole.draws)
    model.load_state(changed_state(model))
    changed = scorer.score("other weights")
    values = metric_sums(model.forward(), data.task, data.eval, "other weights", log)
    assert changed.metric == data.task.score(values)
    assert 0 < changed.divergence < np.inf
    assert all(np.array_equal(values, before[name]) for name, values in scorer.whole_state.items())


@pytest.mark.parametrize(
    ("metric", "rows", "has_ceiling"), [("accuracy", 120, True), ("f1", 120, False), ("accuracy", 60, False)]
)
def test_only_the_accuracy_of_enough_rows_has_a_ceiling(
    metric: str, rows: int, has_ceiling: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    folder = load(folders.save(folders.bert(initializer_range=0.5), tmp_path / "model"))
    lines = [f"{number % 3 % 2}\t{' '.join(folders.WORDS[number % 7 : number % 9 + 5])}" for number in range(rows)]
    file = tsv(tmp_path / "rows.tsv", *lines)
    data = open_data(folders.rows_config(file, file, file, metric=metric), folder)
    scorer = Scorer(folder.access, data.task, data.eval, 0, RunLog(NullListener()))
    whole = scorer.score_whole()
    assert (whole.ceiling is not None) == has_ceiling
    folder.access.load_state(changed_state(folder.access))
    changed = scorer.score("other weights")
    assert (changed.ceiling is not None) == has_ceiling
    if whole.ceiling is not None and changed.ceiling is not None:
        assert whole.ceiling == pytest.approx(3 / rows, rel=0.02)
        assert whole.ceiling <= changed.ceiling
    stored = TypeAdapter(ResampledScore)
    read = stored.validate_json(stored.dump_json(changed))
    assert (read.metric, read.divergence, read.ceiling) == (changed.metric, changed.divergence, changed.ceiling)


def test_outputs_that_are_no_classes_have_no_ceiling(tmp_path: Path) -> None:
    """Rows of spans have as many logits as positions; the answers of the whole graph are its labels."""
    sources = {regression: False, question_answering: False, graph: True}
    for number, (source, has_ceiling) in enumerate(sources.items()):
        (path := tmp_path / str(number)).mkdir()
        folder, data = source(path)
        scorer = Scorer(folder.access, data.eval_task, data.eval, 0, RunLog(NullListener()))
        assert (scorer.score_whole().ceiling is not None) == has_ceiling


def test_the_whole_model_computes_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = load(folders.save(folders.bert(), tmp_path / "model"))
    file = tsv(tmp_path / "rows.tsv", *(f"{number % 2}\tword {number}" for number in range(20)))
    data = open_data(folders.rows_config(file, file, file), folder)
    model, computed = folder.model.eval(), []
    forward = type(model).forward

    @functools.wraps(forward)
    def counted(self: nn.Module, *args: object, **inputs: Tensor) -> object:
        computed.extend(["model" if self is model else "whole model"] * len(inputs["input_ids"]))
        return forward(self, *args, **inputs)

    monkeypatch.setattr(type(model), "forward", counted)
    scorer = Scorer(folder.access, data.task, data.eval, 0, RunLog(NullListener()))
    scores = [scorer.score_whole(), scorer.score("trial 1"), scorer.score("trial 2")]
    assert [score.divergence for score in scores] == pytest.approx([0, 0, 0], abs=1e-9)
    assert computed.count("whole model") <= 2 * 20  # a batch beforehand shows whether the task is a regression
    assert computed.count("model") == 2 * 20


def test_the_divergence_of_a_regression_is_over_the_variance_of_all_rows(tmp_path: Path) -> None:
    """One row is left for the last batch, whose own variance is zero."""
    folder, data = regression(tmp_path)
    model, student = folder.model.eval(), changed(folder.model).eval()
    distillation = Distillation.of(model, data.task.loss_outputs).with_variance_of(data.task, data.eval)
    batch = tensors_of(data.task.model_inputs(data.task.collate(list(data.eval))))
    with torch.no_grad():
        dense, trained = (part(**forward_arguments(part, batch)).logits.double() for part in (model, student))
    expected = float((dense - trained).square().mean() / dense.var(correction=0))
    assert distillation.mean_divergence(student, data.task, data.eval) == pytest.approx(expected, rel=1e-4)
