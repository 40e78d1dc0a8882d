"""Question answering: questions become windows, and logits become F1 and exact match of each question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, UsageError
from compressor.results import NoteCode
from compressor.selection.gradient_importance import sensitivity
from compressor.tasks import batches, open_data, statistics
from compressor.tasks.squad import Answer
from compressor.units import find_sites
from tests import folders
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.questions import WORDS, bert, encode, folder_of, row, task_of, wordpieces
from tests.tasks.rows import jsonl

LONG = row("who built the tower of the city of paris", "who", Answer("paris", 35))


@pytest.fixture
def model() -> PreTrainedModel:
    """A BERT whose weights are large enough for its outputs to differ."""
    torch.manual_seed(0)
    model = bert()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def test_answers_that_no_window_holds_are_noted(tmp_path: Path) -> None:
    long = " ".join(["river"] * 12)
    file = jsonl(
        tmp_path / "rows.jsonl", row(long, "who", Answer(long, 0)), row("rome paris", "who", Answer("rome", 0))
    )
    data = open_data(rows_config(file, file, file, max_length=10, stride=2), folder_of(wordpieces()))
    assert [note.code for note in data.notes].count(NoteCode.ANSWERS_CUT) == 3


def test_the_metric_is_a_mean_over_questions() -> None:
    measured = np.array([[1.0, 1.0], [0.5, 0.0]])
    assert task_of(wordpieces()).score(measured) == 0.75
    assert task_of(wordpieces(), metric="exact-match").score(measured) == 0.5


def test_a_question_is_scored_alike_in_any_batch() -> None:
    task = task_of(wordpieces())
    long = " ".join(["river"] * 40)
    rows = encode(task, row("rome paris"), row(f"{long} paris", "who", Answer("paris", len(long) + 1)), row("tower"))
    assert [len(ids) for ids in rows["input_ids"]] == [1, 3, 1]
    city = wordpieces().convert_tokens_to_ids("paris")

    def prefer_city(batch: dict[str, torch.Tensor]) -> np.ndarray:
        """Logits that are large for tokens of the context and largest for the city."""
        scores = 9.0 * (batch["input_ids"].numpy() == city) + (batch["token_type_ids"].numpy() == 1)
        return np.repeat(scores[..., None], 2, axis=-1)

    for size in (1, 2, 3):
        assert statistics(task, rows, prefer_city, size).tolist() == [[0, 0], [1, 1], [1, 1]]


def test_values_of_windows_are_averaged_over_their_question() -> None:
    task = task_of(wordpieces())
    batch = task.collate(list(encode(task, row("rome paris"), row(" ".join(["river"] * 40)), row("tower"))))
    assert task.example_means(torch.tensor([5.0, 1.0, 2.0, 6.0, 7.0]), batch).tolist() == [5, 3, 7]
    assert task.model_inputs(batch).keys() == {"input_ids", "token_type_ids", "attention_mask"}


def test_long_questions_are_truncated_and_leave_room() -> None:
    task = task_of(wordpieces())
    rows = encode(task, row("rome paris", " ".join(["river"] * 50)))
    (window,) = task.questions[rows[0]["number"]].windows
    assert (window.first, len(window.characters), rows["length"][0]) == (12, 2, 15)


def test_an_example_is_as_many_rows_as_it_has_windows(tmp_path: Path) -> None:
    rows = jsonl(
        tmp_path / "a.jsonl", {"question": "who", "context": "in rome " * 20, "answers": [{"text": "rome", "start": 3}]}
    )
    data = open_data(rows_config(rows, rows, rows, max_length=12, stride=2), folder_of(wordpieces()))
    batch = data.task.collate(list(data.test))
    assert data.task.size_limits(data.test) == tuple(batch["input_ids"].shape)
    assert data.task.size_limits(data.test)[0] > 1


def test_columns_can_be_named(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "a.jsonl", {"q": "who", "c": "in rome", "gold": [{"text": "rome", "start": 3}]})
    config = rows_config(rows, rows, rows, text_columns=("q", "c"), label_column="gold")
    data = open_data(config, folder_of(wordpieces()))
    assert data.test["labels"][0] == [[4, 4]]
    (note,) = data.notes
    assert note.code is NoteCode.TEXT_COLUMNS
    assert "each 'q' is answered by a span of its 'c'" in note.text


def test_batches_hold_windows() -> None:
    task = task_of(wordpieces(), max_length=12, stride=2)
    rows = encode(task, row("in rome"), row("the tower of the city of paris", "who", Answer("paris", 25)))
    batch = task.collate(list(rows))
    assert batch["input_ids"].shape == batch["token_type_ids"].shape == batch["attention_mask"].shape == (2, 11)
    assert batch["attention_mask"].sum(1).tolist() == [6, 11]
    assert batch["spans"].tolist() == [[[3, 3, 0]], [[9, 9, 1]]]
    spans = task.collate(list(encode(task, row("in rome"), LONG)))["spans"]
    assert spans.tolist() == [[[3, 3, 2], [-100] * 3], [[0, 0, 3], [5, 5, 3]]]


def test_the_loss_equals_that_of_the_model_over_windows(model: PreTrainedModel) -> None:
    task = task_of(wordpieces(), max_length=12, stride=2)
    outputs = model(**task.loss_inputs(task.collate(list(encode(task, row("in rome"), LONG)))))
    positions = torch.tensor([3, 0, 5])
    logits = (outputs.start_logits, outputs.end_logits)
    losses = [torch.nn.functional.cross_entropy(scores, positions) for scores in logits]
    torch.testing.assert_close(outputs.loss, torch.stack(losses).mean())


def test_sensitivity_weighs_every_window_alike(model: PreTrainedModel) -> None:
    """All windows are full, since the loss of the model includes padding."""
    task = task_of(wordpieces(), max_length=12, stride=2)
    rows = encode(task, *(row(" ".join((WORDS * 3)[start : start + count])) for start, count in enumerate((8, 20, 14))))
    sites = find_sites(model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})
    every_head = torch.ones(2, dtype=torch.bool)
    together, single = (
        sensitivity(model, sites, every_head, [task.loss_inputs(batch) for _, batch in batches(task, rows, size)])
        for size in (3, 1)
    )
    assert (together > 0).all()
    torch.testing.assert_close(together, single, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "fields", "code", "details"),
    [
        (("text", "label"), {}, ErrorCode.COLUMN_MISSING, {"field": "text_columns", "columns": ("text", "label")}),
        (("question", "context"), {}, ErrorCode.COLUMN_MISSING, {"field": "label_column"}),
        (
            ("question", "context"),
            {"text_columns": ("question",)},
            ErrorCode.INVALID_VALUE,
            {"field": "text_columns", "value": ("question",)},
        ),
        (
            ("question", "context"),
            {"label_column": "gold"},
            ErrorCode.COLUMN_MISSING,
            {"field": "label_column", "value": "gold"},
        ),
    ],
)
def test_missing_columns_are_refused(
    names: tuple[str, ...], fields: dict[str, Any], code: ErrorCode, details: dict[str, Any], tmp_path: Path
) -> None:
    rows = jsonl(tmp_path / "a.jsonl", dict.fromkeys(names, "who"))
    with fails_with(code, **details):
        open_data(rows_config(rows, rows, rows, **fields), folder_of(wordpieces()))


class SlowTokenizer:
    """A tokenizer implemented in Python."""

    is_fast = False


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, tokenizer="SlowTokenizer"):
        task_of(SlowTokenizer())


def test_windows_without_room_are_refused() -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, field="max_length", value=6, minimum=7):
        task_of(wordpieces(), max_length=6)


def test_an_unknown_metric_is_refused(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "a.jsonl", row("in rome"))
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="metric", known=("f1", "exact-match")):
        open_data(rows_config(rows, metric="bleu"), folder_of(wordpieces()))


def test_a_model_without_spans_is_refused() -> None:
    outputs = folders.bert()(input_ids=torch.ones(1, 2, dtype=torch.int64))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, output="start_logits", task="question-answering"):
        task_of(wordpieces()).logits(outputs)
