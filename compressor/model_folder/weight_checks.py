"""Check the weight files of a folder: present, complete, safe to read, and finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.configuration import damaged, read_json
from compressor.silence_libraries import one_line

SAFE_WEIGHTS, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED_WEIGHTS, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_OTHER_FORMATS = (".h5", ".msgpack", ".gguf", ".onnx")
_LFS = b"version https://git-lfs"
"""Beginning of a pointer of Git LFS, which stands for a large file."""


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

    Args:
        folder: the model folder.
        config: entries of its config.json.
        allow_pickle: whether pickled weights may be read.

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
        raise InputError(
            f"{folder / name}: reading pickled weights can run code; save the model again as {SAFE_WEIGHTS}, or add"
            " --allow-pickle if you trust the file",
            code=ErrorCode.UNSAFE_CODE,
            path=folder / name,
            field="allow_pickle",
        )
    files = _shards(folder, name) if name.endswith(".index.json") else [name]
    for file in files:
        if not (folder / file).is_file():
            text = f"{folder / file}: missing, but listed in {name}; copy every shard of the model"
            raise InputError(text, code=ErrorCode.FILE_MISSING, path=folder / file)
        if not pickled:
            _check_header(folder / file)
    return WeightFiles(folder, name, tuple(files), pickled)


def check_finite(folder: Path, model: nn.Module) -> None:
    """Raise InputError if a tensor of the model has a value that is NaN or infinite."""
    for name, tensor in model.state_dict().items():
        # The sum is NaN or infinite if any value is, and needs no copy; a finite tensor can overflow it.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            text = (
                f"{folder}: {count} of {tensor.numel()} values of {name} are NaN or infinite; use a checkpoint from"
                " before the training diverged"
            )
            raise InputError(text, code=ErrorCode.NOT_FINITE, path=folder, tensor=name, count=count)


def _shards(folder: Path, name: str) -> list[str]:
    """The files that an index lists; raise InputError unless all of them are in the folder of the index."""
    index = read_json(folder / name)
    try:
        files = sorted(set(index["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(folder / name, ValueError("no index of shards")) from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            text = f"{folder / name}: lists {file!r} outside the folder; shards must be in the folder of their index"
            raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=folder / name, value=file)
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
        text = f"{file}: {reason}"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=file, is_pointer=is_pointer) from error
    if quantized is not None:
        raise InputError(
            f"{file}: {quantized} is stored in integers of 8 bits, so the weights are quantized; give the model from"
            " which they were quantized (--precision int8 quantizes the engine)",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=file,
            tensor=quantized,
        )
