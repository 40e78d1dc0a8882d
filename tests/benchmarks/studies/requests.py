"""Requests of studies that take a second, their command, and what they record."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.__main__ import NAME, studies
from benchmarks.studies.request import SIZES, StudyRequest, StudySize
from compressor.config.run import Recipe
from compressor.progress import ProgressCallback
from compressor.results import Note
from tests.command import CommandResult, compress

TINY = replace(SIZES["tiny"], steps=3, trials=3, masks=1, seconds=0.001, evaluations=1, sample=8)

AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "grid": {"methods": ("dsp", "ste", "dsp-pipelined", "taylor"), "keeps": (4, 1)},
    "astar": {"budgets": (1.0, 60.0)},
    "penalty": {"penalties": (0.01, 1.0)},
    "blocks": {"shares": (0.5,)},
}


def request_of(
    inputs: Path, out: Path, size: StudySize = TINY, axes: dict[str, tuple[Any, ...]] | None = None, **fields: Any
) -> StudyRequest:
    """The request of a study that takes a second."""
    settings = {"keep": "100%", "batch_size": 8, "max_length": 8, "batch": (1, 2), "seq": (8,), "threads": 1, **fields}
    recipe = Recipe(model=inputs / "model", data=str(inputs / "rows.tsv"), out=out, **settings)
    return StudyRequest(recipe, size, (str(inputs / "rows.tsv"),), axes or {})


def run_command(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> CommandResult:
    """Run `python -m benchmarks.studies` in this process."""
    return compress(capfd, *arguments, command=studies, name=NAME)


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of the CSV file without durations."""
    with (folder / "study.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


class StageRecorder:
    """Records the stages, and calls `action` when a stage begins or after some of its steps.

    Args:
        prefix: start of the name of the stage; empty: none.
        action: what to call.
        after: number of finished steps; 0: at the beginning.
    """

    def __init__(self, prefix: str = "", action: Callable[[], None] = lambda: None, *, after: int = 0) -> None:
        self.prefix, self.action, self.after = prefix, action, after
        self.names: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        self.names.append(name.partition(" (")[0])
        is_at_stage = self.prefix and name.startswith(self.prefix)
        if is_at_stage and not self.after:
            self.action()
        yield lambda finished, total: self.action() if is_at_stage and finished == self.after else None

    def note(self, note: Note | str) -> None: ...


def interrupt() -> None:
    raise KeyboardInterrupt
