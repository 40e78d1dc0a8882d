"""Cost tables of a run: a stored one is used where it still holds, and agrees with plans of all groups."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.environment import machine
from compressor.measure.costs import CostTable, GroupCosts
from compressor.model_folder.access import ModelAccess
from compressor.progress import ProgressCallback
from compressor.pruning import measure
from compressor.pruning.measure import CostSource, latest_tables
from compressor.results import Note, NoteCode, Size
from compressor.targets.machine import user_cache
from compressor.units import PrunableGroup, keep_all
from compressor.workdir import RESULT_KEY
from graph_passes import Plan
from tests.run.listeners import interrupt


class Stage:
    """A stage without output."""

    def __enter__(self) -> ProgressCallback:
        return lambda done, total: None

    def __exit__(self, *error: object) -> None:
        pass


class Log:
    """Collects notes."""

    def __init__(self) -> None:
        self.codes: list[NoteCode] = []

    def stage(self, name: str) -> Stage:
        return Stage()

    def add_notes(self, notes: list[Note]) -> None:
        self.codes += [note.code for note in notes]


def table(saving: float, whole: float = 5.0) -> CostTable:
    row = GroupCosts(groups=("a",), type="neurons", counts=(0, 32), savings=(saving, 0.0))
    return CostTable(unit="ms", batch=1, seq=128, dense=10.0, whole=whole, rows=(row,))


def test_the_structure_of_a_model_has_its_configuration_and_its_units() -> None:
    def structure(layers: int, units: int) -> str:
        model: Any = SimpleNamespace(structure=["Bert", {"layers": layers}])
        return ModelAccess.structure_with(model, [PrunableGroup("a", "neurons", units, 1, 8, "a")])

    assert structure(1, 32) == structure(1, 32)
    assert len({structure(1, 32), structure(2, 32), structure(1, 64)}) == 3


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CostSource:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engines = SimpleNamespace(
        label="ort fp32", shapes=(), whole=None, facts={"engine": "ort fp32", "graph": "opset 23"}
    )
    groups = [PrunableGroup("a", "neurons", 32, 1, 8, "a")]
    dense: Any = SimpleNamespace(session={"runtime": "ort"}, host="ort on CPU, 2 threads")
    parts: Any = {"engines": engines, "log": Log(), "inputs": {Size(1, 128): {}}}
    return CostSource("one layer", groups, dense=dense, **parts)


def measure_in_turn(monkeypatch: pytest.MonkeyPatch, *tables: CostTable) -> Iterator[CostTable]:
    remaining = iter(tables)
    monkeypatch.setattr(CostSource, "measured_tables", lambda *args: [next(remaining)])
    return remaining


def time_whole_model(monkeypatch: pytest.MonkeyPatch, dense: float, whole: float) -> None:
    monkeypatch.setattr(measure, "paired_times", lambda *args: [1e-3 * whole, 1e-3 * dense])


def test_a_stored_table_is_scaled_to_the_times_of_today(source: CostSource, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_in_turn(monkeypatch, table(3.0))
    source.time_tables(table(1.0))
    time_whole_model(monkeypatch, 20.0, 10.0)
    (again,) = source.time_tables(table(1.0))
    assert source.log.codes == [NoteCode.COSTS_REUSED]  # type: ignore[attr-defined]
    assert (again.dense, again.whole, again.saving("a", 0)) == pytest.approx((20.0, 10.0, 6.0))


def test_a_stored_table_of_a_busy_machine_is_measured_anew(source: CostSource, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_in_turn(monkeypatch, table(3.0), table(2.0, whole=2.5))
    source.time_tables(table(1.0))
    time_whole_model(monkeypatch, 10.0, 2.5)
    (again,) = source.time_tables(table(1.0))
    assert source.log.codes == [NoteCode.COSTS_REMEASURED]  # type: ignore[attr-defined]
    assert again == table(2.0, whole=2.5)


def use_another(source: CostSource, monkeypatch: pytest.MonkeyPatch, change: str) -> CostSource:
    """The source with another part of what times depend on."""
    facts = machine()
    match change:
        case "machine":
            monkeypatch.setattr(measure, "machine", lambda: facts | {"processor": "another"})
        case "runtime":
            monkeypatch.setattr(measure, "machine", lambda: facts | {"onnxruntime": "0.1"})
        case "device":
            source.dense.host = "ort on a GPU"
        case "graph":
            source.engines.facts["graph"] = "opset 18"
        case "engine" | "precision":
            source.engines.facts["engine"] = f"another {change}"
        case "size":
            return replace(source, inputs={Size(1, 64): {}})
    return source


@pytest.mark.parametrize("change", ["machine", "runtime", "device", "graph", "engine", "precision", "size"])
def test_a_stored_table_of_something_else_is_not_used_and_that_is_noted(
    source: CostSource, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    remaining = measure_in_turn(monkeypatch, table(3.0), table(2.0))
    source.time_tables(table(1.0))
    assert source.log.codes == []  # type: ignore[attr-defined]
    source = use_another(source, monkeypatch, change)
    assert source.time_tables(table(1.0)) == [table(2.0)]
    assert source.log.codes == [NoteCode.COSTS_REMEASURED]  # type: ignore[attr-defined]
    assert not list(remaining)


def test_a_table_of_another_model_is_not_noted(source: CostSource, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_in_turn(monkeypatch, table(3.0), table(2.0))
    source.time_tables(table(1.0))
    replace(source, structure="two layers").time_tables(table(1.0))
    assert source.log.codes == []  # type: ignore[attr-defined]


def test_the_latest_tables_of_a_model_are_those_of_this_machine(
    source: CostSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert latest_tables(source.structure) is None
    measure_in_turn(monkeypatch, table(3.0), table(2.0))
    source.time_tables(table(1.0))
    use_another(source, monkeypatch, "engine").time_tables(table(1.0))
    keys = user_cache().glob(f"costs-*/{RESULT_KEY}")
    first, second = sorted(keys, key=lambda file: "another" in file.read_text())
    for latest, earlier, expected in ((first, second, 3.0), (second, first, 2.0)):
        os.utime(earlier, (1, 1))
        os.utime(latest, (2, 2))
        assert latest_tables(source.structure) == [table(expected)]
    use_another(source, monkeypatch, "machine")
    assert latest_tables(source.structure) is None


def test_a_table_that_cannot_be_stored_is_used_all_the_same(
    source: CostSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_cache().touch()
    measure_in_turn(monkeypatch, table(3.0))
    assert source.time_tables(table(1.0)) == [table(3.0)]
    assert source.log.codes == [NoteCode.COSTS_NOT_STORED]  # type: ignore[attr-defined]


class PlanCounts:
    """Engines that are the numbers of units of their plans.

    Attributes:
        plan: keeps every unit.
        built: the engines, in order.
        interrupted: how many engines are built before the measurement is interrupted; None: all.
    """

    def __init__(self, groups: Sequence[PrunableGroup], **fields: Any) -> None:
        self.__dict__ |= fields
        self.plan = keep_all(groups)
        self.built: list[dict[str, int]] = []
        self.interrupted: int | None = None

    def build(self, plan: Plan) -> dict[str, int]:
        if len(self.built) == self.interrupted:
            interrupt()
        self.built.append(dict(plan.counts))
        return self.built[-1]

    def discard(self, engine: dict[str, int]) -> None:
        pass


class DrawnTimes:
    """Times of plans of two groups, each with noise of its own, in the order in which they are measured.

    Attributes:
        source: measures them.
        counted: multiply-accumulates of the groups.
        timed: the plans that were timed.
        noise: draws the noise.
    """

    def __init__(self, source: CostSource, monkeypatch: pytest.MonkeyPatch) -> None:
        groups = [PrunableGroup(name, "neurons", units, 1, 8, name) for name, units in (("a", 128), ("b", 64))]
        self.engines = engines = PlanCounts(groups, **vars(source.engines))
        parts: dict[str, Any] = {"groups": groups, "engines": engines}
        self.source = replace(source, **parts)
        rows = tuple(
            GroupCosts(groups=(group.name,), type="neurons", counts=(0, group.units), savings=(group.units / 64, 0.0))
            for group in groups
        )
        self.counted = table(1.0).model_copy(update={"rows": rows})
        self.timed, self.noise = list[Any](), np.random.default_rng(0)
        monkeypatch.setattr(measure, "paired_ratios", self.ratios)
        monkeypatch.setattr(measure, "paired_times", lambda *args: [5e-3, 10e-3])

    def ratios(self, engines: Sequence[Any], *args: object) -> list[tuple[float, float]]:
        self.timed.extend(engines[1:])
        return [(sum(counts.values()) / 192 + self.noise.uniform(0.1, 0.2), 0.01) for counts in engines[1:]]


def test_in_little_time_few_plans_are_timed_and_later_runs_go_on(
    source: CostSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups then cost time in proportion to multiply-accumulates, of which `a` has twice as many."""
    drawn = DrawnTimes(source, monkeypatch)
    (brief,) = replace(drawn.source, seconds=0.0).time_tables(drawn.counted)
    assert len(drawn.timed) == 5
    assert brief.saving("a", 0) == pytest.approx(2 * brief.saving("b", 0))
    assert brief.cost({"a": 0, "b": 0}) < brief.cost({"a": 64, "b": 32}) < brief.cost({})
    assert source.log.codes == [NoteCode.TIME_LIMITED]  # type: ignore[attr-defined]
    (whole,) = drawn.source.time_tables(drawn.counted)
    assert whole != brief
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    fresh = DrawnTimes(source, monkeypatch)
    fresh.source.time_tables(fresh.counted)
    assert fresh.timed == drawn.timed


def test_an_interrupted_measurement_goes_on_after_the_plans_that_were_timed(
    source: CostSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measurement draws a time of its own: the table is the same only if no plan is timed twice."""
    drawn = DrawnTimes(source, monkeypatch)
    source, engines, counted, timed, noise = drawn.source, drawn.engines, drawn.counted, drawn.timed, drawn.noise
    state = noise.bit_generator.state
    whole, plans = source.time_tables(counted), [*timed]
    assert len(plans) > 15

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    noise.bit_generator.state = state
    timed.clear()
    engines.built, engines.interrupted = [], 12
    with pytest.raises(KeyboardInterrupt):
        source.time_tables(counted)
    assert timed == plans[:10]
    engines.built, engines.interrupted = [], None
    assert source.time_tables(counted) == whole
    assert engines.built == plans[10:]
    assert timed == plans
    assert not list(user_cache().glob("*.unfinished"))


def test_a_request_takes_the_time_of_its_calls(source: CostSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has feeds that say how long it takes with every unit."""
    drawn = DrawnTimes(source, monkeypatch)
    prompt, token, request = (Size(1, 128, phase) for phase in ("prompt", "token", "request"))

    def times(engines: Sequence[Any], feeds: Any, *args: object) -> list[float]:
        return [1e-3 * feeds["ms"] * (1 if number < 2 else 0.5) for number in range(len(engines))]

    def ratios(engines: Sequence[Any], feeds: Any, *args: object) -> list[tuple[float, float]]:
        return [(0.1 + 0.9 * (sum(counts.values()) / 192) ** feeds["power"], 0.01) for counts in engines[1:]]

    monkeypatch.setattr(measure, "paired_times", times)
    monkeypatch.setattr(measure, "paired_ratios", ratios)
    inputs: Any = {prompt: {"ms": 8.0, "power": 1.0}, token: {"ms": 2.0, "power": 0.5}}
    timed = replace(drawn.source, inputs=inputs, requests={request: {prompt: 1.0, token: 3.0}})
    of_prompt, of_token, of_request = tables = timed.time_tables(drawn.counted)
    assert [table.size for table in tables] == [prompt, token, request]
    assert (of_request.whole, of_request.dense) == pytest.approx((14.0, 14.0))
    for counts in ({"a": 0, "b": 0}, {"a": 64, "b": 32}, {"a": 96, "b": 64}):
        expected = of_prompt.cost(counts) + 3 * of_token.cost(counts)
        assert of_request.cost(counts) == pytest.approx(expected, rel=0.05)
    assert timed.time_plan({"a": 64}, tables) == pytest.approx([4.0, 1.0, 7.0])


@pytest.mark.parametrize(("token", "code"), [(2.2, NoteCode.COSTS_REUSED), (4.0, NoteCode.COSTS_REMEASURED)])
def test_stored_times_of_requests_hold_while_their_calls_compare_as_before(
    source: CostSource, monkeypatch: pytest.MonkeyPatch, token: float, code: NoteCode
) -> None:
    """Requests have no other engine to be compared with."""
    sizes = [Size(1, 128, "prompt"), Size(1, 128, "token")]
    stored = [table(1.0).model_copy(update={**size._asdict(), "dense": 5.0}) for size in sizes]
    engines: Any = SimpleNamespace(**{**vars(source.engines), "whole": source.dense})
    inputs: Any = {size: {"phase": size.phase} for size in sizes}
    requests = replace(source, engines=engines, inputs=inputs)
    monkeypatch.setattr(CostSource, "measured_tables", lambda *args: stored)
    requests.time_tables(table(1.0))

    def times(engines: object, feeds: Any, *args: object) -> list[float]:
        return [1e-3 * (4.0 if feeds["phase"] == "prompt" else 4.0 * token / 2.0)] * 2

    monkeypatch.setattr(measure, "paired_times", times)
    requests.time_tables(table(1.0))
    assert source.log.codes == [code]  # type: ignore[attr-defined]


@given(st.lists(st.floats(0.1, 5.0), min_size=5, max_size=5), st.floats(0.0, 40.0))
def test_the_sum_of_a_cost_is_the_inverse_of_the_cost_of_a_sum(steps: list[float], total: float) -> None:
    times = [sum(steps[: number + 1]) for number in range(5)]
    curve = tuple((2.0 * number, time) for number, time in enumerate(times))
    costs = table(1.0).model_copy(update={"curve": curve})
    assert costs.sum_at(costs.at_sum(total)) == pytest.approx(total)
    doubled = costs.scaled(2.0)
    assert doubled.at_sum(2 * total) == pytest.approx(2 * costs.at_sum(total))
