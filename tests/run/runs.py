"""A tiny model with rows that it can learn, and recipes of short runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compressor.config.run import Recipe
from tests import folders

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven"]


def write_inputs(folder: Path) -> Path:
    """A folder with `model`, one layer of two heads, and `rows.tsv`."""
    torch.manual_seed(0)
    folders.save(folders.bert(), folder / "model")
    rows = [f"{n % 2}\tthe {'good' if n % 2 else 'bad'} film {NUMBERS[n % 7]} {NUMBERS[n % 5]}" for n in range(48)]
    (folder / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return folder


def learning_recipe(inputs: Path, out: Path, **fields: Any) -> Recipe:
    """A short run that learns to keep one head."""
    defaults = {"keep": 1, "steps": 4, "batch_size": 8, "max_length": 8, "batch": (1,), "seq": (8,), "seconds": 0.01}
    return Recipe(**{"model": inputs / "model", "out": out, "data": str(inputs / "rows.tsv"), **defaults, **fields})
