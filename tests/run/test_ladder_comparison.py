"""What a ladder is compared with, and what remains of both where a rung fails; the runs themselves are fakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compressor.errors import BudgetError, CompressorError, DivergedError, ErrorCode, InputError, SiteRefusedError
from compressor.report.frontier import FRONTIER_JSON, Frontier
from compressor.results import NoteCode
from graph_passes import GraphErrorCode, GraphPassError
from tests import folders
from tests.command import compress
from tests.run.ladder_runs import NAMES, Runs, climb, flags_of
from tests.run.listeners import RecordingListener


@pytest.mark.parametrize(
    "error",
    [
        BudgetError("1% < 2%", code=ErrorCode.BUDGET_UNREACHABLE),
        DivergedError("NaN", code=ErrorCode.NOT_FINITE),
        SiteRefusedError("Conv", code=ErrorCode.SITE_REFUSED),
        GraphPassError("Conv", code=GraphErrorCode.UNSPECIFIED),
    ],
)
@pytest.mark.parametrize("name", ["fisher/macs-90", "fisher/macs-70"])
def test_a_method_to_compare_with_that_fails_takes_nothing_away(
    runs: Runs, error: CompressorError | GraphPassError, name: str
) -> None:
    runs.errors[name] = error
    listener = RecordingListener()
    frontier = climb(runs, listener, compare_with="fisher,magnitude")
    assert [rung.name for rung in frontier.rungs] == NAMES
    assert [rung.name for rung in frontier.others["magnitude"]] == [f"magnitude/{name}" for name in NAMES]
    reached = [rung.name for rung in frontier.others.get("fisher", ())]
    assert [*reached, name] == [f"fisher/{name}" for name in NAMES][: len(reached) + 1]
    assert set(frontier.others_ended) == {"fisher"}
    assert all(part in frontier.others_ended["fisher"] for part in (name, str(error)))
    assert listener.codes.count(NoteCode.LADDER_ENDED) == 1
    assert Frontier.model_validate_json((runs.out / FRONTIER_JSON).read_text()) == frontier


def test_an_interrupt_ends_the_methods_to_compare_with_too(runs: Runs) -> None:
    runs.errors["fisher/macs-80"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        climb(runs, compare_with="fisher,magnitude")
    assert runs.take() == [*NAMES, "fisher/macs-90"]


def test_a_ladder_that_ends_early_is_a_success(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    runs.errors["macs-80"] = BudgetError("80% < 85%", code=ErrorCode.BUDGET_UNREACHABLE)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs).items()]
    result = compress(capfd, runs.out.parent / "model", *words, "--with", "fisher", "--json")
    assert result.code == 0, result.err
    assert [rung["name"] for rung in result.json["rungs"]] == ["macs-90"]
    assert [rung["name"] for rung in result.json["others"]["fisher"]] == [f"fisher/{name}" for name in NAMES]
    assert "macs-80" in result.json["ended"]


SPEEDUPS = ["speedup-2", "speedup-4", "speedup-8"]


def climb_by_time(runs: Runs, listener: RecordingListener | None = None, **flags: Any) -> Frontier:
    return climb(runs, listener, macs=None, speedup="2,4,8", compare_with="dsp,fisher", **flags)


def test_gates_keep_the_multiply_accumulates_of_rungs_of_time(runs: Runs) -> None:
    runs.kept = dict(zip(SPEEDUPS, (0.5, 0.3, 0.125), strict=True))
    listener = RecordingListener()
    frontier = climb_by_time(runs, listener)
    assert runs.take() == [*SPEEDUPS, *(f"{method}/{name}" for method in ("dsp", "fisher") for name in SPEEDUPS)]
    assert [rung.macs for rung in frontier.rungs] == pytest.approx([0.5, 0.3, 0.125])
    for rung in frontier.rungs:
        gate, other = (runs.recipes[f"{method}/{rung.name}"].budget for method in ("dsp", "fisher"))
        assert (gate.macs, gate.speedup, other.macs) == (rung.macs, None, None)
    assert frontier.follow_macs == ("dsp",)
    assert listener.codes.count(NoteCode.MACS_FOLLOWED) == 1
    assert climb_by_time(runs) == frontier
    assert runs.take() == []


def test_gates_end_where_a_ladder_of_time_does(runs: Runs) -> None:
    runs.kept = dict.fromkeys(SPEEDUPS, 0.5)
    runs.errors["speedup-8"] = BudgetError("8 > 6", code=ErrorCode.BUDGET_UNREACHABLE)
    frontier = climb_by_time(runs)
    assert [rung.name for rung in frontier.others["dsp"]] == ["dsp/speedup-2", "dsp/speedup-4"]
    assert "dsp/speedup-8" in frontier.others_ended["dsp"]
    assert len(frontier.others["fisher"]) == 3


def test_gates_end_where_multiply_accumulates_are_not_counted(runs: Runs) -> None:
    runs.kept = {"speedup-2": 0.5}
    frontier = climb_by_time(runs)
    assert [rung.name for rung in frontier.others["dsp"]] == ["dsp/speedup-2"]
    assert "dsp/speedup-4" in frontier.others_ended["dsp"]


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_a_ladder_that_diverges_leaves_the_reason(runs: Runs, capfd: pytest.CaptureFixture[str], number: int) -> None:
    runs.errors[NAMES[number]] = DivergedError("NaN at step 3", code=ErrorCode.NOT_FINITE)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs).items()]
    result = compress(capfd, runs.out.parent / "model", *words, "--with", "fisher", "--json")
    assert result.code == DivergedError.exit_code == 9
    assert runs.take() == NAMES[:number]
    frontier = Frontier.model_validate_json((runs.out / FRONTIER_JSON).read_text())
    assert [rung.name for rung in frontier.rungs] == NAMES[:number]
    assert frontier.ended is not None
    assert all(part in frontier.ended for part in (NAMES[number], "NaN at step 3"))
    assert set(frontier.others_ended) == {"fisher"}


@pytest.mark.parametrize("name", NAMES[:2])
def test_any_other_error_of_a_ladder_leaves_the_reason_beside_its_rungs(runs: Runs, name: str) -> None:
    runs.errors[name] = SiteRefusedError("Conv", code=ErrorCode.SITE_REFUSED)
    with pytest.raises(SiteRefusedError):
        climb(runs)
    assert (runs.out / FRONTIER_JSON).exists() == (name != NAMES[0])
    if name != NAMES[0]:
        assert name in json.loads((runs.out / FRONTIER_JSON).read_text())["ended"]


def test_points_to_compare_with_are_read_before_anything_runs(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    file = runs.out.parent / "rivals.json"
    for path in folders.save(folders.bert(), runs.out.parent / "model").iterdir():
        runs.date(path)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs, compare_points=file).items()]
    file.write_text('[{"name": "int8", "metric": 0.9}]')
    assert compress(capfd, runs.out.parent / "model", *words, "--json").code == InputError.exit_code == 3
    assert runs.take() == []
    file.write_text('[{"name": "int8", "metric": 90, "p50": 3}]')
    result = compress(capfd, runs.out.parent / "model", *words, "--json")
    assert (result.code, result.error_code) == (InputError.exit_code, ErrorCode.OUT_OF_RANGE)
    assert (result.details["point"], result.details["field"]) == (1, "metric")
    assert runs.take() == []
    file.write_text('[{"name": "int8", "metric": 0.9, "p50": 3}]')
    result = compress(capfd, runs.out.parent / "model", *words, "--json")
    assert result.code == 0, result.err
    assert [point["p50"] for point in result.json["points"]] == [3]
    assert runs.take() == NAMES
    climb(runs)
    assert runs.take() == []
