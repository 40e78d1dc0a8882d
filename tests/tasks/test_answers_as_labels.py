"""Rows without labels are scored by what the whole model answers: by it, the model itself is right everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from compressor.model_folder import ModelFolder, load
from compressor.results import NoteCode
from compressor.tasks import Data, Task, open_data, statistics
from compressor.tasks.forwards import forward_arguments
from compressor.tasks.scoring import with_answers
from tests import folders
from tests.folders import WORDS, rows_config
from tests.tasks.rows import tsv

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


FOLDERS = (save_classes, save_several, save_scorer, save_numbers, save_tagger, folders.save_sentence_encoder)


def opened(folder: ModelFolder, source: str, **fields: str) -> Data:
    """Rows without labels, of which those that are scored get the answers of the model."""

    def answer(task: Task, examples: Dataset) -> Dataset | None:
        return with_answers(task, examples, folder.model)

    return open_data(rows_config(source, **fields), folder, drawn_rows=8, answer=answer)


def score(data: Data, folder: ModelFolder, examples: Dataset) -> float:
    folder.model.eval()

    def forward(batch: dict[str, torch.Tensor]) -> object:
        with torch.no_grad():
            return data.task.logits(folder.model(**forward_arguments(folder.model, batch)))

    return data.task.score(statistics(data.task, examples, forward))  # type: ignore[arg-type]


@pytest.mark.parametrize("save", FOLDERS)
def test_the_model_is_right_on_its_own_answers(save: Callable[[Path], Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = load(save(tmp_path / "model"))
    rows = [f"{text}\t{TEXTS[-number]}" for number, text in enumerate(TEXTS)]
    pairs = save is folders.save_sentence_encoder
    source = tsv(tmp_path / "rows.tsv", *(rows if pairs else TEXTS), header="sentence1\tsentence2" if pairs else "text")
    data = opened(folder, source, **({"metric": "accuracy"} if save is save_tagger else {}))
    assert data.scores_eval
    assert len(data.test)
    assert [note.code for note in data.notes].count(NoteCode.ANSWERS_AS_LABELS) == 2
    for examples in (data.eval, data.test):
        assert score(data, folder, examples) == pytest.approx(1.0)


def test_single_texts_have_no_answers_to_agree_with(tmp_path: Path) -> None:
    folder = load(folders.save_sentence_encoder(tmp_path / "model"))
    data = opened(folder, tsv(tmp_path / "rows.tsv", *TEXTS, header="text"))
    assert not data.scores_eval
    assert not len(data.test)


@pytest.mark.parametrize("names", [("eval_data",), ("eval_data", "test_data")])
def test_rows_that_are_named_to_be_scored_need_no_labels(
    names: tuple[str, ...], classifier: ModelFolder, tmp_path: Path
) -> None:
    train = tsv(tmp_path / "train.tsv", *TEXTS, header="text")
    plain = tsv(tmp_path / "plain.tsv", *TEXTS[::2], header="text")
    data = opened(classifier, train, **dict.fromkeys(names, plain))
    assert data.scores_eval
    assert len(data.test)
    assert score(data, classifier, data.eval) == 1.0
