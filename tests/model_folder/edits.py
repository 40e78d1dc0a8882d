"""Edits of the files of a model folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

Edit = Callable[[Path], object]
"""Changes a model folder."""


def edit_config(folder: Path, **entries: Any) -> None:
    """Set entries of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **entries}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of model.safetensors in place."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(**entries: Any) -> Edit:
    return lambda folder: edit_config(folder, **entries)


def set_first_value(tensor: str, value: float) -> Edit:
    return lambda folder: edit_weights(folder, lambda weights: weights[tensor].view(-1)[:1].fill_(value))


def write(name: str, content: str | bytes) -> Edit:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def delete(*names: str) -> Edit:
    def edit(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return edit


def truncate(name: str, share: float) -> Edit:
    def edit(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return edit


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def remove_head(folder: Path) -> None:
    edit_weights(folder, lambda weights: [weights.pop(f"classifier.{kind}") for kind in ("weight", "bias")])


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def remove_shard(folder: Path) -> None:
    model = hf.BertForSequenceClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="3KB")
    next(iter(sorted(folder.glob("*-of-*.safetensors")))).unlink()
