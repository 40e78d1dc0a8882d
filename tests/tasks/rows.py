"""Files of a few rows, and functions that run a model on their batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from compressor.models.forwards import tensors_of
from compressor.tasks.base import Batch, Forward


def tsv(path: Path, *rows: str, header: str = "label\ttext") -> str:
    """Write rows whose cells are separated by tabs; return the path."""
    path.write_text("\n".join((header, *rows)) + "\n")
    return str(path)


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    """Write one object per line; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text(path: Path, *lines: str) -> str:
    """Write lines of text; return the path."""
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def labelled_rows(count: int) -> list[str]:
    """Rows of a label 0 or 1 and a text of two to four words."""
    return [f"{index % 2}\t{' '.join(['good', 'bad', 'very'][: index % 3 + 1])} {index}" for index in range(count)]


def forward_of(model: Any) -> Forward:
    """Run batches on a PyTorch model."""

    def forward(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(**tensors_of(batch)).logits)

    return forward


def token_ids(rows: Dataset) -> list[list[int]]:
    """The tokens of encoded rows."""
    return [list(row) for row in rows["input_ids"]]
