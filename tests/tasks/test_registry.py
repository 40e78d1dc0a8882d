"""The task of a folder: every task can be named, and every name has one unit."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from compressor.config.tasks import TASKS, TaskEntry
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder, load, model_class
from compressor.results import MetricUnit
from compressor.tasks import base, make_task, task_classes
from compressor.tasks.causal_lm import CausalLM, CharacterStreams, Streams
from compressor.tasks.classification import TextClassification
from compressor.training.tokenizers import characters
from tests import folders, language
from tests.faults import fails_with
from tests.folders import rows_config


@pytest.mark.parametrize("entry", TASKS, ids=lambda entry: entry.path)
def test_a_task_has_the_name_of_its_entry(entry: TaskEntry) -> None:
    assert entry.load().name == entry.name


def test_a_task_of_a_new_name_loads_the_model_class_of_its_entry(
    classifier: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ToyDetection(TextClassification):
        name = "toy-detection"

    monkeypatch.setitem(sys.modules, "toy", SimpleNamespace(ToyDetection=ToyDetection))
    entries = (*TASKS, TaskEntry("toy-detection", "toy:ToyDetection", "text-classification"))
    for module in (base, model_class):
        monkeypatch.setattr(module, "TASKS", entries)
        monkeypatch.setattr(module, "TASK_NAMES", tuple(entry.name for entry in entries))
    folder = load(classifier.path, task="toy-detection")
    assert (type(folder.model), folder.task) == (type(classifier.model), "toy-detection")
    assert isinstance(make_task(folder, rows_config()), ToyDetection)


def test_the_first_class_that_accepts_a_folder_is_its_task(gpt2: ModelFolder) -> None:
    words, letters = language.folder(), language.folder(characters())
    assert [type(make_task(folder, rows_config())) for folder in (gpt2, words, letters)] == [
        CausalLM,
        Streams,
        CharacterStreams,
    ]


def test_a_metric_has_one_unit_and_one_direction_under_its_name() -> None:
    metrics = [metric for task in task_classes() for metric in task.metrics]
    meanings = {(metric.name, metric.unit, metric.higher_is_better) for metric in metrics}
    assert len(meanings) == len({metric.name for metric in metrics})


def test_shares_are_in_points_and_other_metrics_are_raw() -> None:
    units = {metric.name: metric.unit for task in task_classes() for metric in task.metrics}
    assert {name for name, unit in units.items() if unit is MetricUnit.POINTS} == {
        "accuracy",
        "f1",
        "micro-f1",
        "macro-f1",
        "map",
        "mrr@10",
        "exact-match",
        "recall@10",
        "ndcg@10",
        "top5",
    }
    assert (MetricUnit.POINTS.scale, MetricUnit.RAW.scale) == (100, 1)


def test_unknown_metrics_are_refused(classifier: ModelFolder) -> None:
    known = ("accuracy", "f1", "matthews")
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="metric", value="bleu", known=known):
        make_task(classifier, rows_config(metric="bleu"))
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, value="bits-per-character", known=("perplexity",)):
        make_task(language.folder(), rows_config(metric="bits-per-character"))


def test_a_folder_without_tokenizer_has_no_task(tmp_path: Path) -> None:
    path = folders.save(folders.bert(), tmp_path, with_tokenizer=False)
    with fails_with(ErrorCode.FILE_MISSING, path=path / "tokenizer.json"):
        make_task(load(path, needs_processor=False), rows_config())


def test_a_task_without_rows_is_refused(tmp_path: Path) -> None:
    encoder = load(folders.save(folders.bert_encoder(), tmp_path))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, task="feature-extraction"):
        make_task(encoder, rows_config())
