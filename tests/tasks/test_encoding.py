"""Encoded rows and answers as text for a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.model_folder import ModelFolder
from compressor.tasks import Task, make_task, open_data
from compressor.tasks.encoding import row_texts, shorten
from tests import folders
from tests.folders import rows_config
from tests.tasks.questions import encode, row, task_of, wordpieces
from tests.tasks.rows import forward_of, text, tsv
from tests.tasks.translations import open_pairs


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([2, 5, 7, 3], ("good film",)),
        ([2, 5, 7, 3, 6, 8, 3, 0, 0], ("good film", "bad plot")),
        ([[2, 5, 3], [2, 6, 7, 3]], ("good", "bad film")),
        ([[2, 5, 3, 6, 3], [2, 5, 3, 7, 3]], ("good", "bad")),
        ([2, 5, 4, 1, 3], ("good [MASK] [UNK]",)),
        ([2, 3], ()),
        ([], ()),
    ],
)
def test_texts_are_what_is_between_the_special_tokens(ids: Any, texts: tuple[str, ...]) -> None:
    assert row_texts({"input_ids": ids}, folders.tokenizer()) == texts


def test_rows_without_tokens_or_tokenizer_have_no_text() -> None:
    assert row_texts({"pixel_values": [0.5]}, folders.tokenizer()) == row_texts({"input_ids": [5]}, None) == ()


def test_texts_are_cut_and_on_one_line() -> None:
    assert shorten("a\n b") == "a b"
    assert [len(shorten("x" * length)) for length in (120, 121, 500)] == [120, 120, 120]
    assert shorten("x" * 121).endswith("…")


def answers(task: Task, logits: Any, labels: Any) -> list[str]:
    return list(task.answer_texts(np.array(logits), np.array(labels)))


def test_a_class_reads_as_its_name(classifier: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "rows.tsv", *(f"{('good', 'bad')[n % 2]}\tthe film {n}" for n in range(8)))
    data = open_data(rows_config(test_data=rows), classifier)
    assert answers(data.task, [[1, 0], [0, 1]], [0, 0]) == ["bad", "good"]
    assert [data.task.reference_text(row) for row in data.test.select([0, 1])] == ["good", "bad"]


def test_a_number_reads_as_such(scorer: ModelFolder) -> None:
    task = make_task(scorer, rows_config())
    assert answers(task, [[0.25], [-1234.567]], [0, 0]) == ["0.25", "-1235"]
    assert task.reference_text({"labels": 2.0}) == "2"


def test_a_block_reads_as_its_metric(gpt2: ModelFolder, tmp_path: Path) -> None:
    data = open_data(rows_config(test_data=text(tmp_path / "t.txt", *["the good film"] * 20)), gpt2)
    (answer,) = data.task.answers(forward_of(gpt2.model), [data.test[0]])
    metric = data.task.score(data.task.measure(forward_of(gpt2.model), [data.test[0]]))
    assert answer == f"perplexity {metric:.4g}"


def test_an_answer_reads_as_its_span() -> None:
    task = task_of(wordpieces())
    rows = encode(task, row("rome paris"), row("tower river"))
    batch = task.collate(list(rows))
    last = np.zeros((*batch["input_ids"].shape, 2))
    last[:, -2] = 1.0  # the last token of the context
    assert answers(task, last, batch["spans"]) == ["paris", "river"]
    assert [task.reference_text(example) for example in rows] == [example["reference"][0] for example in rows]


def test_a_translation_reads_as_the_generated_text(translator: ModelFolder, trained_translator: Path) -> None:
    data = open_pairs(translator, str(trained_translator / "rows.tsv"))
    rows, forward = [data.test[0], data.test[1]], forward_of(translator.model)
    assert list(data.task.answers(forward, rows)) == [row["reference"] for row in rows]
    assert data.task.reference_text(rows[0]) == rows[0]["reference"]
    assert list(data.task.chooser.answers(forward, rows)) == [], "the loss generates nothing"
