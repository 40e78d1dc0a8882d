"""Read the files of a model folder, and check them: its configuration, and weights that are whole, safe and finite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
MODULES = "modules.json"
THRESHOLD_FILES = "*thresholds.json"
SAFE_WEIGHTS, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED_WEIGHTS, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_OTHER_FORMATS = (".h5", ".msgpack", ".gguf", ".onnx")
_LFS = b"version https://git-lfs"
"""Beginning of a pointer of Git LFS, which stands for a large file."""


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
        text = f"{problem}; {advice or 'give the folder that save_pretrained wrote, or an ONNX file'}"
        raise InputError.of_file(path, text, ErrorCode.FILE_MISSING)
    raw = read_json(file)
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        text = "has no model_type and is not a transformers configuration; save the model again"
        raise InputError.of_file(file, text, ErrorCode.FILE_UNREADABLE, field="model_type")
    _check_not_quantized(file, raw)
    return raw


def load_config(path: Path, remote: bool) -> PretrainedConfig:
    """The configuration as transformers reads it; raise InputError if it cannot."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=remote)
    except Exception as error:
        # Any value of a configuration can raise any error in the class of its family.
        text = f"cannot be used ({one_line(error)}); correct it or copy it again"
        raise InputError.of_file(path / CONFIG, text, ErrorCode.FILE_UNREADABLE, reason=one_line(error)) from error


def _check_not_quantized(file: Path, raw: Mapping[str, Any]) -> None:
    """Raise InputError if the weights are quantized: integers that only the kernels of a library can read."""
    parts = (raw, *(part for part in raw.values() if isinstance(part, dict)))
    settings = next(filter(None, (part.get("quantization_config") for part in parts)), None)
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise InputError.of_file(
            file,
            f"the weights are quantized ({method or 'quantization_config'}), and only whole ones can be"
            " compressed; give the model from which they were quantized (--precision int8 quantizes the engine)",
            ErrorCode.UNSUPPORTED_MODEL,
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
        raise InputError.of_file(
            file, f"no such file, but {MODULES} names its folder; copy it too", ErrorCode.FILE_MISSING
        )
    content = read_json(file)
    if not isinstance(content, dict):
        raise damaged(file, ValueError("no JSON object"))
    return content


def damaged(file: Path, error: Exception) -> InputError:
    """The error of a file that cannot be read, with the reason."""
    return InputError.of_file(file, f"cannot be read ({one_line(error)}); copy it again", ErrorCode.FILE_UNREADABLE)


@dataclass(frozen=True)
class WeightFiles:
    """The files from which the weights of a folder are read.

    Attributes:
        folder: the folder.
        name: the file that transformers opens first: all tensors, or an index of shards.
        shards: the files with tensors.
        pickled: whether they are pickled.
    """

    folder: Path
    name: str
    shards: tuple[str, ...]
    pickled: bool

    @property
    def path(self) -> Path:
        """The path of `name`."""
        return self.folder / self.name

    def tensors(self) -> dict[str, Any]:
        """Name -> tensor; slices, which are read on use, of safetensors."""
        import torch

        tensors: dict[str, Any] = {}
        for file in (self.folder / shard for shard in self.shards):
            if self.pickled:
                tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            else:
                opened = safe_open(file, framework="pt")
                tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return tensors


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights under a name that transformers searches for."""
    return any((folder / name).is_file() for name in (SAFE_WEIGHTS, _SAFE_INDEX, PICKLED_WEIGHTS, _PICKLED_INDEX))


def check_weight_files(folder: Path, config: Mapping[str, Any], allow_pickle: bool) -> WeightFiles:
    """Find the weights in the order in which transformers searches for them, and check their files.

    Raises:
        InputError: there are no weights, a shard is missing, a file is truncated or has quantized weights, or the
            weights are pickled without permission.
    """
    names = (config.get("transformers_weights"), SAFE_WEIGHTS, _SAFE_INDEX, PICKLED_WEIGHTS, _PICKLED_INDEX)
    name = next((name for name in names if isinstance(name, str) and (folder / name).is_file()), None)
    if name is None:
        unsupported = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_FORMATS)
        hint = f"; the format of {unsupported[0]} is not supported" if unsupported else ""
        text = f"{folder}: no weights; save the model there as {SAFE_WEIGHTS} (model.save_pretrained){hint}"
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=folder / SAFE_WEIGHTS)
    pickled = not name.endswith((".safetensors", ".safetensors.index.json"))
    if pickled and not allow_pickle:
        raise InputError.of_file(
            folder / name,
            f"reading pickled weights can run code; save the model again as {SAFE_WEIGHTS}, or add"
            " --allow-pickle if you trust the file",
            ErrorCode.UNSAFE_CODE,
            field="allow_pickle",
        )
    files = _shards(folder, name) if name.endswith(".index.json") else [name]
    for file in files:
        if not (folder / file).is_file():
            text = f"missing, but listed in {name}; copy every shard of the model"
            raise InputError.of_file(folder / file, text, ErrorCode.FILE_MISSING)
        if not pickled:
            _check_header(folder / file)
    return WeightFiles(folder, name, tuple(files), pickled)


def check_finite(folder: Path, model: nn.Module) -> None:
    """Raise InputError if a tensor of the model has a value that is NaN or infinite."""
    import torch

    for name, tensor in model.state_dict().items():
        # The sum is NaN or infinite if any value is, and needs no copy; a finite tensor can overflow it.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            text = (
                f"{count} of {tensor.numel()} values of {name} are NaN or infinite; use a checkpoint from"
                " before the training diverged"
            )
            raise InputError.of_file(folder, text, ErrorCode.NOT_FINITE, tensor=name, count=count)


def _shards(folder: Path, name: str) -> list[str]:
    """The files that an index lists; raise InputError unless all of them are in the folder of the index."""
    index = read_json(folder / name)
    try:
        files = sorted(set(index["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(folder / name, ValueError("no index of shards")) from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            text = f"lists {file!r} outside the folder; shards must be in the folder of their index"
            raise InputError.of_file(folder / name, text, ErrorCode.FILE_UNREADABLE, value=file)
    return files


def _check_header(file: Path) -> None:
    """Raise InputError if a safetensors file is damaged or truncated, or if its weights are quantized."""
    try:
        with safe_open(file, framework="pt") as opened:
            names = (name for name in opened.keys() if name.endswith("weight"))  # noqa: SIM118
            # Integers of 8 bits have a meaning only with the scales of their quantizer.
            quantized = next((name for name in names if opened.get_slice(name).get_dtype() in ("I8", "U8")), None)
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened_file:
            is_pointer = opened_file.read(len(_LFS)) == _LFS
        reason = (
            "is a pointer of Git LFS in place of the weights; run git lfs pull in its repository"
            if is_pointer
            else f"is damaged or truncated ({one_line(error)}); copy or download it again"
        )
        text = f"{reason}"
        raise InputError.of_file(file, text, ErrorCode.FILE_UNREADABLE, is_pointer=is_pointer) from error
    if quantized is not None:
        raise InputError.of_file(
            file,
            f"{quantized} is stored in integers of 8 bits, so the weights are quantized; give the model from"
            " which they were quantized (--precision int8 quantizes the engine)",
            ErrorCode.UNSUPPORTED_MODEL,
            tensor=quantized,
        )
