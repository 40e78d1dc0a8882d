"""Ladders whose runs are fakes, which write reports at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from compressor.config.ladder import recipes_of
from compressor.config.run import Recipe
from compressor.config.tasks import load_own_task
from compressor.report.files import JSON_NAME, to_json
from compressor.report.frontier import Frontier
from compressor.results import CostShare, Report, Score
from compressor.run import ladder
from compressor.run.ladder import compress_ladder
from compressor.run.write_report import code_of
from tests.report import reports
from tests.run.listeners import RecordingListener

VALUES = "90%,80%,70%"
NAMES = ["macs-90", "macs-80", "macs-70"]


class Runs:
    """Runs in place of those of `run_rungs`, which write the report and the plan of a rung at once.

    Attributes:
        names: the rungs that ran, in order.
        errors: what rungs raise, by name.
        losses: what rungs lose on test rows, by name.
        eval_losses: what they lose on evaluation rows, by name; without a name these have no labels.
        kept: share of the multiply-accumulates that rungs keep, by name; without a name they are not counted.
        recipes: the recipes of the rungs that ran, by name.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.names: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self.losses: dict[str, float] = {}
        self.eval_losses: dict[str, float] = {}
        self.kept: dict[str, float] = {}
        self.recipes: dict[str, Recipe] = {}
        self.seconds = 1_000_000_000

    def __call__(self, rungs: Sequence[Recipe], listener: object, shared: Path) -> Iterator[Report]:
        yield from map(self.run, rungs)

    def run(self, recipe: Recipe) -> Report:
        folder = recipe.output.out
        name = folder.relative_to(self.out).as_posix()
        if name in self.errors:
            raise self.errors[name]
        self.names.append(name)
        self.recipes[name] = recipe
        result = reports.report(
            recipe=recipe.flat(),
            task_code=code_of(load_own_task(recipe.source.task)),
            scores=tuple(self.scores(name)),
            speeds=(reports.speed(1, 128, 40.0, 20.0 / len(self.names)),),
            costs=tuple(self.costs(name)),
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_NAME).write_text(to_json(result))
        result.plan.save(folder / "plan.json")
        self.date(folder / "plan.json")
        return result

    def scores(self, name: str) -> Iterator[Score]:
        """The accuracy on test rows, and on evaluation rows if they have labels."""
        yield reports.accuracy(0.9, 0.9 - self.losses.get(name, 0.0))
        if name in self.eval_losses:
            yield reports.accuracy(0.8, 0.8 - self.eval_losses[name], split="eval")

    def costs(self, name: str) -> Iterator[CostShare]:
        """Times, and multiply-accumulates at two lengths, of which a rung keeps a smaller share at the first."""
        yield CostShare(label="batch 1, length 128", unit="ms", type="rest", before=8.0, after=7.0)
        for length, part in ((8, 0.5), (128, 1.0)) if name in self.kept else ():
            label, kept = f"batch 1, length {length}", part * self.kept[name]
            yield CostShare(label=label, unit="macs", type="attention", before=60.0, after=80.0 * kept)
            yield CostShare(label=label, unit="macs", type="rest", before=20.0, after=0.0)

    def date(self, path: Path) -> None:
        """Change the time of a file to one after those of all files before it."""
        self.seconds += 1
        os.utime(path, (self.seconds, self.seconds))

    def take(self) -> list[str]:
        """The rungs that ran since the last call."""
        names, self.names = self.names, []
        return names


def fake_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Fakes in place of the runs of ladders; every file that they read or write has a later time than those before."""
    fake = Runs(tmp_path / "out")
    for path in (tmp_path / "model" / "model.safetensors", tmp_path / "rows" / "train.tsv", tmp_path / "test.tsv"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("label\ttext\n")
        fake.date(path)
    fake.date(tmp_path / "rows")
    touch = Path.touch

    def touch_later(path: Path, *arguments: Any, **options: Any) -> None:
        touch(path, *arguments, **options)
        fake.date(path)

    monkeypatch.setattr(Path, "touch", touch_later)
    monkeypatch.setattr(ladder, "run_rungs", fake)
    return fake


def flags_of(runs: Runs, **flags: Any) -> dict[str, Any]:
    folder = runs.out.parent
    rows = {"data": str(folder / "rows"), "test_data": str(folder / "test.tsv")}
    return {**rows, "macs": VALUES, "out": str(runs.out), **flags}


def climb(runs: Runs, listener: RecordingListener | None = None, **flags: Any) -> Frontier:
    recipes = recipes_of(str(runs.out.parent / "model"), None, flags_of(runs, **flags))
    return compress_ladder(recipes, runs.out, listener)
