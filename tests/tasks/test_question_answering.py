"""Question answering: questions become windows, and logits become F1 and exact match of each question."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, UsageError
from compressor.models.forwards import tensors_of
from compressor.results import NoteCode
from compressor.selection.subset_evaluator import sensitivity
from compressor.tasks import batches, open_data, statistics
from compressor.tasks.base import Batch
from compressor.tasks.data import rows_hash
from compressor.tasks.question_answering import Answer, best_span, exact_match, f1
from compressor.units import find_sites
from tests import folders
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.questions import CONTEXTS, WORDS, bert, byte_pieces, encode, folder_of, row, task_of, wordpieces
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

    def prefer_city(batch: Batch) -> np.ndarray:
        """Logits that are large for tokens of the context and largest for the city."""
        scores = 9.0 * (batch["input_ids"] == city) + (batch["token_type_ids"] == 1)
        return np.repeat(scores[..., None], 2, axis=-1)

    for size in (1, 2, 3):
        assert statistics(task, rows, prefer_city, size).tolist() == [[0, 0], [1, 1], [1, 1]]


def test_values_of_windows_are_averaged_over_their_question() -> None:
    task = task_of(wordpieces())
    batch = task.collate(list(encode(task, row("rome paris"), row(" ".join(["river"] * 40)), row("tower"))))
    assert task.example_means(np.array([5.0, 1.0, 2.0, 6.0, 7.0]), batch).tolist() == [5, 3, 7]
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
    outputs = model(**tensors_of(task.loss_inputs(task.collate(list(encode(task, row("in rome"), LONG))))))
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
        sensitivity(
            model, sites, every_head, [tensors_of(task.loss_inputs(batch)) for _, batch in batches(task, rows, size)]
        )
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


TASKS = {make: task_of(make()) for make in (wordpieces, byte_pieces)}


@pytest.mark.parametrize("tokenizer", TASKS)
@settings(max_examples=12, deadline=None)
@given(CONTEXTS, st.text("ab ", min_size=1, max_size=40).filter(str.strip))
def test_windows_lose_nothing_of_a_context(tokenizer: Any, context: str, question: str) -> None:
    task = TASKS[tokenizer]
    example = encode(task, row(context, question))[0]
    windows = task.questions[example["number"]].windows
    covered = np.zeros(len(context), bool)
    for window in windows:
        for start, end in window.characters:
            covered[start:end] = True
    assert all(in_window or letter.isspace() for letter, in_window in zip(context, covered, strict=True))
    assert all(len(ids) <= 24 for ids in example["input_ids"])
    for window, following in itertools.pairwise(windows):
        assert np.array_equal(window.characters[-5:], following.characters[:5])


@pytest.mark.parametrize("tokenizer", TASKS)
@settings(max_examples=15, deadline=None)
@given(CONTEXTS, st.data())
def test_the_tokens_of_an_answer_give_its_text(tokenizer: Any, context: str, draw: st.DataObject) -> None:
    """This holds in every window with the whole answer; in other windows the label is the first token."""
    words = context.split(" ")
    first = draw.draw(st.integers(0, len(words) - 1))
    last = draw.draw(st.integers(first, min(first + 2, len(words) - 1)))
    answer = " ".join(words[first : last + 1])
    start = len(" ".join(words[:first])) + (first > 0)
    task = TASKS[tokenizer]
    example = encode(task, row(context, "who", Answer(answer, start)))[0]
    for window, (begin, end) in zip(task.questions[example["number"]].windows, example["labels"], strict=True):
        inside = window.characters[0, 0] <= start and window.characters[-1, 1] >= start + len(answer)
        assert (begin, end) == (0, 0) or inside
        if inside:
            span = window.characters[begin - window.first][0], window.characters[end - window.first][1]
            assert context[slice(*span)].strip() == answer


@given(st.lists(st.tuples(*(st.integers(-4, 4),) * 2), min_size=1, max_size=12), st.integers(1, 5))
def test_the_best_span_is_the_best_of_all(logits: list[tuple[int, int]], longest: int) -> None:
    start, end = np.array(logits, float).T
    spans = [(i, j) for i in range(len(logits)) for j in range(i, min(i + longest, len(logits)))]
    score, first, last = best_span(start, end, longest)
    assert (first, last) in spans
    assert score == start[first] + end[last] == max(start[i] + end[j] for i, j in spans)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 60), st.integers(0, 999))
def test_the_prediction_is_the_best_span_of_any_window(words: int, seed: int) -> None:
    """Compared with all windows and spans; neither question, special tokens nor padding can be predicted."""
    rng = np.random.default_rng(seed)
    task = TASKS[wordpieces]
    context = " ".join(f"{WORDS[rng.integers(len(WORDS))]}" for _ in range(words))
    question = task.questions[encode(task, row(context))[0]["number"]]
    logits = rng.normal(size=(len(question.windows), 24, 2))
    logits[:, :3] += 9
    spans = [
        (scores[window.first + i, 0] + scores[window.first + j, 1], characters[i, 0], characters[j, 1])
        for scores, window in zip(logits, question.windows, strict=True)
        for characters in [window.characters]
        for i in range(len(characters))
        for j in range(i, min(i + 30, len(characters)))
    ]
    _, begin, end = max(spans)
    assert question.predict(logits) == Answer(context[begin:end], begin)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected_f1", "expected_match"),
    [
        ("Paris", ["Paris"], 1, 1),
        ("the Paris!", ["paris"], 1, 1),
        ("in Paris", ["Paris"], 2 / 3, 0),  # one word of two is right, and it is the only one of the answer
        ("Paris, France", ["London", "Paris in France"], 4 / 5, 0),  # 2 of 2, and 2 of 3
        ("the the cat", ["cat cat"], 2 / 3, 0),  # a word counts as often as both contain it
        ("Rome", ["Paris"], 0, 0),
        ("", ["Paris"], 0, 0),
        ("the", ["a"], 1, 1),
    ],
)
def test_metrics_worked_by_hand(prediction: str, answers: list[str], expected_f1: float, expected_match: float) -> None:
    assert f1(prediction, answers) == pytest.approx(expected_f1)
    assert exact_match(prediction, answers) == expected_match


@settings(deadline=None)
@given(*(st.text("abtheAn .,-é'", max_size=30),) * 3)
def test_metrics_of_any_texts(prediction: str, answer: str, alternative: str) -> None:
    score = f1(prediction, [answer])
    assert 0 <= score <= 1
    assert score == f1(answer, [prediction])
    assert score == 1 or not exact_match(prediction, [answer])
    assert f1(f"The {prediction.upper()}.", [answer]) == score
    assert f1(prediction, [answer, alternative]) == max(score, f1(prediction, [alternative]))
    assert exact_match(prediction, [alternative, prediction]) == 1


def test_answers_have_several_forms(tmp_path: Path) -> None:
    context = "the tower in paris"
    texts, starts = ["paris", "in paris"], [13, 10]
    as_list = [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
    forms: list[Any] = [
        as_list,
        [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)],
        {"text": texts, "answer_start": starts},
        json.dumps(as_list),
        json.dumps({"text": texts, "answer_start": starts}),
    ]
    files = [
        jsonl(tmp_path / f"{number}.jsonl", {"context": context, "question": "who", "answers": form})
        for number, form in enumerate(forms)
    ]
    table = tmp_path / "rows.tsv"
    table.write_text(f"passage\tquestion\tanswer\n{context}\twho\t{json.dumps(as_list)}\n")
    folder = folder_of(wordpieces())
    rows = [open_data(rows_config(name, name, name), folder).test for name in (*files, str(table))]
    assert rows[0]["reference"][0] == texts
    assert len({rows_hash(part) for part in rows}) == 1


@pytest.mark.parametrize(
    ("change", "details"),
    [
        ({"answers": [{"text": "rome", "start": 2}]}, {"column": "answers", "value": "rome", "start": 2}),
        ({"answers": [{"text": "rome", "start": -4}]}, {"column": "answers", "value": "rome", "start": -4}),
        ({"answers": [{"text": "rome", "start": 99}]}, {"column": "answers", "value": "rome", "start": 99}),
        ({"answers": [{"text": "rome", "start": 3.5}]}, {"column": "answers"}),
        ({"answers": [{"text": " ", "start": 2}]}, {"column": "answers", "value": " ", "start": 2}),
        ({"answers": []}, {"column": "answers", "value": None}),
        ({"answers": None}, {"column": "answers", "value": None}),
        ({"context": " "}, {"column": "context"}),
        ({"question": None}, {"column": "question"}),
    ],
)
def test_faults_of_a_row_name_it(change: dict[str, Any], details: dict[str, Any], tmp_path: Path) -> None:
    valid = row("in rome", "who", Answer("rome", 3))
    rows = jsonl(tmp_path / "a.jsonl", valid, {**valid, **change})
    with fails_with(ErrorCode.INVALID_ROWS, row=2, **details):
        open_data(rows_config(rows, rows, rows), folder_of(wordpieces()))


@pytest.mark.parametrize(
    "cell",
    [
        "rome",
        '{"text": "rome"}',
        '{"text": ["rome"], "answer_start": []}',
        "[1]",
        "[",
        '[{"text": "rome", "start": Infinity}]',
    ],
)
def test_cells_without_answers_are_refused(cell: str, tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "a.jsonl", {"context": "in rome", "question": "who", "answers": cell})
    with fails_with(ErrorCode.INVALID_ROWS, row=1, column="answers", value=cell):
        open_data(rows_config(rows, rows, rows), folder_of(wordpieces()))
