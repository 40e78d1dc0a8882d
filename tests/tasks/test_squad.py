"""SQuAD's metrics, and the forms in which data sets write answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import ErrorCode
from compressor.tasks import open_data
from compressor.tasks.row_contents import rows_hash
from compressor.tasks.squad import Answer, exact_match, f1
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.questions import folder_of, row, wordpieces
from tests.tasks.rows import jsonl


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
