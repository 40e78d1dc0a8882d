"""Text classification: rows become tokens and classes, and logits become metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from tokenizers import processors

from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, fingerprint, load
from compressor.models.forwards import forward_arguments, tensors_of
from compressor.results import MetricUnit, NoteCode
from compressor.tasks import Data, open_data, statistics
from compressor.tasks.classification import TextClassification
from tests import folders
from tests.faults import fails_with
from tests.folders import rows_config
from tests.projection_models import xlnet
from tests.tasks.rows import forward_of, labelled_rows, token_ids, tsv
from tests.zoo import FAMILIES

SST2 = Path(__file__).parents[3] / "shared" / "data" / "sst2.tsv.xz"
MINILM = Path(__file__).parents[3] / "shared" / "models" / "minilm-sst2"


def test_rows_of_one_text_are_encoded(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "1\tgood film", "0\tvery bad", "1\tgood")
    data = open_data(rows_config(path, path, path), classifier)
    assert token_ids(data.train) == [[2, 5, 7, 3], [2, 11, 6, 3], [2, 5, 3]]
    assert list(data.train["labels"]) == [1, 0, 1]
    batch = data.task.collate([data.train[0], data.train[2]])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[2, 5, 7, 3], [2, 5, 3, 0]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]],
        "token_type_ids": [[0, 0, 0, 0], [0, 0, 0, 0]],
        "labels": [1, 1],
    }
    assert torch.isfinite(classifier.model(**tensors_of(batch)).loss)


def test_rows_are_padded_where_the_model_does_not_read(tmp_path: Path) -> None:
    """XLNet classifies by the last position, and its tokenizer pads before the first one."""
    torch.manual_seed(0)
    folder = load(folders.save(xlnet(), tmp_path / "xlnet"))
    folder.processor.padding_side = "left"
    path = tsv(tmp_path / "a.tsv", "1\tgood film", "0\tvery bad", "1\tgood")
    data = open_data(rows_config(path, path, path), folder)
    short, longer = data.train[2], data.train[0]
    with torch.no_grad():
        alone, batched = (
            folder.model(**forward_arguments(folder.model, tensors_of(data.task.collate(rows)))).logits[0]
            for rows in ([short], [short, longer])
        )
    torch.testing.assert_close(batched, alone, rtol=1e-5, atol=1e-6)


def test_rows_of_two_texts_are_encoded(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "0\tgood\tbad", "1\tbad\tgood", header="label\tpremise\thypothesis")
    data = open_data(rows_config(path, path, path), classifier)
    assert token_ids(data.train) == [[2, 5, 3, 6, 3], [2, 6, 3, 5, 3]]
    assert list(data.train["token_type_ids"][0]) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("names", [("text",), ("premise", "hypothesis")], ids=len)
def test_a_row_without_tokens_is_named(names: tuple[str, ...], classifier: ModelFolder, tmp_path: Path) -> None:
    tokenizer = folders.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    rows = ["\t".join([label, *[text] * len(names)]) for label, text in (("1", "good"), ("0", ""), ("1", "bad"))]
    path = tsv(tmp_path / "a.tsv", *rows, header="\t".join(["label", *names]))
    with fails_with(ErrorCode.INVALID_ROWS, row=2, column=",".join(names)) as caught:
        open_data(rows_config(path, path, path), replace(classifier, processor=tokenizer))
    assert all(repr(name) in str(caught.value) for name in names)


def test_labels_of_new_names_are_noted(tmp_path: Path) -> None:
    classifier = load(folders.save(folders.bert(), tmp_path / "model"))
    path = tsv(tmp_path / "a.tsv", "worse\tgood film", "better\tvery bad")
    noted, again = (open_data(rows_config(path, path, path), classifier) for _ in range(2))
    assert list(noted.train["labels"]) == list(again.train["labels"]) == [1, 0]
    assert [NoteCode.LABELS_NUMBERED in {note.code for note in data.notes} for data in (noted, again)] == [True, False]


def test_the_best_constant_answer_is_that_of_the_most_frequent_class(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "1\tgood film", "1\tgood", "0\tvery bad")
    task = open_data(rows_config(path, path, path), classifier).task
    assert task.constant_score(np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])) == pytest.approx(2 / 3)


def test_long_texts_are_truncated(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "0\t" + "good " * 40, "1\tbad")
    for max_length, lengths in ((6, [6, 3]), (999, [20, 3])):
        data = open_data(rows_config(path, path, path, max_length=max_length), classifier)
        assert list(data.train["length"]) == lengths
        assert [note.code for note in data.notes].count(NoteCode.ROWS_CUT) == 3


def test_empty_texts_are_counted(classifier: ModelFolder, tmp_path: Path) -> None:
    empty = tsv(tmp_path / "a.tsv", "0\tgood", "1\t", "1\t  ")
    full = tsv(tmp_path / "b.tsv", "0\tgood", "1\tbad")
    data = open_data(rows_config(empty, full, full), classifier)
    (note,) = (note for note in data.notes if note.code is NoteCode.TEXTS_EMPTY)
    assert str(empty) in note.text
    assert "2 of 3 rows in 'text'" in note.text


def test_rows_of_every_length_that_is_read_have_no_note(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "0\tgood good good good", "1\tbad")
    data = open_data(rows_config(path, path, path, max_length=6), classifier)
    assert NoteCode.ROWS_CUT not in {note.code for note in data.notes}


def test_a_model_of_three_classes_has_one_f1_whatever_is_predicted(tmp_path: Path) -> None:
    classifier = load(folders.save(folders.bert(num_labels=3), tmp_path / "model"))
    path = tsv(tmp_path / "a.tsv", "1\tgood", "0\tbad", "1\tfilm")
    task = open_data(rows_config(path, path, path, metric="f1"), classifier).task
    dense, changed = (np.array([[1.0, 1.0], [0.0, 0.0], [last, 1.0]]) for last in (1.0, 2.0))
    assert (task.score(dense), task.score(changed)) == (1.0, pytest.approx((1 + 2 / 3) / 2))


def test_rows_without_labels_are_encoded(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "1\tgood film", "0\tvery bad")
    data = open_data(rows_config(path, path, path), classifier)
    rows = Dataset.from_dict({"text": ["good film", "very bad"]})
    encoded = data.task.encode_unlabelled(rows, "rows")
    assert token_ids(encoded) == token_ids(data.test)
    assert list(encoded["labels"]) == [0, 0]


def test_a_language_model_that_classifies_gets_padding(tmp_path: Path) -> None:
    path = folders.save(folders.gpt2(hf.GPT2ForSequenceClassification), tmp_path / "model", with_tokenizer=False)
    tokenizer = folders.tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "[SEP]", None
    tokenizer.save_pretrained(path)
    folder = load(path)
    rows = tsv(tmp_path / "a.tsv", "0\tgood film", "1\tbad")
    data = open_data(rows_config(rows, rows, rows), folder)
    batch = data.task.collate(list(data.eval))
    assert batch["input_ids"].tolist() == [[2, 5, 7, 3], [2, 6, 3, 3]]
    assert "token_type_ids" not in batch  # GPT-2 has an input of this name for another purpose
    forward = forward_of(folder.model)
    single = [forward(data.task.collate([row])) for row in data.eval]
    assert forward(batch) == pytest.approx(np.concatenate(single), abs=1e-6)


def test_a_model_of_several_classes_per_row_has_no_largest_logit(tmp_path: Path) -> None:
    folder = load(folders.save(folders.bert(problem_type="multi_label_classification"), tmp_path / "model"))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="problem_type"):
        TextClassification(folder, rows_config(), TextClassification.metrics[0])


def test_rows_too_short_for_text_are_refused(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled_rows(8))
    with fails_with(ErrorCode.OUT_OF_RANGE, field="max_length", value=3, minimum=5):
        open_data(rows_config(path, max_length=3), classifier)


def test_a_loss_does_not_change_the_fingerprint(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled_rows(8))
    data = open_data(rows_config(path, path, path), classifier)
    # transformers writes the kind of loss to the configuration
    classifier.model(**tensors_of(data.task.collate(list(data.train))))
    assert fingerprint(classifier.model) == classifier.fingerprint


def test_a_model_without_token_types_gets_no_token_types(tmp_path: Path) -> None:
    distilbert, _ = FAMILIES["distilbert"](0)
    rows = tsv(tmp_path / "a.tsv", "0\tgood\tbad", "1\tbad\tgood", header="label\tpremise\thypothesis")
    data = open_data(rows_config(rows, rows, rows), load(folders.save(distilbert, tmp_path / "model")))
    assert list(data.task.collate(list(data.eval))) == ["input_ids", "attention_mask", "labels"]


@pytest.mark.parametrize(
    ("metric", "expected", "unit", "heading"),
    [
        ("accuracy", 0.6, MetricUnit.POINTS, "accuracy, %"),
        ("f1", 2 / 3, MetricUnit.POINTS, "f1, %"),
        ("matthews", 1 / 6, MetricUnit.RAW, "matthews"),
    ],
)
def test_metrics_of_classes(
    metric: str, expected: float, unit: MetricUnit, heading: str, classifier: ModelFolder, tmp_path: Path
) -> None:
    rows = tsv(tmp_path / "a.tsv", *labelled_rows(40))
    task = open_data(rows_config(rows, rows, rows, metric=metric), classifier).task
    predicted, labels = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1])
    assert task.score(task.per_example(np.eye(2)[predicted], labels)) == pytest.approx(expected)
    assert (task.metric, task.metric_unit, task.metric_heading) == (metric, unit, heading)
    assert (task.higher_is_better, task.metric_maximum) == (True, 1)


@pytest.mark.parametrize(("metric", "label"), [("matthews", "0"), ("matthews", "1"), ("f1", "0")])
def test_rows_of_one_class_have_no_metric(metric: str, label: str, classifier: ModelFolder, tmp_path: Path) -> None:
    rows, test = tsv(tmp_path / "a.tsv", *labelled_rows(40)), tsv(tmp_path / "b.tsv", *[f"{label}\tgood"] * 8)
    with fails_with(ErrorCode.INVALID_ROWS, field="test_data"):
        open_data(rows_config(rows, rows, test, metric=metric), classifier)
    assert len(open_data(rows_config(rows, rows, test), classifier).test) == 8


@pytest.fixture(scope="module")
def sst2() -> tuple[ModelFolder, Data]:
    """MiniLM with the dev and test rows; encoding the 67 thousand rows that trained it takes a while."""
    if not (SST2.exists() and MINILM.exists()):
        pytest.skip("needs the data sets and models next to the project folder")
    folder = load(MINILM)
    return folder, open_data(rows_config(None, str(SST2), str(SST2), max_length=64), folder)


@pytest.mark.parametrize(("stride", "accuracy"), [(4, 0.8983), pytest.param(1, 0.898, marks=pytest.mark.zoo)])
def test_minilm_on_sst2(stride: int, accuracy: float, sst2: tuple[ModelFolder, Data]) -> None:
    folder, data = sst2
    assert [len(part) for part in (data.train, data.eval, data.test)] == [0, 706, 1_439]
    rows = data.eval.select(range(0, len(data.eval), stride))
    score = data.task.score(statistics(data.task, rows, forward_of(folder.model)))
    assert score == pytest.approx(accuracy, abs=5e-4)
