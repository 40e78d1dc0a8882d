"""Every error that the product creates has a code."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import compressor.errors
import graph_passes.errors
from compressor.errors import CompressorError, ErrorCode, InputError
from graph_passes.errors import GraphPassError
from tests.sources import parsed

ERRORS = {
    name
    for module in (compressor.errors, graph_passes.errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, CompressorError | GraphPassError)
}


def created_errors(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of an error class by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            yield node


@pytest.mark.parametrize("package", [compressor, graph_passes])
def test_every_error_has_a_code(package: ModuleType) -> None:
    folder = Path(str(package.__file__)).parent
    calls = [(file, call) for file in folder.rglob("*.py") for call in created_errors(parsed(file))]
    without = [
        f"{file.relative_to(folder)}:{call.lineno}"
        for file, call in calls
        if not {"code", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert calls
    assert not without


def test_a_call_without_a_code_is_detected() -> None:
    (call,) = created_errors(ast.parse('raise InputError("no rows")'))
    assert not call.keywords


def test_an_error_from_another_process_keeps_its_code() -> None:
    error = pickle.loads(pickle.dumps(InputError("no rows", code=ErrorCode.TOO_FEW_ROWS, path="rows.tsv")))
    assert (error.code, error.details) == (ErrorCode.TOO_FEW_ROWS, {"path": "rows.tsv"})
