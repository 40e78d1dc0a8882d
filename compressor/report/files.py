"""Write `report.json` and `report.html` into a folder atomically, and read `report.json`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pydantic

from compressor.errors import ErrorCode, InputError
from compressor.report.html import render
from compressor.results import Report
from graph_passes.files import atomic_replace, write_text

JSON_NAME = "report.json"
HTML_NAME = "report.html"


def write(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write `report.json` and `report.html`; the same report always gives the same bytes.

    Returns:
        Path of `report.html`.

    Raises:
        pydantic.ValidationError: the report violates its schema (copying a model does not validate it).
        OSError: the folder cannot be written; existing files are left unchanged.
    """
    report = Report.model_validate(report.model_dump(warnings=False))
    folder = Path(folder)
    texts = {folder / HTML_NAME: render(report), folder / JSON_NAME: to_json(report)}
    with contextlib.ExitStack() as stack:  # replaces the files at its end, once both are written
        for path, text in texts.items():
            stack.enter_context(atomic_replace(path)).write_text(text, encoding="utf-8", newline="\n")
    return folder / HTML_NAME


def write_page(report: Report, path: Path) -> Path:
    """Write the page of a report to a file, and return its path."""
    write_text(path, render(report))
    return path


def load(path: str | os.PathLike[str]) -> Report:
    """Read and validate a report.

    Args:
        path: the folder of a finished run, or its `report.json`.

    Raises:
        InputError: the file is missing, is not JSON, or violates the schema; the message names the field.
    """
    path = Path(path)
    path = path / JSON_NAME if path.is_dir() else path
    try:
        data = path.read_bytes()
    except OSError as fault:
        is_missing = isinstance(fault, FileNotFoundError)
        unreadable = f"cannot read the report ({fault.strerror}); correct the permissions of the file"
        text = (
            "no such report; name the folder of a finished run, or of one rung of a ladder"
            if is_missing
            else unreadable
        )
        code = ErrorCode.FILE_MISSING if is_missing else ErrorCode.FILE_UNREADABLE
        raise InputError.of_file(path, text, code) from fault
    try:
        return Report.model_validate_json(data)
    except pydantic.ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "report"
        reason = " ".join(str(first["msg"]).split())
        text = f"{path}: {field}: {reason}; run compress again to write it"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path, field=field) from fault


def to_json(report: Report) -> str:
    """The report as JSON; the same report always gives the same text. Keys are in the order of the fields."""
    return report.model_dump_json(indent=1) + "\n"
