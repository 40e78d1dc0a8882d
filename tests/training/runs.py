"""Listeners and runs for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from compressor.model_folder import ModelFolder
from compressor.progress import NullListener, ProgressCallback, ignore_progress
from compressor.results import Note
from compressor.tasks import Data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.schedule import Schedule
from compressor.units import Site, find_sites
from tests.language import EndOfPowerError

Log = list[dict[str, Any]]
TIMES = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "train_runtime"}
"""Entries of a log that differ between equal runs."""


class Recorder(NullListener):
    """Collects all notes.

    Args:
        stop: end the run after this step of the training.
    """

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.notes = stop, list[Note]()

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        yield stop_after(self.stop) if name.startswith("training") else ignore_progress

    def note(self, note: Note) -> None:
        self.notes.append(note)


def stop_after(step: int | None) -> ProgressCallback:
    """A progress callback that ends the run after a step."""

    def on_progress(finished: int, total: int) -> None:
        if finished == step:
            raise EndOfPowerError

    return on_progress


def train_model(folder: ModelFolder, data: Data, schedule: Schedule, path: Path, **options: Any) -> Log:
    """Train the model of a folder in place, with checkpoints in `path`."""
    return fit(folder.model, data, schedule, Checkpoints(path, {}), **options)


def sites_of(folder: ModelFolder) -> list[Site]:
    """The attention sites of a language model."""
    return find_sites(folder.model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})


def without_times(log: Log) -> Log:
    """The entries of a log without durations; the summary of the whole run is left out."""
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in log if "train_loss" not in entry]


def have_same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether two models of one class have equal weights."""
    return all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))
