"""Rows without labels are scored by what the whole model answers: by it, the model itself is right everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset

from compressor.model_folder import ModelFolder, load
from compressor.results import NoteCode
from compressor.tasks import Data, Task, open_data, statistics
from compressor.tasks.scoring import forward_of
from tests import folders
from tests.folders import WORDS, rows_config
from tests.tasks import questions, translations
from tests.tasks.rows import labelled_rows, tsv

TEXTS = [" ".join(words) for words in itertools.product(WORDS[:5], WORDS[3:9], WORDS[2:6])]


def save_classes(path: Path) -> Path:
    return folders.save(folders.bert(num_labels=3, initializer_range=0.5), path)


def save_several(path: Path) -> Path:
    kind = {"problem_type": "multi_label_classification"}
    return folders.save(folders.bert(num_labels=4, initializer_range=0.5, **kind), path)


def save_scorer(path: Path) -> Path:
    return folders.save(folders.bert(num_labels=1, initializer_range=0.5), path)


def save_numbers(path: Path) -> Path:
    kind = {"problem_type": "regression"}
    return folders.save(folders.bert(num_labels=2, initializer_range=0.5, **kind), path)


def save_tagger(path: Path) -> Path:
    return folders.save(folders.tagger(), path)


def save_reader(path: Path) -> Path:
    torch.manual_seed(0)
    questions.bert().save_pretrained(path)
    questions.wordpieces().save_pretrained(path)
    return path


def save_translator(path: Path) -> Path:
    return translations.save(translations.marian(), path)


PAIRS = tuple(f"{text}\t{TEXTS[-number]}" for number, text in enumerate(TEXTS))
QUESTIONS = tuple(
    f"who built\t{' '.join(itertools.islice(itertools.cycle(questions.WORDS), n % 7, n % 7 + 9 + n))}"
    for n in range(40)
)
SOURCES = tuple(translations.sentence(seed)[0] for seed in range(40))
CASES = [
    *((save, TEXTS, "text", {}) for save in (save_classes, save_several, save_scorer, save_numbers)),
    (save_tagger, TEXTS, "text", {"metric": "accuracy"}),
    (folders.save_sentence_encoder, PAIRS, "sentence1\tsentence2", {}),
    (folders.save_sentence_encoder, TEXTS, "text", {}),
    (save_reader, QUESTIONS, "question\tcontext", {"max_length": 24, "stride": 5}),
    (save_reader, QUESTIONS, "question\tcontext", {"max_length": 24, "stride": 5, "metric": "exact-match"}),
    (save_translator, SOURCES, "de", {"max_length": 12}),
]


def opened(folder: ModelFolder, source: str, **fields: Any) -> Data:
    """Rows without labels, of which those that are scored get the answers of the model."""
    return open_data(rows_config(source, **fields), folder, drawn_rows=8, bounds_loss=True)


def score(task: Task, folder: ModelFolder, examples: Dataset) -> float:
    return task.score(statistics(task, examples, forward_of(task, folder.model)))


@pytest.mark.parametrize(("save", "rows", "header", "fields"), CASES)
def test_the_model_is_right_on_its_own_answers(
    save: Callable[[Path], Path], rows: Sequence[str], header: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    folder = load(save(tmp_path / "model"), task="translation" if save is save_translator else None)
    data = opened(folder, tsv(tmp_path / "rows.tsv", *rows, header=header), **fields)
    assert data.scores_eval
    assert len(data.test)
    assert [note.code for note in data.notes].count(NoteCode.ANSWERS_AS_LABELS) == 2
    assert data.task.metric == data.eval_task.metric
    for examples in (data.eval, data.test):
        value = score(data.task, folder, examples)
        assert value == pytest.approx(min(data.task.metric_maximum, 100.0))
        assert value == pytest.approx(score(data.eval_task, folder, examples))
        assert all(isinstance(data.task.reference_text(row), str) for row in examples)
        assert data.task.metric_obstacle(examples) is None


def test_the_metric_of_single_texts_is_the_cosine_with_the_whole_model(tmp_path: Path) -> None:
    folder = load(folders.save_sentence_encoder(tmp_path / "model"))
    data = opened(folder, tsv(tmp_path / "rows.tsv", *TEXTS, header="text"))
    assert data.task.metric == "agreement (cosine)"
    rows = list(data.test)
    embeddings = np.array([row["sentence_embedding"] for row in rows])
    changed = embeddings + np.random.default_rng(0).normal(size=embeddings.shape)
    unit, changed_unit = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True) for matrix in (embeddings, changed))
    sums = data.task.per_example(changed, data.task.collate(rows)[data.task.label_name])
    assert data.task.score(sums) == pytest.approx((unit * changed_unit).sum(1).mean())


def test_retrieval_needs_documents_that_are_judged(tmp_path: Path) -> None:
    folder = load(folders.save_sentence_encoder(tmp_path / "model"))
    data = opened(folder, tsv(tmp_path / "rows.tsv", *TEXTS, header="text"), metric="recall@10")
    assert not data.scores_eval
    assert not len(data.test)


def test_the_metric_of_each_split_names_where_its_labels_are_from(classifier: ModelFolder, tmp_path: Path) -> None:
    plain = tsv(tmp_path / "plain.tsv", *TEXTS, header="text")
    data = opened(classifier, plain, test_data=tsv(tmp_path / "test.tsv", *labelled_rows(8)))
    assert (data.task.metric, data.eval_task.metric) == ("accuracy", "agreement (accuracy)")
    assert score(data.eval_task, classifier, data.eval) == 1.0
    assert data.of_chooser().task.metric == "agreement (accuracy)"


@pytest.mark.parametrize("metric", ["bleu", "loss"])
def test_the_targets_of_training_rows_are_generated(metric: str, tmp_path: Path) -> None:
    folder = load(save_translator(tmp_path / "model"), task="translation")
    source = tsv(tmp_path / "rows.tsv", *SOURCES, header="de")
    for scores_answers in (True, False):
        config = rows_config(source, max_length=12, metric=metric)
        data = open_data(config, folder, drawn_rows=8, bounds_loss=scores_answers)
        assert len(data.train) == 8
        assert any(data.train["reference"])
        assert data.scores_eval is scores_answers
        assert data.task.chooser.metric == ("loss" if metric == "bleu" else data.task.metric)
        assert data.task.collate(list(data.train))["decoder_input_ids"].shape[0] == 8


def test_targets_of_rows_are_not_replaced(tmp_path: Path) -> None:
    folder = load(save_translator(tmp_path / "model"), task="translation")
    pairs = [translations.sentence(seed) for seed in range(30)]
    source = tsv(tmp_path / "rows.tsv", *map("\t".join, pairs), header="de\ten")
    data = open_data(rows_config(source, max_length=12), folder, drawn_rows=8, bounds_loss=True)
    assert set(data.train["reference"]) <= {target for _, target in pairs}
    assert data.task.metric == "bleu"
    further = tsv(tmp_path / "further.tsv", *SOURCES, header="de")
    config = rows_config(source, max_length=12, unlabelled_data=further)
    joined = open_data(config, folder, drawn_rows=8, bounds_loss=True)
    assert len(joined.train) == len(data.train) + 8
    assert joined.train["reference"][: len(data.train)] == data.train["reference"][:]


@pytest.mark.parametrize(
    ("make", "metric"),
    [(folders.gpt2, "perplexity"), (lambda: hf.BertForMaskedLM(hf.BertConfig(**folders.SIZES)), "accuracy")],
)
def test_tokens_of_texts_are_labels(make: Callable[[], hf.PreTrainedModel], metric: str, tmp_path: Path) -> None:
    folder = load(folders.save(make(), tmp_path / "model"))
    data = opened(folder, tsv(tmp_path / "rows.tsv", *TEXTS, header="text"), max_length=12)
    assert (data.task.metric, data.eval_task.metric, data.scores_eval) == (metric, metric, True)
    assert len(data.test)


@pytest.mark.parametrize("names", [("eval_data",), ("eval_data", "test_data")])
def test_rows_that_are_named_to_be_scored_need_no_labels(
    names: tuple[str, ...], classifier: ModelFolder, tmp_path: Path
) -> None:
    train = tsv(tmp_path / "train.tsv", *TEXTS, header="text")
    plain = tsv(tmp_path / "plain.tsv", *TEXTS[::2], header="text")
    data = opened(classifier, train, **dict.fromkeys(names, plain))
    assert data.scores_eval
    assert len(data.test)
    assert score(data.eval_task, classifier, data.eval) == 1.0
