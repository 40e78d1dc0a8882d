"""`report.json` and `report.html` in a folder: written beside and renamed, read back with every fault in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pydantic

from compressor.errors import InputError
from compressor.results import Report

JSON_NAME = "report.json"
HTML_NAME = "report.html"


def write(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write both files; the same report always gives the same bytes.

    Returns:
        Path of `report.html`.

    Raises:
        pydantic.ValidationError: the report breaks its own schema (it was made by copying, which does not check).
        OSError: the folder cannot be written; whatever stood there before is left as it was.
    """
    # The page needs matplotlib, which takes long to import and which readers of the data do not need.
    from compressor.report.html import render

    report = Report.model_validate(report.model_dump())
    folder = Path(folder)
    texts = {folder / JSON_NAME: to_json(report), folder / HTML_NAME: render(report)}
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    try:
        for path, text in texts.items():
            beside[path].write_text(text, encoding="utf-8", newline="\n")
        for path in texts:
            beside[path].replace(path)
    finally:
        for path in beside.values():
            path.unlink(missing_ok=True)
    return folder / HTML_NAME


def load(path: str | os.PathLike[str]) -> Report:
    """Read and validate a report: a finished run's folder, or its `report.json`.

    Raises:
        InputError: the file is missing, is not JSON, or breaks the schema; one line says where.
    """
    path = Path(path)
    path = path / JSON_NAME if path.is_dir() else path
    try:
        data = path.read_bytes()
    except FileNotFoundError as fault:
        raise InputError(f"{path}: no report there; give the folder of a finished run") from fault
    except OSError as fault:
        raise InputError(f"{path}: cannot read the report ({fault.strerror}); mend the file's permissions") from fault
    try:
        return Report.model_validate_json(data)
    except pydantic.ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "report"
        why = " ".join(str(first["msg"]).split())
        raise InputError(f"{path}: {where}: {why}; run compress again to write it anew") from fault


def to_json(report: Report) -> str:
    """The report as text; the same bytes for the same report. Keys keep their order, for stages are told in theirs."""
    return report.model_dump_json(indent=1) + "\n"
