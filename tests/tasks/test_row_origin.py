"""An error of a row names its file, and its number there, however the rows were selected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset

from compressor.errors import ErrorCode, RowError
from compressor.model_folder import ModelFolder
from compressor.tasks import open_data
from compressor.tasks.images import read_pixels
from compressor.tasks.raw_texts import read_texts
from compressor.tasks.row_store import RowOrigin
from compressor.tasks.scoring import draw_rows
from compressor.tasks.splits import named_splits
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.pictures import classifier as image_classifier
from tests.tasks.pictures import png, save_classifier
from tests.tasks.rows import jsonl, labelled_rows, tsv
from tests.tasks.tags import folder_of

MANY = 2**17 + 2000
"""More rows than a run encodes that draws a few."""
TAGGED, MISTAGGED = {"words": ["who"], "tags": ["B-LOC"]}, {"words": ["who"], "tags": ["B-PER"]}


def is_moved(row: int) -> bool:
    """Whether a run with seed 0 draws a row of `MANY`, but not every row before it."""
    drawn = np.array(draw_rows(Dataset.from_dict({"index": range(MANY)}), 2**17, 0)["index"][:])
    return bool((drawn == row - 1).any() and (drawn < row - 1).sum() < row - 1)


def test_selections_and_files_are_followed_back() -> None:
    origin = RowOrigin(((Path("a"), 2), (Path("b"), 3)))
    selected = origin.select(lambda: np.array([1, 2, 4])).select(lambda: np.array([0, 2]))
    for located, expected in ((origin, ("aabbb", [1, 2, 1, 2, 3])), (selected, ("ab", [2, 3]))):
        files, rows = located.locate(np.arange(len(expected[0])))
        assert (files, rows.tolist()) == ([Path(name) for name in expected[0]], expected[1])
    files, rows = RowOrigin().select(lambda: np.array([7])).locate(np.array([0]))
    assert (files, rows.tolist()) == ([None], [8])


def test_the_error_of_a_data_set_keeps_its_source() -> None:
    with (
        fails_with(ErrorCode.INVALID_ROWS, row=8, file=None, source="rows") as caught,
        RowOrigin().select(lambda: np.array([7])).located(),
    ):
        raise RowError.of("rows", 1, "is empty; fill it")
    assert str(caught.value) == "rows: row 8: is empty; fill it"


def test_rows_of_a_single_file_are_counted_after_its_header(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "1\tgood", "\tbad", "0\tbad")
    with fails_with(ErrorCode.INVALID_ROWS, column="label", row=2, file=Path(path)) as caught:
        open_data(rows_config(path), classifier)
    assert str(caught.value).startswith(f"{path}: row 2: ")


def test_a_drawn_row_has_its_number_in_the_file(classifier: ModelFolder, tmp_path: Path) -> None:
    bad = 3_000
    rows = labelled_rows(6) * (MANY // 6 + 1)
    rows[bad - 1] = "\tgood"
    train, evaluation = tsv(tmp_path / "a.tsv", *rows[:MANY]), tsv(tmp_path / "b.tsv", *labelled_rows(6))
    assert is_moved(bad)
    with fails_with(ErrorCode.INVALID_ROWS, column="label", row=bad, file=Path(train)):
        open_data(rows_config(train, evaluation, evaluation), classifier, drawn_rows=10)


@pytest.mark.zoo  # it takes long to write and to read that many rows of words
def test_a_drawn_row_of_words_has_its_number_in_its_file(tmp_path: Path) -> None:
    bad = 4_000
    (tmp_path / "train").mkdir()
    jsonl(tmp_path / "train" / "1.jsonl", *[TAGGED] * 3_000)
    jsonl(tmp_path / "train" / "2.jsonl", *[TAGGED] * (bad - 3_001), MISTAGGED, *[TAGGED] * (MANY - bad))
    evaluation = jsonl(tmp_path / "b.jsonl", *[TAGGED] * 6)
    assert is_moved(bad)
    with fails_with(ErrorCode.LABEL_MISMATCH, row=bad - 3_000, file=tmp_path / "train" / "2.jsonl", value="B-PER"):
        open_data(rows_config(str(tmp_path / "train"), evaluation, evaluation), folder_of(), drawn_rows=10)


@pytest.mark.parametrize("column", ["label", "text"])
@pytest.mark.parametrize("names", [("1.jsonl", "2.jsonl"), ("train-1.jsonl", "train-2.jsonl", "dev.jsonl")])
def test_a_row_of_a_folder_has_its_number_in_its_file(
    names: tuple[str, ...], column: str, classifier: ModelFolder, tmp_path: Path
) -> None:
    rows = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]
    for name in names:
        jsonl(tmp_path / name, *rows, *rows)
    jsonl(tmp_path / names[1], *rows, {**rows[0], column: None})
    with fails_with(ErrorCode.INVALID_ROWS, column=column, row=3, file=tmp_path / names[1]):
        open_data(rows_config(str(tmp_path)), classifier)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_row_of_a_split_has_its_number_in_its_file(is_folder: bool, classifier: ModelFolder, tmp_path: Path) -> None:
    rows = ["train\t1\tgood", "dev\t1\tgood", "train\t0\tbad", "dev\t0\tbad", "train\t1\tbad", "dev\tnone\tbad"]
    path = tsv(tmp_path / "2.tsv", *rows, header="split\tlabel\ttext")
    if is_folder:
        tsv(tmp_path / "1.tsv", *rows[:3], header="split\tlabel\ttext")
    with fails_with(ErrorCode.LABEL_MISMATCH, row=6, file=Path(path), value="none"):
        open_data(rows_config(str(tmp_path) if is_folder else path), classifier)


def test_a_row_of_words_in_a_split_has_its_number_in_its_file(tmp_path: Path) -> None:
    train, dev = ({"split": split, **TAGGED} for split in ("train", "dev"))
    jsonl(tmp_path / "1.jsonl", train, dev, train)
    path = jsonl(tmp_path / "2.jsonl", train, train, {**dev, **MISTAGGED}, dev)
    with fails_with(ErrorCode.LABEL_MISMATCH, row=3, file=Path(path), value="B-PER"):
        open_data(rows_config(str(tmp_path)), folder_of())


def test_a_row_without_a_split_has_its_number_in_its_file(tmp_path: Path) -> None:
    for name, rows in (("1.tsv", ["train\ta", "dev\tb"]), ("2.tsv", ["train\tc", "\td"])):
        tsv(tmp_path / name, *rows, header="split\ttext")
    with fails_with(ErrorCode.INVALID_ROWS, column="split", row=2, file=tmp_path / "2.tsv"):
        named_splits(str(tmp_path))


def write_images(folder: Path, bad: bytes) -> Path:
    """Two files of images, of which one in the second is replaced; return that file."""
    for name, contents in (("1.parquet", [png(0), png(1), png(2)]), ("2.parquet", [png(3), bad, png(5)])):
        labels = ["bright", "dark", "grey"]
        pyarrow.parquet.write_table(pa.table({"image": contents, "label": labels}), folder / name)
    return folder / "2.parquet"


def test_an_image_that_the_processor_refuses_has_its_number_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    file, folder = write_images(tmp_path / "rows", png(4)), image_classifier(tmp_path / "model")
    data = open_data(rows_config(eval_data=str(tmp_path / "rows"), test_data=str(tmp_path / "rows")), folder)
    refused = {**data.eval[4], "content": b"no image any more"}
    with fails_with(ErrorCode.INVALID_ROWS, row=2, source=str(file), column="image"):
        data.task.collate([refused])


READERS: dict[str, Callable[[Path], Any]] = {
    "texts": lambda folder: read_texts(str(folder / "texts"), (), 9),
    "images": lambda folder: read_pixels(str(folder / "images"), folder / "model", 9),
}


@pytest.mark.parametrize("kind", READERS)
def test_rows_that_are_read_for_a_graph_have_their_numbers_too(kind: str, tmp_path: Path) -> None:
    (tmp_path / kind).mkdir()
    if kind == "texts":
        jsonl(tmp_path / kind / "1.jsonl", {"text": "a"}, {"text": "b"})
        file = Path(jsonl(tmp_path / kind / "2.jsonl", {"text": "a"}, {"text": None}))
    else:
        save_classifier(tmp_path / "model")
        file = write_images(tmp_path / kind, b"no image")
    with fails_with(ErrorCode.INVALID_ROWS, row=2, file=file):
        READERS[kind](tmp_path)
