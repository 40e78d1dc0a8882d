"""Are the weights there, whole, safe to read, and numbers? Asked of the files before anything is built from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from compressor.errors import InputError
from compressor.silence_libraries import one_line

_SAFE, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def check_weight_files(folder: Path, config: Mapping[str, Any], allow_pickle: bool) -> bool:
    """Find the weights in the order in which transformers looks for them; return whether they are pickled.

    Raises:
        InputError: there are none, a shard is missing, a file is cut short, or they are pickled and that was not
            allowed.
    """
    named = config.get("transformers_weights")
    names = (named, _SAFE, _SAFE_INDEX, _PICKLED, _PICKLED_INDEX)
    name = next((name for name in names if isinstance(name, str) and (folder / name).is_file()), None)
    if name is None:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".h5", ".msgpack", ".gguf", ".onnx"))
        seen = f"; {others[0]} is not read" if others else ""
        raise InputError(f"{folder}: no weights; save the model there as {_SAFE} (model.save_pretrained){seen}")
    pickled = not name.endswith((".safetensors", ".safetensors.index.json"))
    if pickled and not allow_pickle:
        raise InputError(
            f"{folder / name}: pickled weights can run code when they are read; save the model again as {_SAFE}, or add"
            " --allow-pickle if you trust the file"
        )
    files = _shards(folder, name) if name.endswith(".index.json") else [name]
    for file in files:
        if not (folder / file).is_file():
            raise InputError(f"{folder / file}: is missing, {name} names it; copy every shard of the model")
        if not pickled:
            _check_header(folder / file)
    return pickled


def check_finite(folder: Path, model: nn.Module) -> None:
    """Every number of the model's state is a number.

    Raises:
        InputError: NaN or infinity in a tensor, which it names.
    """
    for name, tensor in model.state_dict().items():
        # A sum is NaN or infinite if any term is, and needs no copy; a finite tensor whose sum overflows is looked at.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"{folder}: {count} of {tensor.numel()} numbers in {name} are NaN or infinite; take a checkpoint from"
                " before the training went wrong"
            )


def _shards(folder: Path, name: str) -> list[str]:
    try:
        files = sorted(set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / name}: is no list of shards ({one_line(error)}); copy it again") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{folder / name}: names {file!r} outside the folder; shards lie beside their list")
    return files


def _check_header(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: is damaged or cut short ({one_line(error)}); copy or download it again") from error
