"""Read the JSON files of a model folder, and check its configuration."""

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
    """The content of config.json.

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
        text = f"{path}: {problem}; {advice or 'give the folder that save_pretrained wrote'}"
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=path)
    raw = read_json(file)
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        text = f"{file}: has no model_type and is not a transformers configuration; save the model again"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=file, field="model_type")
    _check_not_quantized(file, raw)
    return raw


def load_config(path: Path, remote: bool) -> PretrainedConfig:
    """The configuration as transformers reads it; raise InputError if it cannot."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=remote)
    except Exception as error:
        # Any value of a configuration can raise any error in the class of its family.
        text = f"{path / CONFIG}: cannot be used ({one_line(error)}); correct it or copy it again"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path / CONFIG, reason=one_line(error)) from error


def _check_not_quantized(file: Path, raw: Mapping[str, Any]) -> None:
    """Raise InputError if the weights are quantized: integers that only the kernels of a library can read."""
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
    """The content of a JSON file; raise InputError if it is missing, or is not JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(file, error) from error


def read_object(file: Path, *, required: bool) -> dict[str, Any]:
    """The JSON object of a file; empty if it is missing and not required.

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
