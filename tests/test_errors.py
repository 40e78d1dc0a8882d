"""Every error that the product creates has a code."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import compressor
from compressor import errors
from compressor.errors import CompressorError, ErrorCode, InputError

PACKAGE = Path(compressor.__file__).parent
ERRORS = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, CompressorError)
}


def created_errors(source: str) -> Iterator[ast.Call]:
    """Calls of an error class by its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            yield node


def test_every_error_has_a_code() -> None:
    calls = [(file, call) for file in PACKAGE.rglob("*.py") for call in created_errors(file.read_text("utf-8"))]
    without = [
        f"{file.relative_to(PACKAGE)}:{call.lineno}"
        for file, call in calls
        if not {"code", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert calls
    assert not without


def test_a_call_without_a_code_is_seen() -> None:
    (call,) = created_errors('raise InputError("no rows")')
    assert not call.keywords


def test_an_error_from_another_process_keeps_its_code() -> None:
    error = pickle.loads(pickle.dumps(InputError("no rows", code=ErrorCode.TOO_FEW_ROWS, path="rows.tsv")))
    assert (error.code, error.details) == (ErrorCode.TOO_FEW_ROWS, {"path": "rows.tsv"})
