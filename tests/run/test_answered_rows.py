"""The rows that a report shows: those whose answers changed, or whose embeddings differ most."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers as hf
from datasets import Dataset

import compressor
from compressor.config.run import Recipe
from compressor.model_folder import load
from compressor.run.evaluate import answered_rows, embedded_rows
from compressor.tasks import Data, batches
from tests import folders
from tests.run.conftest import FinishedRun
from tests.run.runs import write_inputs
from tests.tasks.test_sentence_similarity import pairs


class Copies:
    """A task whose logits are the answers, with one row per batch position."""

    label_name = "labels"

    def answers(self, forward: Any, examples: list[dict[str, Any]]) -> list[str]:
        return [str(value) for value in forward([example["index"] for example in examples])]

    def reference_text(self, example: dict[str, Any]) -> str:
        return f"expected {example['index']}"


def data_of(task: Any, rows: int) -> Data:
    test = Dataset.from_dict({"index": list(range(rows)), "input_ids": [[2, 5 + row % 20, 3] for row in range(rows)]})
    return Data(test.select([]), test.select([]), test, task, (), None, None, folders.tokenizer())


def answers_of(changed: set[int], rows: int) -> tuple[list[Any], list[np.ndarray]]:
    """Forwards and statistics of two engines; the second answers otherwise to some rows."""
    dense, compressed = np.zeros((rows, 2)), np.zeros((rows, 2))
    compressed[sorted(changed), 0] = 1
    forwards = [lambda indices, table=table: table[indices, 0] for table in (dense, compressed)]
    return forwards, [dense, compressed]


@pytest.mark.parametrize("changed", [set(), {3}, {90, 2, 50}, set(range(40, 80))])
@pytest.mark.parametrize("count", [1, 8, 40])
def test_rows_that_changed_come_first(changed: set[int], count: int) -> None:
    rows = answered_rows(*answers_of(changed, 100), data_of(Copies(), 100), count)
    assert len(rows) == count
    expected = [*sorted(changed), *(row for row in range(100) if row not in changed)][:count]
    assert [row.number - 1 for row in rows] == expected
    assert [row.changed for row in rows] == [row in changed for row in expected]
    assert all(row.expected == f"expected {row.number - 1}" and len(row.texts) == 1 for row in rows)


def test_rows_are_shown_where_a_statistic_is_of_something_else_than_a_row() -> None:
    forwards, statistics = answers_of({3}, 20)
    rows = answered_rows(forwards, [table[:5] for table in statistics], data_of(Copies(), 20), 4)
    assert [row.number for row in rows] == [4, 1, 2, 3]


def test_a_task_without_text_shows_no_rows() -> None:
    task = SimpleNamespace(answers=lambda forward, examples: ())
    assert answered_rows(*answers_of({3}, 20), data_of(task, 20), 4) == ()


def test_answers_are_compared_as_a_whole_and_cut_where_they_differ() -> None:
    task = Copies()
    task.answers = lambda forward, examples: [f"{'x ' * 200}{value}" for value in Copies().answers(forward, examples)]  # type: ignore[method-assign]
    row, unchanged = answered_rows(*answers_of({3}, 20), data_of(task, 20), 2)
    assert (row.number, row.changed, unchanged.changed) == (4, True, False)
    assert row.dense != row.compressed
    assert max(map(len, (row.dense, row.compressed, unchanged.dense))) <= 120


def test_rows_of_embeddings_are_those_of_the_lowest_cosine(tmp_path: Path) -> None:
    encoder = load(folders.save_sentence_encoder(tmp_path / "model"))
    data = pairs(tmp_path, encoder)
    rng = np.random.default_rng(0)
    groups = list(batches(data.task, data.test))
    dense = [rng.normal(size=(len(batch["input_ids"]), 16)) for _, batch in groups]
    moved = [embeddings.copy() for embeddings in dense]
    moved[0][3] = -moved[0][3]  # the second text of the second row
    indices, _ = groups[0]
    first, *unchanged = embedded_rows(dense, moved, data, 5)
    assert (first.number, first.cosine) == (indices[1] + 1, pytest.approx(-1))
    assert float(first.dense) == pytest.approx(-float(first.compressed), abs=2e-3)
    assert (len(first.texts), len(unchanged)) == (2, 4)
    assert all(row.cosine == pytest.approx(1) and not row.changed for row in unchanged)


def test_a_report_has_rows(finished: FinishedRun) -> None:
    answers = finished.report.answers
    assert 0 < len(answers) <= 8
    assert [row.changed for row in answers] == sorted((row.changed for row in answers), reverse=True)
    assert {row.dense for row in answers} <= {"LABEL_0", "LABEL_1"}
    assert all(row.expected and row.texts for row in answers)
    page = (finished.out / "report.html").read_text()
    assert all(text in page for row in answers for text in row.texts)


@pytest.mark.zoo
@pytest.mark.parametrize("shown", [0, 3])
def test_names_of_labels_and_the_tokenizer_go_with_the_engine(shown: int, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    rows = (inputs / "rows.tsv").read_text().replace("0\t", "refused\t").replace("1\t", "liked\t")
    (inputs / "rows.tsv").write_text(rows)
    fields: dict[str, Any] = {"batch": (1,), "seq": (8,), "seconds": 0.01, "report_rows": shown, "max_length": 8}
    out = tmp_path / "out"
    recipe = Recipe(model=inputs / "model", out=out, test_data=str(inputs / "rows.tsv"), **fields)
    answers = compressor.compress(recipe).answers
    assert len(answers) == shown
    assert {row.expected for row in answers} <= {"liked", "refused"}
    config = json.loads((out / "config.json").read_text())
    assert config["label2id"] == {"liked": 0, "refused": 1}
    reloaded = hf.AutoTokenizer.from_pretrained(out)
    text = "the good film"
    assert reloaded(text)["input_ids"] == folders.tokenizer()(text)["input_ids"]
