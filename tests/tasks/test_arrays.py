"""Rows of a bare graph: arrays are checked where they are read, and the outputs of the graph decide the metric."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from compressor.answers import AnswerKind, several_answers
from compressor.errors import ErrorCode, InputError, RowError, UsageError
from compressor.graph.signature import InputSpec
from compressor.model_folder import ModelFolder, fingerprint
from compressor.models.forwards import tensors_of
from compressor.results import NoteCode
from compressor.selection.pruners.layerwise.output_sensitivity import sensitivity_of
from compressor.tasks import Data, batches, make_task, open_data, statistics
from compressor.tasks.calibration import calibration_batches, draw_rows
from compressor.tasks.row_files import require_file
from compressor.tasks.scoring import forward_of
from compressor.training.distillation import Distillation
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.graphs import (
    FLOAT32,
    IMAGE_INPUTS,
    INT64,
    TEXT_INPUTS,
    GraphModel,
    graph,
    image_rows,
    npz,
    text_rows,
)

Arrays = dict[str, np.ndarray]


def opened(folder: ModelFolder, source: str, **fields: Any) -> Data:
    """Rows whose labels, where they lack some, are what the model answers."""
    return open_data(rows_config(source, **fields), folder, drawn_rows=8, bounds_loss=True)


def score(data: Data, folder: ModelFolder, examples: Dataset) -> float:
    return data.task.score(statistics(data.task, examples, forward_of(data.task, folder.model), batch_size=7))


def changed(folder: ModelFolder) -> ModelFolder:
    """The folder after a change of its model."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in folder.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return folder


FORMS = {
    "logits": ("agreement (accuracy)", None),
    "tags_logits": ("agreement (accuracy)", None),
    "score": ("agreement (spearman)", None),
    "rank": ("agreement (spearman)", None),
    "embedding": ("agreement (cosine)", AnswerKind.VECTOR),
    "last_hidden_state": ("agreement (cosine)", AnswerKind.VECTOR),
    "start_logits": ("agreement (accuracy)", None),
}


@pytest.mark.parametrize("output", FORMS)
def test_the_whole_graph_is_right_on_its_own_answers_and_another_is_not(output: str, tmp_path: Path) -> None:
    folder = graph(output)
    data = opened(folder, npz(tmp_path / "rows.npz", text_rows()))
    metric, kind = FORMS[output]
    assert (data.task.metric, several_answers(folder.config)) == (metric, kind)
    assert data.scores_eval
    assert [note.code for note in data.notes].count(NoteCode.ANSWERS_AS_LABELS) == 2
    for examples in (data.eval, data.test):
        assert score(data, folder, examples) == pytest.approx(1.0, abs=1e-6)
    whole = sum(map(len, (data.train, data.eval, data.test)))
    assert whole == 40
    if len(data.test) > 1:
        assert score(data, changed(folder), data.test) < 1.0


@pytest.mark.parametrize("output", FORMS)
def test_the_loss_without_labels_is_zero_for_the_graph_itself_alone(output: str, tmp_path: Path) -> None:
    folder = graph(output, *({"start_logits": ["end_logits"]}.get(output, [])))
    data = opened(folder, npz(tmp_path / "rows.npz", text_rows()))
    teacher = Distillation.of(folder.model, data.task.loss_outputs, hidden_weight=0.0)
    teacher = teacher.with_variance_of(data.task, data.train)
    assert teacher.mean_divergence(folder.model, data.task, data.train) == pytest.approx(0.0, abs=1e-12)
    assert teacher.mean_divergence(changed(folder).model, data.task, data.train) > 1e-3


@pytest.mark.parametrize("output", FORMS)
def test_the_sensitivity_of_an_output_is_finite(output: str, tmp_path: Path) -> None:
    folder = graph(output)
    data = opened(folder, npz(tmp_path / "rows.npz", text_rows()))
    rows = list(map(tensors_of, calibration_batches(data, draw_rows(data, 16, 0))))
    sensitivity = sensitivity_of(folder.model, rows, [f"heads.{output}"], data.task.loss_outputs)
    (metric,) = sensitivity.metrics.values()
    assert np.isfinite(metric).all()
    assert np.trace(metric) == pytest.approx(len(metric))


def test_both_ends_of_a_span_are_the_loss() -> None:
    assert make_task(graph("start_logits", "end_logits"), rows_config()).loss_outputs == ("start_logits", "end_logits")


def test_padding_has_no_influence(tmp_path: Path) -> None:
    rows, names = text_rows(), ("tags_logits", "last_hidden_state", "logits")
    wide = {name: np.pad(array, ((0, 0), (0, 30))) for name, array in rows.items()}
    for name in names:
        folder = graph(name)
        narrow_data, wide_data = (
            opened(folder, npz(tmp_path / f"{number}.npz", arrays)) for number, arrays in enumerate((rows, wide))
        )
        assert narrow_data.train_hash == wide_data.train_hash
        for first, second in zip(
            batches(narrow_data.task, narrow_data.test), batches(wide_data.task, wide_data.test), strict=True
        ):
            assert first[0] == second[0]
            assert first[1].keys() == second[1].keys()
            for key, array in first[1].items():
                np.testing.assert_allclose(array, second[1][key], rtol=1e-6)


def test_a_batch_ends_with_its_longest_row(tmp_path: Path) -> None:
    rows = text_rows()
    rows["attention_mask"][3] = [0, 0, 0, 0, 0, 0, 0, 1, 1]
    data = opened(graph("logits"), npz(tmp_path / "rows.npz", rows))
    lengths = rows["attention_mask"].sum(1)
    for examples in (data.train, data.eval, data.test):
        for indices, batch in batches(data.task, examples, 5):
            chosen = [examples[index] for index in indices]
            assert [row["length"] for row in chosen] == [lengths[row["index"]] for row in chosen]
            longest = max(row["positions"] for row in chosen)
            assert batch["input_ids"].shape == (len(indices), longest)
            expected = rows["input_ids"][[row["index"] for row in chosen], :longest]
            assert np.array_equal(batch["input_ids"], expected)
    padded_left = next(row for part in (data.train, data.eval, data.test) for row in part if row["index"] == 3)
    assert (padded_left["length"], padded_left["positions"]) == (2, 9)


def test_lengths_without_a_mask(tmp_path: Path) -> None:
    rows = text_rows()
    ids = {"input_ids": rows["input_ids"]}
    data = opened(graph("logits", inputs={"input_ids": TEXT_INPUTS["input_ids"]}), npz(tmp_path / "ids.npz", ids))
    images = opened(graph("logits", inputs=IMAGE_INPUTS), npz(tmp_path / "images.npz", image_rows()))
    assert (set(data.train["length"]), data.task.size_limits(data.train)) == ({9}, (1, 9))
    assert (set(images.train["length"]), images.task.size_limits(images.train)) == ({1}, (1, 1))


def saved_as_npz(path: Path, rows: Arrays) -> str:
    return npz(path / "rows.npz", rows)


def saved_as_npy(path: Path, rows: Arrays) -> str:
    for name, array in rows.items():
        np.save(path / f"{name}.npy", array)
    return str(path)


def saved_as_files(path: Path, rows: Arrays) -> str:
    for number in range(4):
        npz(path / f"rows-{number}.npz", {name: array[10 * number :][:10] for name, array in rows.items()})
    return str(path)


@pytest.mark.parametrize("save", [saved_as_npy, saved_as_files])
def test_rows_are_the_same_in_every_kind_of_file(save: Callable[[Path, Arrays], str], tmp_path: Path) -> None:
    rows = {**text_rows(), "labels": np.arange(40) % 3}
    folders = [tmp_path / name for name in ("expected", "saved")]
    for path in folders:
        path.mkdir()
    folder = graph("logits")
    expected, data = opened(folder, saved_as_npz(folders[0], rows)), opened(folder, save(folders[1], rows))
    assert (data.train_hash, data.eval_hash) == (expected.train_hash, expected.eval_hash)
    for first, second in zip(batches(expected.task, expected.train), batches(data.task, data.train), strict=True):
        for name, array in first[1].items():
            assert np.array_equal(array, second[1][name])


def test_files_are_of_the_split_in_their_names(tmp_path: Path) -> None:
    for number, name in enumerate(("train-0", "train-1", "dev", "test")):
        npz(tmp_path / f"{name}.npz", text_rows(8, seed=number))
    data = opened(graph("logits"), str(tmp_path))
    assert tuple(map(len, (data.train, data.eval, data.test))) == (16, 8, 8)
    npz(tmp_path / "more.npz", text_rows(8))
    with fails_with(ErrorCode.INVALID_VALUE, path=tmp_path / "more.npz"):
        opened(graph("logits"), str(tmp_path))


def test_types_are_converted_without_loss_and_noted(tmp_path: Path) -> None:
    exact, folder = text_rows(), graph("logits")
    narrow = {"input_ids": exact["input_ids"].astype(np.uint8), "attention_mask": exact["attention_mask"] > 0}
    data = [opened(folder, npz(tmp_path / f"{number}.npz", rows)) for number, rows in enumerate((exact, narrow))]
    notes = [[note.code for note in each.notes].count(NoteCode.ARRAYS_CONVERTED) for each in data]
    assert notes == [0, 1]
    assert data[0].train_hash == data[1].train_hash
    batch = data[1].task.collate([data[1].train[0]])
    assert {batch[name].dtype for name in exact} == {np.dtype(np.int64)}
    images = {"image": image_rows()["image"].astype(np.float64)}
    converted = opened(graph("logits", inputs=IMAGE_INPUTS), npz(tmp_path / "images.npz", images))
    assert converted.task.collate([converted.train[0]])["image"].dtype == np.float32


def test_the_hash_covers_every_input_and_labels(tmp_path: Path) -> None:
    folder, rows = graph("logits"), {**text_rows(), "labels": np.arange(40) % 3}
    hashes = set()
    for name in ("", *rows):
        arrays = {key: array.copy() for key, array in rows.items()}
        if name == "attention_mask":
            arrays[name][:, 0] = 0
        elif name:
            arrays[name][...] = (arrays[name] + 1) % 3
        hashes.add(opened(folder, npz(tmp_path / f"rows{name}.npz", arrays)).train_hash)
    assert len(hashes) == 4


def test_rows_of_two_files_that_are_the_same_are_noted(tmp_path: Path) -> None:
    source, test = (npz(tmp_path / f"{name}.npz", text_rows()) for name in ("rows", "test"))
    data = opened(graph("logits"), source, test_data=test)
    assert NoteCode.ROWS_REPEATED in [note.code for note in data.notes]


LABELS: dict[str, tuple[list[str], np.ndarray, str, str]] = {
    "classes": (["embedding", "logits"], np.arange(40) % 3, "accuracy", "logits"),
    "classes as bool": (["logits"], np.arange(40) % 2 == 0, "accuracy", "logits"),
    "numbers": (["logits", "score"], np.linspace(0, 1, 40), "spearman", "score"),
    "numbers in a column": (["rank"], np.linspace(0, 1, 40)[:, None], "spearman", "rank"),
    "integers as numbers": (["score"], np.arange(40), "spearman", "score"),
    "tags": (["logits", "tags_logits"], np.arange(360).reshape(40, 9) % 4, "accuracy", "tags_logits"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_choose_the_output_and_the_metric(case: str, tmp_path: Path) -> None:
    outputs, labels, metric, scored = LABELS[case]
    for name in ("labels", "label"):
        folder = graph(*outputs)
        data = open_data(rows_config(npz(tmp_path / "rows.npz", {**text_rows(), name: labels})), folder)
        assert (data.task.metric, data.task.outputs) == (metric, (scored,))
        assert [note.code for note in data.notes].count(NoteCode.METRIC_CHOSEN) == 1
        assert np.isfinite(score(data, folder, data.test))


def test_padded_tags_and_tags_of_minus_100_are_not_scored(tmp_path: Path) -> None:
    rows, labels = text_rows(), np.full((40, 9), -100)
    labels[:, 1] = 2
    data = open_data(rows_config(npz(tmp_path / "rows.npz", {**rows, "labels": labels})), graph("tags_logits"))
    logits = np.zeros((1, 9, 4))
    logits[..., 2] = 1
    for example in data.train:
        batch = data.task.collate([example])
        assert batch["labels"].shape == batch["attention_mask"].shape
        assert data.task.per_example(logits, batch["labels"]).tolist() == [[1, 1]]
    labels[...] = 1
    data = open_data(rows_config(npz(tmp_path / "all.npz", {**rows, "labels": labels})), graph("tags_logits"))
    for example in data.train:
        batch = data.task.collate([example])
        assert data.task.per_example(logits, batch["labels"]).tolist() == [[0, example["length"]]]


def test_a_named_array_holds_labels(tmp_path: Path) -> None:
    source = npz(tmp_path / "rows.npz", {**text_rows(), "stars": np.arange(40) % 3})
    data = open_data(rows_config(source, label_column="stars"), graph("logits"))
    assert set(data.train["labels"]) == {0, 1, 2}
    with fails_with(ErrorCode.UNKNOWN_NAME, array="stars", known=("input_ids", "attention_mask")):
        open_data(rows_config(source), graph("logits"))


def test_the_metric_chooses_the_output(tmp_path: Path) -> None:
    source = npz(tmp_path / "rows.npz", {**text_rows(), "labels": np.arange(40) % 3})
    for metric, scored, shown in (
        ("cosine", "logits", "agreement (cosine)"),
        ("pearson", "score", "pearson"),
        ("accuracy", "logits", "accuracy"),
    ):
        data = opened(graph("logits", "score"), source, metric=metric)
        assert (data.task.outputs, data.task.metric) == ((scored,), shown)


@pytest.mark.parametrize(
    ("outputs", "metric", "details"),
    [
        (("ids",), None, {"outputs": (), "metric": None}),
        (("embedding",), "spearman", {"outputs": ("embedding",), "metric": "spearman"}),
        (("score",), "accuracy", {"outputs": ("score",), "metric": "accuracy"}),
        (("score",), "cosine", {"outputs": ("score",), "metric": "cosine"}),
    ],
)
def test_outputs_that_no_metric_fits_are_refused(
    outputs: tuple[str, ...], metric: str | None, details: dict[str, Any]
) -> None:
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, path=Path("model.onnx"), **details):
        make_task(graph(*outputs), rows_config(metric=metric))


def test_a_graph_that_reads_labels_is_refused() -> None:
    inputs = {**TEXT_INPUTS, "labels": InputSpec(INT64, (None,))}
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, input="labels"):
        make_task(graph("logits", inputs=inputs), rows_config())


def test_an_unknown_metric_is_refused() -> None:
    known = ("accuracy", "spearman", "pearson", "cosine")
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="metric", value="f1", known=known):
        make_task(graph("logits"), rows_config(metric="f1"))


NAMES = {
    "output": ((None, 3), "accuracy"),
    "probabilities": ((None, 256), "accuracy"),
    "text_embeds": ((None, 3), "cosine"),
    "linear_12": ((None, 384), "cosine"),
    "add_7": ((None, 1000), "accuracy"),
    "add_8": ((None, 30522), "cosine"),
    "logits": ((None, None, 30522), "accuracy"),
    "last_hidden_state": ((None, None, 5), "cosine"),
    "masks": ((None, 3, 8, 8), "cosine"),
    "any": ((None, None), "cosine"),
    "value": ((None,), "spearman"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_and_axes_of_the_first_output_suggest_its_meaning(name: str) -> None:
    folder = graph("logits", logits=name)
    shape, metric = NAMES[name]
    model = folder.model
    assert isinstance(model, GraphModel)
    output = model.output_specs[name]
    model.output_specs = {name: type(output)(output.dtype, shape)}
    task = make_task(folder, rows_config())
    assert (task.metric, task.outputs) == (metric, (name,))
    assert task.compares_answers is (metric == "accuracy")
    assert (several_answers(folder.config) is AnswerKind.VECTOR) is (metric == "cosine")


def test_tokens_are_classified_only_where_a_mask_says_which_count() -> None:
    folder = graph("tags_logits", inputs={"input_ids": TEXT_INPUTS["input_ids"]})
    assert make_task(folder, rows_config()).metric == "cosine"


def test_what_answers_mean_does_not_change_the_fingerprint() -> None:
    folder, untouched = graph("embedding"), graph("embedding")
    before = fingerprint(folder.model)
    task = make_task(folder, rows_config())
    assert fingerprint(folder.model) == before
    assert several_answers(untouched.config) is None
    task.declare_answers(untouched.config)
    assert several_answers(untouched.config) is AnswerKind.VECTOR


def test_a_vector_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    folder = graph("embedding")
    with torch.no_grad():
        next(folder.model.heads.parameters()).fill_(np.nan)
    with fails_with(ErrorCode.NOT_FINITE):
        opened(folder, npz(tmp_path / "rows.npz", text_rows()))


def test_a_constant_answer_has_a_score(tmp_path: Path) -> None:
    labels = np.arange(40) % 4 % 3
    data = open_data(rows_config(npz(tmp_path / "rows.npz", {**text_rows(), "labels": labels})), graph("logits"))
    assert data.task.constant_score(np.array([[0.0, 1], [1, 1], [2, 0]])) == pytest.approx(2 / 3)
    assert make_task(graph("score"), rows_config()).constant_score(np.array([[0.0, 1], [1, 2]])) == 0.0
    assert make_task(graph("embedding"), rows_config()).constant_score(np.array([[0.5]])) is None


def test_labels_in_another_order_than_the_classes_are_noticed() -> None:
    task = make_task(graph("logits"), rows_config())
    labels = np.arange(300) % 3
    assert task.order_text(np.stack([labels, labels], axis=-1).astype(float), "test") is None
    assert task.order_text(np.stack([(labels + 1) % 3, labels], axis=-1).astype(float), "test") is not None


def without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda rows: {key: array for key, array in rows.items() if key != name}


def replaced(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Arrays], Arrays]:
    return lambda rows: {**rows, name: change(rows[name].copy())}


def set_row(row: int, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[row, 1] = value
        return array

    return change


INPUTS = {
    "input_ids": InputSpec(INT64, (None, None)),
    "attention_mask": InputSpec(INT64, (None, None)),
    "image": InputSpec(FLOAT32, (None, 2, 4)),
    "small": InputSpec(np.dtype(np.int8), (None, 2)),
}
BAD: dict[str, tuple[Callable[[Arrays], Arrays], ErrorCode, dict[str, Any]]] = {
    "missing": (without("image"), ErrorCode.COLUMN_MISSING, {"input": "image"}),
    "unknown": (lambda rows: {**rows, "tokens": rows["image"]}, ErrorCode.UNKNOWN_NAME, {"array": "tokens"}),
    "rows": (
        replaced("image", lambda array: array[:7]),
        ErrorCode.INVALID_ROWS,
        {"array": "image", "rows": 7, "expected": 40},
    ),
    "no rows": (lambda rows: {name: array[:0] for name, array in rows.items()}, ErrorCode.TOO_FEW_ROWS, {"rows": 0}),
    "no axis": (replaced("small", lambda array: np.int8(3)), ErrorCode.TENSOR_MISMATCH, {"array": "small"}),
    "floats for integers": (
        replaced("input_ids", lambda array: array.astype(np.float32)),
        ErrorCode.TENSOR_MISMATCH,
        {"array": "input_ids", "dtype": FLOAT32, "expected": INT64},
    ),
    "integers for floats": (
        replaced("image", lambda array: (array * 10).astype(np.int64)),
        ErrorCode.TENSOR_MISMATCH,
        {"array": "image", "dtype": INT64, "expected": FLOAT32},
    ),
    "axis": (
        replaced("image", lambda array: array[:, :, :3]),
        ErrorCode.TENSOR_MISMATCH,
        {"array": "image", "shape": (40, 2, 3), "expected": (None, 2, 4)},
    ),
    "number of axes": (
        replaced("image", lambda array: array[:, 0]),
        ErrorCode.TENSOR_MISMATCH,
        {"array": "image", "shape": (40, 4)},
    ),
    "empty axis": (
        replaced("input_ids", lambda array: array[:, :0]),
        ErrorCode.TENSOR_MISMATCH,
        {"array": "input_ids", "shape": (40, 0)},
    ),
    "objects": (
        replaced("image", lambda array: array.astype(object)),
        ErrorCode.INVALID_ROWS,
        {"array": "image", "dtype": "object"},
    ),
    "text": (
        replaced("image", lambda array: array.astype(str)),
        ErrorCode.INVALID_ROWS,
        {"array": "image"},
    ),
    "id below zero": (
        replaced("input_ids", set_row(5, -100)),
        ErrorCode.INVALID_ROWS,
        {"array": "input_ids", "row": 6, "value": -100},
    ),
    "number too large": (
        replaced("small", lambda array: set_row(4, 300)(array.astype(np.int64))),
        ErrorCode.INVALID_ROWS,
        {"array": "small", "row": 5, "value": 300},
    ),
    "infinity": (
        replaced("image", set_row(2, np.inf)),
        ErrorCode.NOT_FINITE,
        {"array": "image", "row": 3, "value": np.inf},
    ),
    "float too large": (
        replaced("image", lambda array: set_row(2, 1e300)(array.astype(np.float64))),
        ErrorCode.NOT_FINITE,
        {"array": "image", "row": 3, "value": 1e300},
    ),
    "no token": (
        replaced("attention_mask", lambda array: array * (np.arange(40) != 8)[:, None]),
        ErrorCode.INVALID_ROWS,
        {"array": "attention_mask", "row": 9},
    ),
    "class out of range": (
        lambda rows: {**rows, "labels": np.where(np.arange(40) == 30, 3, np.arange(40) % 3)},
        ErrorCode.LABEL_MISMATCH,
        {"array": "labels", "row": 31, "value": 3},
    ),
    "labels that are no numbers": (
        lambda rows: {**rows, "labels": np.where(np.arange(40) == 6, np.nan, 1.0)},
        ErrorCode.NOT_FINITE,
        {"array": "labels", "row": 7},
    ),
    "labels of one class": (
        lambda rows: {**rows, "labels": np.ones(40, np.int64)},
        ErrorCode.INVALID_ROWS,
        {"array": "labels", "value": 1},
    ),
    "labels of another kind": (
        lambda rows: {**rows, "labels": np.linspace(0, 1, 40)},
        ErrorCode.LABEL_MISMATCH,
        {"array": "labels", "dtype": "float64", "shape": (40,)},
    ),
}


def good_rows() -> Arrays:
    return {**text_rows(), **image_rows(), "small": np.zeros((40, 2), np.int8)}


@pytest.mark.parametrize("save", [saved_as_npz, saved_as_npy])
@pytest.mark.parametrize("case", BAD)
def test_rows_that_the_graph_cannot_read_are_refused(
    case: str, save: Callable[[Path, Arrays], str], tmp_path: Path
) -> None:
    change, code, details = BAD[case]
    source = save(tmp_path, change(good_rows()))
    with fails_with(code, RowError if "row" in details else InputError, **details) as caught:
        open_data(rows_config(source), graph("logits", inputs=INPUTS), drawn_rows=8)
    name = details.get("array") or details.get("input")
    assert name is None or repr(name) in str(caught.value)


def damaged(content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "rows.npz"
        path.write_bytes(content)
        return path

    return write


def cut(folder: Path) -> Path:
    path = Path(npz(folder / "rows.npz", text_rows()))
    path.write_bytes(path.read_bytes()[:-90])
    return path


def flipped(folder: Path) -> Path:
    path = Path(npz(folder / "rows.npz", text_rows()))
    content = bytearray(path.read_bytes())
    content[400] ^= 255
    path.write_bytes(content)
    return path


def cut_single(folder: Path) -> Path:
    saved_as_npy(folder, text_rows())
    path = folder / "input_ids.npy"
    path.write_bytes(path.read_bytes()[:-9])
    return path


@pytest.mark.parametrize(
    "write", [damaged(b""), damaged(b"PK\x03\x04"), damaged(b"\x93NUMPY"), damaged(b"text"), cut, flipped, cut_single]
)
def test_damaged_files_are_refused(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    with fails_with(ErrorCode.FILE_UNREADABLE, path=path):
        open_data(rows_config(str(path.parent)), graph("logits"), drawn_rows=8)


def test_what_is_no_file_of_arrays_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "rows.tsv"
    table.write_text("text\nthe film\n")
    (tmp_path / "empty").mkdir()
    both = tmp_path / "both"
    both.mkdir()
    saved_as_npy(both, text_rows())
    saved_as_npz(both, text_rows())
    for source, code in (
        (table, ErrorCode.INVALID_VALUE),
        (tmp_path / "missing.npz", ErrorCode.FILE_MISSING),
        (tmp_path / "empty", ErrorCode.FILE_MISSING),
        (both, ErrorCode.CONTRADICTION),
    ):
        with fails_with(code, path=source):
            open_data(rows_config(str(source)), graph("logits"), drawn_rows=8)
    with fails_with(ErrorCode.FILE_MISSING, path=tmp_path / "missing.npz"):
        require_file(str(tmp_path / "missing.npz"))


def test_files_of_a_folder_have_the_same_arrays_and_axes(tmp_path: Path) -> None:
    rows = image_rows(8)
    npz(tmp_path / "0.npz", rows)
    npz(tmp_path / "1.npz", {**rows, "labels": np.zeros(8, np.int64)})
    with fails_with(ErrorCode.FILE_MISMATCH, path=tmp_path / "1.npz", array="labels"):
        opened(graph("logits", inputs=IMAGE_INPUTS), str(tmp_path))
    free = {"image": InputSpec(FLOAT32, (None, None, 4))}
    npz(tmp_path / "1.npz", {"image": np.zeros((8, 3, 4), np.float32)})
    with fails_with(ErrorCode.TENSOR_MISMATCH, array="image", shape=(3, 4), expected=(2, 4)):
        opened(graph("logits", inputs=free), str(tmp_path))


def test_files_may_be_padded_to_several_lengths(tmp_path: Path) -> None:
    npz(tmp_path / "0.npz", text_rows(12, 9))
    npz(tmp_path / "1.npz", text_rows(12, 15, seed=1))
    folder = graph("last_hidden_state")
    data = opened(folder, str(tmp_path))
    assert score(data, folder, data.test) == pytest.approx(1.0, abs=1e-6)


def test_tags_may_be_padded_to_several_lengths(tmp_path: Path) -> None:
    for number, positions in enumerate((9, 15)):
        rows = text_rows(12, positions, seed=number)
        npz(tmp_path / f"{number}.npz", {**rows, "labels": rows["input_ids"] % 4})
    folder = graph("tags_logits")
    data = open_data(rows_config(str(tmp_path)), folder)
    for examples in (data.train, data.test):
        for _, batch in batches(data.task, examples):
            expected = np.where(batch["attention_mask"] == 0, -100, batch["input_ids"] % 4)
            assert np.array_equal(batch["labels"], expected)


def test_single_files_are_memory_mapped(tmp_path: Path) -> None:
    data = opened(graph("logits"), saved_as_npy(tmp_path, text_rows()))
    parts = data.task._parts  # type: ignore[attr-defined]
    assert all(isinstance(array, np.memmap) for array in parts[0].arrays.values())


def test_further_rows_without_labels_are_added(tmp_path: Path) -> None:
    rows = {**text_rows(), "labels": np.arange(360).reshape(40, 9) % 4}
    source, further = npz(tmp_path / "rows.npz", rows), npz(tmp_path / "further.npz", text_rows(seed=1))
    data = open_data(rows_config(source, unlabelled_data=further), graph("tags_logits"), drawn_rows=100)
    assert len(data.train) == 36 + 40
    assert data.task.collate([data.train[0], data.train[-1]])["input_ids"].shape[0] == 2
