"""The JSON files of a model folder, checked before they are used, and the errors of reading them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line

CONFIG = "config.json"
MODULES = "modules.json"


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json, read before transformers reads it.

    Raises:
        InputError: it is missing, is not a configuration of transformers, or says that the weights are quantized.
    """
    file = path / CONFIG
    if not path.exists():
        problem = "no such folder"
    elif not path.is_dir():
        problem = "is a file"
    elif not file.is_file():
        problem = "has no config.json" if any(path.iterdir()) else "is empty"
    else:
        problem = ""
    if problem:
        inner = sorted(folder.parent.name for folder in path.glob(f"*/{CONFIG}")) if path.is_dir() else []
        advice = f"give one of its folders that have one, e.g. {path / inner[0]}" if inner else ""
        raise InputError(
            f"{path}: {problem}; {advice or 'give the folder that save_pretrained wrote'}",
            code=ErrorCode.FILE_MISSING,
            path=path,
        )
    raw = read_json(file)
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise InputError(
            f"{file}: has no model_type and is not a transformers configuration; save the model again",
            code=ErrorCode.FILE_UNREADABLE,
            path=file,
            field="model_type",
        )
    _check_not_quantized(file, raw)
    return raw


def load_config(path: Path, remote: bool) -> PretrainedConfig:
    """The configuration as transformers reads it; raise InputError if it cannot."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=remote)
    except Exception as error:
        # A configuration is free-form: any value can break the class of any family.
        raise InputError(
            f"{path / CONFIG}: cannot be used ({one_line(error)}); correct it or copy it again",
            code=ErrorCode.FILE_UNREADABLE,
            path=path / CONFIG,
            reason=one_line(error),
        ) from error


def _check_not_quantized(file: Path, raw: Mapping[str, Any]) -> None:
    """Raise InputError if weights are quantized, whose values are integers that belong to the kernels of a library."""
    parts = (raw, *(part for part in raw.values() if isinstance(part, dict)))
    settings = next(filter(None, (part.get("quantization_config") for part in parts)), None)
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise InputError(
            f"{file}: the weights are quantized ({method or 'quantization_config'}), and only whole ones can be"
            " compressed; give the model from which they were quantized (--precision int8 quantizes the engine)",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=file,
            field="quantization_config",
            value=method,
        )


def read_json(file: Path) -> Any:
    """The content of a JSON file.

    Raises:
        InputError: it is missing, or is not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(file, error) from error


def read_object(file: Path, *, required: bool) -> dict[str, Any]:
    """The JSON object of a file of sentence-transformers; empty if it is missing and not required.

    Raises:
        InputError: it is required and missing, or is not a JSON object.
    """
    if not file.is_file():
        if not required:
            return {}
        raise InputError(
            f"{file}: no such file, but {MODULES} names its folder; copy it too", code=ErrorCode.FILE_MISSING, path=file
        )
    content = read_json(file)
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
