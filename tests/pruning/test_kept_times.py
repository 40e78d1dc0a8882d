"""Times that a run measured outlive an interruption: the same command goes on to the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from compressor.measure.costs import CostTable, GroupCosts
from compressor.pruning.measure import CostSource, KeptTimes
from compressor.results import NoteCode
from compressor.store import Store


class Source:
    """Measures other times at each call."""

    def __init__(self) -> None:
        self.calls = 0
        self.machine = "one"
        self.log = RecordingLog()

    def key(self) -> dict[str, str]:
        return {"machine": self.machine}

    def time_tables(self, macs: CostTable) -> list[CostTable]:
        return [macs.model_copy(update={"unit": "ms", "dense": float(self._next())})]

    def time_plan(self, counts: Mapping[str, int], tables: Sequence[CostTable]) -> list[float]:
        return [float(self._next()) for _ in tables]

    def _next(self) -> int:
        self.calls += 1
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


def times_of(source: Source, tmp_path: Path) -> KeptTimes:
    return KeptTimes(cast(CostSource, source), Store(tmp_path, version=1))


def test_measured_times_are_not_measured_again(source: Source, tmp_path: Path) -> None:
    first = times_of(source, tmp_path)
    tables = first.time_tables(counted())
    plans = [first.time_plan({"a": count}, tables) for count in (8, 16)]
    calls, later = source.calls, times_of(source, tmp_path)
    assert later.time_tables(counted()) == tables
    assert [later.time_plan({"a": count}, tables) for count in (8, 16)] == plans
    assert source.calls == calls
    assert source.log.codes == [NoteCode.RESUMED]
    assert later.time_plan({"a": 24}, tables) not in plans


@pytest.mark.parametrize("change", ["machine", "damage"])
def test_times_of_another_machine_and_damaged_ones_are_measured_anew(
    source: Source, tmp_path: Path, change: str
) -> None:
    tables = times_of(source, tmp_path).time_tables(counted())
    if change == "machine":
        source.machine = "two"
    else:
        (result,) = tmp_path.glob("times-*/result.json")
        result.write_text("{")
    assert times_of(source, tmp_path).time_tables(counted()) != tables
    assert source.log.codes == []
