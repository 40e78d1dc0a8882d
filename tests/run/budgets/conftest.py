"""Short runs under a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from compressor.measure.costs import CostTable
from compressor.pruning import measure
from compressor.pruning.costs import count_costs
from compressor.pruning.measure import CostSource
from compressor.report import load as load_report
from compressor.results import Report
from compressor.targets import Engine
from compressor.targets.base import Feeds
from tests.run.budgets.budget_runs import run, seconds_by_macs
from tests.written_once import written_once


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, for cost tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def times_by_macs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """A call of an engine takes a nanosecond a multiply-accumulate, in cost tables and in rounds of measuring.

    The value is a list that gets, for each plan that is timed, its predicted and measured time at the first size.
    """
    timed: list[tuple[float, float]] = []
    original = CostSource.time_plan

    def times(engines: Sequence[Engine], feeds: Feeds, *args: object) -> list[float]:
        batch, seq = next(iter(feeds.values())).shape
        return [seconds_by_macs(engine, batch, seq) for engine in engines]

    def tables(source: CostSource, macs: CostTable, store: Any, on_progress: Any) -> list[CostTable]:
        graph_of, plan, sizes = source.engines.float_graph, source.engines.plan, [size[:2] for size in source.inputs]
        _, *counted = count_costs(graph_of, plan, source.groups, sizes, on_progress)
        return [
            table.scaled(1e-6).model_copy(update={"unit": "ms", "dense": 1e3 * times([source.dense], feeds)[0]})
            for table, feeds in zip(counted, source.inputs.values(), strict=True)
        ]

    def time_plan(source: CostSource, counts: Mapping[str, int], tables: Sequence[CostTable]) -> list[float]:
        measured = original(source, counts, tables)
        timed.append((tables[0].cost(counts), measured[0]))
        return measured

    monkeypatch.setattr(CostSource, "time_plan", time_plan)
    monkeypatch.setattr(measure, "paired_times", times)
    monkeypatch.setattr(CostSource, "measured_tables", tables)
    return timed


@pytest.fixture(scope="session")
def pruned(inputs: Path) -> tuple[Path, Report]:
    """The output folder of a run for 60% of the multiply-accumulates, and its report."""
    out = written_once("pruned", lambda folder: run(inputs, folder / "out", macs="60%")) / "out"
    return out, load_report(out)
