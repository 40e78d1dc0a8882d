"""Labels in another order than the classes of the model are found by its answers, and never by chance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from compressor.model_folder import load
from compressor.tasks import Data, open_data
from compressor.tasks.labelled_rows import label_order
from tests import folders
from tests.tasks.rows import tsv


def answers(order: list[int], rows: int, right: float, seed: int = 0) -> np.ndarray:
    """Predicted and true classes of rows, where a share of the labels is the predicted class in another order."""
    rng = np.random.default_rng(seed)
    predicted = rng.integers(0, len(order), rows)
    labels = np.where(rng.random(rows) < right, np.array(order)[predicted], rng.integers(0, len(order), rows))
    return np.stack([predicted, labels], axis=-1).astype(np.float64)


@pytest.mark.parametrize("order", [[1, 0], [2, 1, 0], [1, 2, 0], [3, 1, 2, 0], [*range(1, 40), 0]])
def test_another_order_is_found(order: list[int]) -> None:
    assert label_order(answers(order, 40 * len(order) + 100, 0.9), len(order)) == order


@pytest.mark.parametrize("classes", [2, 3, 5, 20])
@pytest.mark.parametrize("rows", [1, 4, 12, 60, 400])
def test_chance_is_no_order(classes: int, rows: int) -> None:
    identity = list(range(classes))
    for seed in range(40):
        assert label_order(answers(identity, rows, 0.0, seed), classes) is None
        assert label_order(answers(identity, rows, 0.8, seed), classes) is None


def test_a_model_that_answers_one_rare_class_is_in_no_order() -> None:
    labels = (np.arange(400) % 10 == 0).astype(float)
    assert label_order(np.stack([np.ones(400), labels], axis=-1), 2) is None


def data_of(folder: Path, labels: tuple[str, str], id2label: dict[int, str] | None = None) -> Data:
    """Rows whose text tells the label, for a model with two classes."""
    path = folder / "model"
    if not path.exists():
        folders.save(folders.bert(), path)
    if id2label is not None:
        config = json.loads((path / "config.json").read_text())
        config |= {"id2label": id2label, "label2id": {name: number for number, name in id2label.items()}}
        (path / "config.json").write_text(json.dumps(config))
    rows = [f"{labels[n % 2]}\t{('good', 'bad')[n % 2]} film" for n in range(80)]
    return open_data(folders.rows_config(tsv(folder / "rows.tsv", *rows)), load(path))


@pytest.mark.parametrize("labels", [("1", "0"), ("positive", "negative")])
def test_the_advice_gives_labels_the_order_of_the_model(tmp_path: Path, labels: tuple[str, str]) -> None:
    data = data_of(tmp_path, labels)
    classes = np.array(data.train["labels"])
    statistics = np.stack([1 - classes, classes], axis=-1)  # the model means the reverse
    text = data.task.order_text(statistics, "test")
    assert text is not None
    (advice,) = [json.loads("{" + part + "}}") for part in text.split("(")[-1:] for part in [part.partition("}")[0]]]
    names = {int(number): name for number, name in advice["id2label"].items()}
    again = data_of(tmp_path, labels, names)
    mended = np.array(again.train["labels"])
    assert (mended == 1 - classes).all()
    assert again.task.order_text(np.stack([1 - classes, mended], axis=-1), "test") is None


def test_numbers_for_classes_with_names_are_to_be_named(tmp_path: Path) -> None:
    data = data_of(tmp_path, ("1", "0"), {0: "bad", 1: "good"})
    classes = np.array(data.train["labels"])
    text = data.task.order_text(np.stack([1 - classes, classes], axis=-1), "test")
    assert text is not None
    assert "id2label" not in text
    assert "'bad' for '1'" in text
    named = data_of(tmp_path, ("bad", "good"))
    assert (np.array(named.train["labels"]) == 1 - classes).all()
