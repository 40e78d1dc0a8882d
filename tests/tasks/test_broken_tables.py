"""Tables of other programs are read right, or end in one line that names the file and whose advice leads on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from compressor.errors import InputError
from compressor.model_folder import ModelFolder
from compressor.tasks import open_data
from compressor.tasks.columns import LabelColumn, TextColumns
from compressor.tasks.labels import numbers_of, with_points
from compressor.tasks.row_files import read_rows
from tests import folders
from tests.command import compress
from tests.tasks.broken_tables import DECIMALS, PLAIN, ROWS, TABLES, Table, written

COMMAND = re.compile(r"\(((?:sed) .*)\)$|convert it by (.*)$")


def write(folder: Path, table: Table) -> Path:
    path = folder / table.name
    path.write_bytes(table.content)
    return path


def pairs_of(path: Path, columns: tuple[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    """Text and label of every row."""
    rows, _ = read_rows([path])
    text, label = columns or (None, None)
    (name,) = TextColumns().find(rows, () if text is None else (text,), str(path))
    return tuple(zip(rows[name][:], rows[LabelColumn().find(rows, label, str(path))][:], strict=True))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_right_or_names_its_file(tmp_path: Path, name: str) -> None:
    table = TABLES[name]
    path = write(tmp_path, table)
    if table.rows is not None:
        assert pairs_of(path, table.columns) == table.rows
        return
    with pytest.raises(InputError) as caught:
        pairs_of(path, table.columns)
    assert caught.value.code is table.code
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    match = COMMAND.search(str(caught.value))
    if match is None or shutil.which("iconv") is None:
        return
    subprocess.run(next(filter(None, match.groups())), shell=True, check=True)
    converted = next((file for file in tmp_path.iterdir() if ".utf8." in file.name), path)
    assert pairs_of(converted) in (ROWS, PLAIN)


@pytest.mark.parametrize(
    "name", ["Latin-1", "Latin-1, compressed", "Windows-1252", "no line of names", "no line of names, tabs"]
)
def test_some_advice_is_a_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        pairs_of(write(tmp_path, TABLES[name]))
    assert COMMAND.search(str(caught.value))


def test_a_table_of_semicolons_has_the_tokens_of_one_of_tabs(tmp_path: Path, classifier: ModelFolder) -> None:
    paths = [tmp_path / "a.csv", tmp_path / "b.tsv"]
    for path, separator in zip(paths, ";\t", strict=True):
        path.write_text(written(separator))
    first, second = (open_data(folders.rows_config(str(path)), classifier) for path in paths)
    assert first.train_hash == second.train_hash


def test_a_long_table_has_the_dialect_of_its_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(written(";", ROWS * 6000))
    assert pairs_of(path) == ROWS * 6000


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["0,5", "1,25", "2"], [0.5, 1.25, 2.0]),
        (["-0,5", "1,250"], [-0.5, 1.25]),
        (["1,000", "2,500"], None),
        (["0,5", "0.5"], None),
        (["0,5", "a"], None),
    ],
)
def test_commas_are_decimal_where_no_other_reading_fits(texts: list[str], expected: list[float] | None) -> None:
    assert (with_points(texts) == texts) == (expected is None)
    if expected is not None:
        assert [float(text) for text in with_points(texts)] == expected


def test_a_regression_reads_decimal_commas(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(written(";", DECIMALS))
    rows, _ = read_rows([path])
    assert numbers_of(rows, "label", "a") == [float(label.replace(",", ".")) for _, label in DECIMALS]


@pytest.mark.zoo
@pytest.mark.parametrize("name", TABLES)
def test_a_run_with_a_table_ends_well_or_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], classifier: ModelFolder, name: str
) -> None:
    table = TABLES[name]
    path, columns = write(tmp_path, table), []
    if table.columns is not None:
        columns = ["--text-columns", table.columns[0], "--label-column", table.columns[1]]
    flags = [
        "--training-steps",
        "2",
        "--keep",
        "50%",
        "--seconds",
        "0.1",
        "--batch",
        "1",
        "--seq",
        "8",
        "--max-length",
        "16",
    ]
    result = compress(capfd, classifier.path, "-o", tmp_path / "out", "--data", path, *columns, *flags)
    if table.rows is not None:
        assert result.code == 0, result.err
    else:
        assert (result.code, result.error_code) == (3, table.code)
        assert result.err.splitlines()[-1].startswith(f"compress: {path}: ")
