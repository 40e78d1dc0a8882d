"""The JSON files that sentence-transformers writes into the folder of a model, and the errors of reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line

MODULES = "modules.json"


def read_object(file: Path, *, required: bool) -> dict[str, Any]:
    """The JSON object of a file; empty if it is missing and not required."""
    if not required and not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{file}: no such file, but {MODULES} names its folder; copy it too", code=ErrorCode.FILE_MISSING, path=file
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(file, error) from error
    if not isinstance(content, dict):
        raise damaged(file, ValueError("no JSON object"))
    return content


def damaged(file: Path, error: Exception) -> InputError:
    """The error of a file that cannot be read, with the reason."""
    return InputError(
        f"{file}: cannot be read ({one_line(error)}); copy it again", code=ErrorCode.FILE_UNREADABLE, path=file
    )


def invalid(file: Path, name: str, value: object, problem: str) -> InputError:
    """The error of a key of which the value is not what the library writes.

    Args:
        file: the file.
        name: the key.
        value: its value.
        problem: what is wrong with it, e.g. "is not a text".
    """
    return InputError(
        f"{file}: {name} ({value!r:.40}) {problem}; correct it or copy the file again",
        code=ErrorCode.FILE_UNREADABLE,
        path=file,
        field=name,
        value=value,
    )


def unsupported(file: Path, name: str, value: object, problem: str) -> InputError:
    """The error of a value that the library writes and that cannot be used here.

    Args:
        file: the file.
        name: the key.
        value: its value.
        problem: what is not supported, and what to use instead.
    """
    return InputError(f"{file}: {problem}", code=ErrorCode.UNSUPPORTED_MODEL, path=file, field=name, value=value)
