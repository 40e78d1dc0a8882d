"""One of several processes that distil a tiny model; `launch` starts this module."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from compressor.training.checkpoints import digest
from tests.training.students import distil, schedule


def values_of(folder: Path, name: str, batch_size: int) -> dict[str, Any]:
    """Losses, divergences and weights of a short distillation."""
    settings = {"batch_size": batch_size, "learning_rate": 2e-3, "evaluations": 2}
    student, log = distil(folder, folder / name, schedule(8, **settings))
    return {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "divergences": [entry["eval_divergence"] for entry in log if "eval_divergence" in entry],
        "weights": digest(student),
    }


def main(folder: Path) -> None:
    """Distil in one of several processes, and write its result."""
    state = PartialState(cpu=True)
    result = {**values_of(folder, "together", 4), "processes": state.num_processes}
    (folder / f"rank{state.process_index}.json").write_text(json.dumps(result))
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
