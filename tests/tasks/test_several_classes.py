"""Several classes a row: every form of their labels, metrics beside scikit-learn's, thresholds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from sklearn.metrics import average_precision_score, f1_score

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, load, save_companions
from compressor.models.forwards import tensors_of
from compressor.results import NoteCode
from compressor.tasks import Data, make_task, open_data, statistics
from compressor.tasks.metrics import mean_average_precision, set_macro_f1, set_micro_f1
from tests import folders
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.rows import forward_of, jsonl, text, tsv

NAMES = ("Joy", "fear, of it", "anger")
VECTORS = ([1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 0, 0])
TEXTS = ("good film", "bad", "very bad plot", "good", "a film", "the plot")
SETS = [[index for index, present in enumerate(vector) if present] for vector in VECTORS]


def _folder(path: Path, **fields: Any) -> ModelFolder:
    torch.manual_seed(0)
    names = dict(enumerate(NAMES))
    config = {"problem_type": "multi_label_classification", "id2label": names, **fields}
    return load(folders.save(folders.bert(**{name: value for name, value in config.items() if value}), path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return _folder(tmp_path_factory.mktemp("several"))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return jsonl(tmp_path / "rows.jsonl", *_objects(VECTORS))


def _objects(labels: Any) -> list[dict[str, Any]]:
    return [{"text": words, "labels": label} for words, label in zip(TEXTS, labels, strict=True)]


def _table(path: Path, labels: list[str]) -> str:
    return tsv(path, *(f"{label}\t{words}" for label, words in zip(labels, TEXTS, strict=True)), header="labels\ttext")


def _joined(separator: str, kind: Any = NAMES) -> list[str]:
    return [separator.join(str(kind[index]) for index in chosen) for chosen in SETS]


LABELS: dict[str, Any] = {
    "vectors": VECTORS,
    "floats": [list(map(float, vector)) for vector in VECTORS],
    "booleans": [list(map(bool, vector)) for vector in VECTORS],
    "names": [[NAMES[index].lower() for index in chosen] for chosen in SETS],
    "ids": SETS,
    "joined": _joined("|"),
    "spaced": _joined(" | "),
    "joined ids": _joined(",", range(3)),
    "ids after spaces": _joined(" ", range(3)),
    "vectors in text": [" ".join(map(str, vector)) for vector in VECTORS],
    "lists in text": [str([NAMES[index] for index in chosen]) for chosen in SETS],
    "arrays in text": [f"[{' '.join(map(str, vector))}]" for vector in VECTORS],
}


@pytest.mark.parametrize("form", LABELS)
def test_labels_of_every_form_are_the_same_vectors(form: str, model: ModelFolder, tmp_path: Path) -> None:
    labels = LABELS[form]
    sources = [jsonl(tmp_path / "a.jsonl", *_objects(labels))]
    if isinstance(labels[0], str):
        sources.append(_table(tmp_path / "a.tsv", labels))
    for source in sources:
        assert list(open_data(rows_config(source, source, source), model).train["labels"]) == list(map(list, VECTORS))


@pytest.mark.parametrize("request_columns", [False, True])
def test_a_column_for_each_class_is_a_label(request_columns: bool, model: ModelFolder, tmp_path: Path) -> None:
    names = ("anger", "JOY", "fear, of it")
    cells = [
        f"{words}\t{third}\t{first}\t{second}" for words, (first, second, third) in zip(TEXTS, VECTORS, strict=True)
    ]
    source = tsv(tmp_path / "a.tsv", *cells, header="\t".join(("text", *names)))
    assert list(open_data(rows_config(source, source, source), model).train["labels"]) == list(map(list, VECTORS))
    plain = _folder(tmp_path / "plain", id2label=None, num_labels=3)
    requested = tsv(tmp_path / "b.tsv", *cells, header="text\tc\ta\tb")
    data = open_data(rows_config(requested, requested, requested, label_column="a,b,c"), plain)
    assert list(data.train["labels"]) == list(map(list, VECTORS))
    assert NoteCode.LABELS_NUMBERED in {note.code for note in data.notes}
    save_companions(plain, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["id2label"] == {"0": "a", "1": "b", "2": "c"}


def test_class_numbers_of_a_data_set_are_mapped_by_their_names(model: ModelFolder, tmp_path: Path) -> None:
    order = [NAMES[2], NAMES[0], NAMES[1]]
    features = Features({"text": Value("string"), "labels": List(ClassLabel(names=order))})
    labels = [[order.index(NAMES[index]) for index in chosen] for chosen in SETS]
    Dataset.from_dict({"text": list(TEXTS), "labels": labels}, features=features).save_to_disk(tmp_path / "rows")
    source = str(tmp_path / "rows")
    assert list(open_data(rows_config(source, source, source), model).train["labels"]) == list(map(list, VECTORS))


def test_names_of_another_split_are_mapped_like_those_of_the_first(
    model: ModelFolder, rows: str, tmp_path: Path
) -> None:
    named = _table(tmp_path / "a.tsv", _joined("|"))
    data = open_data(rows_config(rows, named, named), model)
    assert list(data.eval["labels"]) == list(data.train["labels"])


def test_new_names_are_numbered_in_sorted_order_and_noted(tmp_path: Path) -> None:
    plain = _folder(tmp_path / "plain", id2label=None, num_labels=3)
    source = _table(tmp_path / "a.tsv", _joined("|", ("x", "y", "z")))
    data = open_data(rows_config(source, source, source), plain)
    assert list(data.train["labels"]) == list(map(list, VECTORS))
    assert NoteCode.LABELS_NUMBERED in {note.code for note in data.notes}


def test_the_loss_is_that_of_each_class(model: ModelFolder, rows: str) -> None:
    data = open_data(rows_config(rows, rows, rows), model)
    batch = tensors_of(data.task.collate(list(data.train)))
    output = model.model(**batch)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, batch["labels"])
    assert output.loss.item() == pytest.approx(losses.item())


@pytest.mark.parametrize("metric", ["micro-f1", "macro-f1", "map"])
def test_metrics_are_those_of_scikit_learn(metric: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for classes in (1, 4):
        labels = generator.integers(0, 2, (60, classes))
        labels[0] = 1
        logits = generator.normal(size=(60, classes)).round(1)  # some are equal
        predicted = logits >= 0
        if metric == "map":
            expected = average_precision_score(labels, logits, average="macro")
            value = mean_average_precision(np.concatenate([logits, labels], axis=1))
        else:
            mean, compute = metric.partition("-")[0], set_micro_f1 if metric == "micro-f1" else set_macro_f1
            several = classes > 1
            expected = f1_score(labels, predicted, average=mean if several else "binary")
            value = compute(np.concatenate([predicted, labels], axis=1).astype(float))
        assert value == pytest.approx(expected)


@pytest.mark.parametrize("compute", [set_micro_f1, set_macro_f1, mean_average_precision])
def test_classes_without_rows_do_not_count(compute: Any) -> None:
    perfect = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert compute(perfect) == 1.0
    assert compute(np.zeros((2, 4))) == 0.0


def test_no_constant_answer_is_better_than_the_best(model: ModelFolder, rows: str) -> None:
    for metric in ("micro-f1", "macro-f1", "map"):
        task = open_data(rows_config(rows, rows, rows, metric=metric), model).task
        labels = np.array(VECTORS, float)
        answers = [np.array([number >> index & 1 for index in range(3)], float) for number in range(8)]
        scores = [task.score(np.concatenate([np.tile(answer, (6, 1)), labels], axis=1)) for answer in answers]
        assert task.constant_score(np.concatenate([labels, labels], axis=1)) == pytest.approx(max(scores))


def _with_thresholds(path: Path, declared: Any, *, file: str | None) -> ModelFolder:
    folder = _folder(path)
    if file is None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "thresholds": declared}))
    else:
        (path / file).write_text(json.dumps(declared))
    return load(folder.path)


@pytest.mark.parametrize("file", [None, "thresholds.json", "best_thresholds.json"])
@pytest.mark.parametrize(
    ("declared", "values"),
    [
        ([0.2, 0.5, 0.9], (0.2, 0.5, 0.9)),
        ({"joy": 0.2, "anger": 0.9}, (0.2, 0.5, 0.9)),
        ({"0": 0.2, "2": 1}, (0.2, 0.5, 1.0)),
        (0.3, (0.3, 0.3, 0.3)),
    ],
)
def test_declared_thresholds_assign_the_classes_and_are_delivered(
    declared: Any, values: tuple[float, ...], file: str | None, rows: str, tmp_path: Path
) -> None:
    folder = _with_thresholds(tmp_path / "model", declared, file=file)
    data = open_data(rows_config(rows, rows, rows), folder)
    assert [note.code for note in data.notes].count(NoteCode.THRESHOLDS) == 1
    logits = forward_of(folder.model)(data.task.collate(list(data.test)[:1]) | {})
    probabilities = 1 / (1 + np.exp(-logits[0].astype(float)))
    measured = statistics(data.task, data.test.select([0]), forward_of(folder.model))
    assert measured[0, :3].tolist() == (probabilities >= values).tolist()
    save_companions(folder, tmp_path / "out")
    name = file or "config.json"
    delivered = json.loads((tmp_path / "out" / name).read_text())
    assert (delivered if file else delivered["thresholds"]) == declared


def test_a_threshold_moves_the_metric_and_not_the_average_precision(rows: str, tmp_path: Path) -> None:
    def score(thresholds: float, metric: str) -> float:
        folder = _with_thresholds(tmp_path / f"{metric}{thresholds}", thresholds, file=None)
        task = open_data(rows_config(rows, rows, rows, metric=metric), folder).task
        return task.score(statistics(task, task.encode(_dataset(), "rows"), forward_of(folder.model)))

    assert score(0.0, "micro-f1") == pytest.approx(f1_score(np.array(VECTORS), np.ones((6, 3)), average="micro"))
    assert score(1.0, "micro-f1") == 0.0
    assert score(0.0, "map") == score(1.0, "map")


def _dataset() -> Dataset:
    return Dataset.from_dict({"text": list(TEXTS), "labels": list(map(list, VECTORS))})


@pytest.mark.parametrize("declared", [[0.5, 0.5], [0.5, 0.5, 2], {"joy": 0.5, "calm": 0.1}, ["a", "b", "c"], {}])
def test_thresholds_that_are_not_of_the_classes_are_refused(declared: Any, tmp_path: Path) -> None:
    folder = _with_thresholds(tmp_path / "model", declared, file="thresholds.json")
    with fails_with(ErrorCode.FILE_MISMATCH, path=folder.path / "thresholds.json"):
        make_task(folder, rows_config())


def test_two_files_of_thresholds_are_refused(tmp_path: Path) -> None:
    folder = _with_thresholds(tmp_path / "model", [0.1, 0.2, 0.3], file="thresholds.json")
    (folder.path / "best_thresholds.json").write_text("[0.5, 0.5, 0.5]")
    with fails_with(ErrorCode.CONTRADICTION, field="thresholds"):
        make_task(folder, rows_config())


@pytest.mark.parametrize(
    ("labels", "details"),
    [
        ([[0, 1, 5], *SETS[1:]], {"code": ErrorCode.LABEL_MISMATCH, "row": 1}),
        ([*LABELS["names"][:5], ["calm"]], {"code": ErrorCode.LABEL_MISMATCH, "row": 6, "value": "calm"}),
        ([[], [], [], [], [], []], {"code": ErrorCode.INVALID_ROWS}),
        ([[0, 0, 0]] * 6, {"code": ErrorCode.INVALID_ROWS}),
        ([None, *SETS[1:]], {"code": ErrorCode.INVALID_ROWS, "row": 1}),
    ],
)
def test_labels_of_no_class_are_named(labels: Any, details: dict[str, Any], model: ModelFolder, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", *_objects(labels))
    with fails_with(details.pop("code"), InputError, **details):
        open_data(rows_config(source, source, source), model)


def test_a_number_outside_of_a_column_of_a_class_is_named(model: ModelFolder, tmp_path: Path) -> None:
    header = "\t".join(("text", *NAMES))
    source = tsv(tmp_path / "a.tsv", "good\t1\t0\t0", "bad\t-1\t0\t0", header=header)
    with fails_with(ErrorCode.INVALID_ROWS, row=2, column="Joy", value=-1.0):
        open_data(rows_config(source, source, source), model)


def test_requested_columns_are_one_for_each_class(model: ModelFolder, tmp_path: Path) -> None:
    source = tsv(tmp_path / "a.tsv", "good\t1\t0", header="text\ta\tb")
    with fails_with(ErrorCode.LABEL_MISMATCH, field="label_column", classes=3):
        open_data(rows_config(source, source, source, label_column="a,b"), model)
    with fails_with(ErrorCode.COLUMN_MISSING, field="label_column", value="c"):
        open_data(rows_config(source, source, source, label_column="a,b,c"), model)


def test_soft_labels_are_learned_as_they_are_and_count_from_a_half(model: ModelFolder, tmp_path: Path) -> None:
    soft = [[0.75, 0.25, 0.5], *map(list, VECTORS[1:])]
    source = jsonl(tmp_path / "a.jsonl", *_objects(soft))
    data = open_data(rows_config(source, source, source), model)
    assert data.task.collate([data.train[0]])["labels"].tolist() == [soft[0]]
    assert statistics(data.task, data.test, forward_of(model.model))[0, 3:].tolist() == [1.0, 0.0, 1.0]
    assert data.task.reference_text(data.train[0]) == " | ".join((NAMES[0], NAMES[2]))


def test_rows_without_labels_and_with_them_are_one_split(model: ModelFolder, rows: str, tmp_path: Path) -> None:
    lines = text(tmp_path / "a.txt", *TEXTS)
    data: Data = open_data(rows_config(rows, rows, rows, unlabelled_data=lines), model, drawn_rows=100)
    assert data.task.collate(list(data.train))["labels"].shape == (12, 3)
    alone = open_data(rows_config(lines), model, drawn_rows=100)
    assert (len(alone.test), alone.scores_eval) == (0, False)


def test_answers_are_equal_where_all_classes_are(model: ModelFolder, rows: str) -> None:
    task = open_data(rows_config(rows, rows, rows), model).task
    logits = np.array([[1.0, -1.0, 1.0], [2.0, -3.0, 0.1], [1.0, 1.0, 1.0]])
    answers = task.answer_ids(logits, {})
    assert answers is not None
    first, same, different = answers
    assert (first == same, first == different) == (True, False)
    assert task.answer_texts(logits, np.zeros((3, 3)))[0] == f"{NAMES[0]} | {NAMES[2]}"


NAMED = {"multi-label-classification": "multi_label_classification", "regression": "regression"}


@pytest.mark.parametrize("task", NAMED)
def test_a_named_task_says_what_the_outputs_are(task: str, tmp_path: Path) -> None:
    path = _folder(tmp_path / "model", problem_type=None).path
    folder = load(path, task=task)
    assert (folder.task, folder.config.problem_type) == (task, NAMED[task])
    save_companions(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["problem_type"] == NAMED[task]
    assert folder.surroundings["answers"] == NAMED[task]
    single = _folder(tmp_path / "other", problem_type="single_label_classification").path
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="task"):
        load(single, task=task)
