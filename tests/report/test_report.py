"""The files of a report, its summary in a terminal, and its numbers as text."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from compressor.errors import InputError
from compressor.report import formatting, load, summary, write
from compressor.report.files import to_json
from compressor.results import Refusal, Report
from tests.report import examples, reports


@pytest.mark.parametrize("name", examples.REPORTS)
def test_report_is_read_back_from_strict_json_without_a_change(name: str, tmp_path: Path) -> None:
    text = to_json(examples.REPORTS[name]())
    json.loads(text, parse_constant=pytest.fail)
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    assert to_json(load(tmp_path)) == text


def test_a_loaded_report_is_written_to_the_same_files(tmp_path: Path) -> None:
    page = write(reports.report(), tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert page == tmp_path / "report.html"
    assert set(first) == {"report.json", "report.html"}
    write(load(tmp_path), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_report_is_validated_before_it_is_written(tmp_path: Path) -> None:
    invalid = examples.bare().model_copy(update={"drop_status": "perhaps"})
    with pytest.raises(pydantic.ValidationError, match="drop_status"):
        write(invalid, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_former_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(examples.bare(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_text = Path.write_text

    def fail_to_write(path: Path, text: str, **kwargs: Any) -> int:
        if "html" in path.name:
            raise OSError(28, "No space left on device")
        return write_text(path, text, **kwargs)

    monkeypatch.setattr(Path, "write_text", fail_to_write)
    with pytest.raises(OSError, match="No space left"):
        write(examples.not_faster(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "report.json: no such report; name the folder of a finished run, or of one rung of a ladder"),
        (b"", "report.json: report: Invalid JSON: EOF"),
        (b'{"version": 1, "verdict"', "report.json: report: Invalid JSON: EOF"),
        (b"\xff\xfe\x00", "report.json: report: Invalid JSON"),
        (b"[]", "report.json: report: Input should be an object"),
        (b'{"version": 2}', "report.json: version: Input should be 1"),
    ],
)
def test_damaged_report_gives_a_one_line_error(content: bytes | None, text: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_field_is_named(tmp_path: Path) -> None:
    data = json.loads(to_json(examples.bare()))
    data["plan"]["groups"][0]["colour"] = "red"
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"plan\.groups\.0\.heads\.colour"):
        load(tmp_path / "report.json")


def _printed(report: Report, width: int) -> str:
    buffer = io.StringIO()
    Console(width=width, file=buffer).print(summary(report))
    return buffer.getvalue()


@pytest.mark.parametrize("name", examples.REPORTS)
def test_summary_fits_a_terminal_and_opens_with_the_verdict(name: str) -> None:
    report = examples.REPORTS[name]()
    text = _printed(report, 80)
    assert " ".join(text.split()).startswith(report.verdict)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_summary_prints_brackets_unchanged() -> None:
    report = reports.report(refused=(Refusal(what="[red]x[/red]", why="[/]"),))
    assert "refused: [red]x[/red]: [/]" in _printed(report, 200)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.count(999), "999"),
        (formatting.count(999_950), "1M"),
        (formatting.count(22_713_602), "22.7M"),
        (formatting.count(None), "not measured"),
        (formatting.size(91_000_000), "91 MB"),
        (formatting.size(12), "12 B"),
        (formatting.significant(0.0), "0"),
        (formatting.significant(-0.01234), "−0.0123"),
        (formatting.significant(1234.5), "1234"),
        (formatting.significant(math.inf), "∞"),
        (formatting.seconds(59.9), "59.9 s"),
        (formatting.seconds(3_725), "1 h 2 min"),
        (formatting.change(100, 84.3), "−15.7%"),
        (formatting.change(1e6, 1e6 - 1), "−<0.1%"),
        (formatting.change(0, 5), ""),
    ],
)
def test_numbers_are_formatted_for_readers(text: str, expected: str) -> None:
    assert text == expected


_TEXT = st.text(st.characters(codec="utf-8"))

_PLAIN = st.one_of(_TEXT, st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False))

_VALUE = st.one_of(_PLAIN, st.lists(_PLAIN), st.dictionaries(_TEXT, _PLAIN))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_TEXT, _VALUE))
def test_recipe_is_written_as_valid_toml(recipe: dict[str, Any]) -> None:
    assert tomllib.loads(formatting.toml(recipe)) == recipe


def test_reading_a_report_does_not_import_torch() -> None:
    code = "import sys, compressor.report; print({'torch'} & set(sys.modules))"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert text.stdout.strip() == "set()"
