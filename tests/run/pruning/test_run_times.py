"""Times that a run measured outlive an interruption: the same command goes on to the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import compressor
import graph_passes
from compressor.errors import BudgetError, ErrorCode
from compressor.measure import macs
from compressor.measure.costs import CostTable, GroupCosts
from compressor.results import NoteCode
from compressor.run.pruning import cost_tables
from compressor.run.pruning.cost_tables import CostSource
from compressor.store import Store
from compressor.targets import Engine
from graph_passes import Plan
from tests.faults import fails_with
from tests.run.listeners import RecordingListener, interrupt
from tests.run.pruning.budget_runs import budget_recipe, codes


class Source(CostSource):
    """Measures other times at each call."""

    def __init__(self) -> None:
        parts: dict[str, Any] = dict.fromkeys(("model", "groups", "engines", "dense", "inputs"))
        super().__init__(**parts, log=cast(Any, RecordingLog()))
        vars(self).update(calls=0, machine="one")

    calls: int
    machine: str

    def key(self) -> dict[str, str]:
        return {"machine": self.machine}

    def time_tables(self, macs: CostTable) -> list[CostTable]:
        return [macs.model_copy(update={"unit": "ms", "dense": float(self._next())})]

    def time_plan(self, counts: Mapping[str, int], tables: Sequence[CostTable]) -> list[float]:
        return [float(self._next()) for _ in tables]

    def _next(self) -> int:
        vars(self)["calls"] += 1
        return self.calls


class RecordingLog:
    """Collects the codes of notes."""

    def __init__(self) -> None:
        self.codes: list[NoteCode] = []

    def add_notes(self, notes: Sequence[Any]) -> None:
        self.codes += [note.code for note in notes]


def counted() -> CostTable:
    row = GroupCosts(groups=("a",), type="neurons", counts=(0, 32), savings=(3.0, 0.0))
    return CostTable(unit="macs", batch=1, seq=8, dense=5.0, whole=5.0, rows=(row,))


@pytest.fixture
def source() -> Source:
    return Source()


def test_measured_times_are_not_measured_again(source: Source, tmp_path: Path) -> None:
    store = Store(tmp_path, version=1)
    tables = source.time_tables_once(counted(), store)
    plans = [source.time_plan_once({"a": count}, tables, store) for count in (8, 16)]
    calls = source.calls
    assert source.time_tables_once(counted(), store) == tables
    assert [source.time_plan_once({"a": count}, tables, store) for count in (8, 16)] == plans
    assert source.calls == calls
    assert cast(RecordingLog, source.log).codes == [NoteCode.RESUMED]
    assert source.time_plan_once({"a": 24}, tables, store) not in plans


@pytest.mark.parametrize("change", ["machine", "damage"])
def test_times_of_another_machine_and_damaged_ones_are_measured_anew(
    source: Source, tmp_path: Path, change: str
) -> None:
    store = Store(tmp_path, version=1)
    tables = source.time_tables_once(counted(), store)
    if change == "machine":
        vars(source)["machine"] = "two"
    else:
        (tmp_path / "times" / "result.json").write_text("{")
    assert source.time_tables_once(counted(), store) != tables
    assert cast(RecordingLog, source.log).codes == []


@pytest.fixture
def noisy_times(monkeypatch: pytest.MonkeyPatch) -> np.random.Generator:
    """Times in proportion to multiply-accumulates, times a random number that no two measurements share."""
    noise = np.random.default_rng(0)

    def times(engines: Sequence[Engine], *args: object) -> list[float]:
        return [
            1e-6 * float(macs(graph_passes.load(engine.path), 1, 8) or 0) * noise.uniform(0.9, 1.1)
            for engine in engines
        ]

    def tables(engines: object, groups: object, macs: CostTable, *args: object) -> list[CostTable]:
        factor = 1e-3 * noise.uniform(0.9, 1.1)
        return [macs.scaled(factor).model_copy(update={"unit": "ms", "dense": 1e-3 * macs.dense, "seq": 8, "batch": 1})]

    monkeypatch.setattr(cost_tables, "paired_times", times)
    monkeypatch.setattr(cost_tables, "measure_times", tables)
    return noise


@pytest.mark.zoo
@pytest.mark.usefixtures("short_timing")
@pytest.mark.parametrize("stage", ["gathering statistics", "measuring what", "timing the plan", "refitting"])
def test_an_interrupted_run_goes_on_to_the_same_plan(
    stage: str, inputs: Path, tmp_path: Path, noisy_times: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = noisy_times.bit_generator.state
    compressor.compress(budget_recipe(inputs, tmp_path / "whole", speedup=1.4))
    noisy_times.bit_generator.state = state
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of the second run"))
    recipe = budget_recipe(inputs, tmp_path / "out", speedup=1.4)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe, RecordingListener(stage, interrupt))
    report = compressor.compress(recipe)
    assert NoteCode.RESUMED in codes(report)
    whole, resumed = (Plan.load(tmp_path / name / "plan.json") for name in ("whole", "out"))
    assert resumed.groups == whole.groups
    assert resumed.neurons_kept < resumed.neurons


@pytest.mark.usefixtures("short_timing", "noisy_times")
def test_an_unreachable_time_is_refused_before_the_rows_are_read(inputs: Path, tmp_path: Path) -> None:
    listener = RecordingListener()
    with fails_with(ErrorCode.BUDGET_UNREACHABLE, BudgetError):
        compressor.compress(budget_recipe(inputs, tmp_path / "out", speedup=1000), listener)
    assert not any("statistics" in stage for stage in listener.stages)
