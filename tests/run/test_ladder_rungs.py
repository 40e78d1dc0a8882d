"""Which rungs of a ladder run again, and what remains where one fails; the runs themselves are fakes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.config.ladder import compared_ladders, recipes_of
from compressor.config.own_tasks import load_own_task
from compressor.config.run import Recipe
from compressor.errors import BudgetError, CompressorError, DivergedError, ErrorCode, SiteRefusedError, UsageError
from compressor.report import frontier_page
from compressor.report.files import JSON_NAME, to_json
from compressor.report.frontier import FRONTIER_JSON, Frontier
from compressor.results import CostShare, NoteCode, Report
from compressor.run import ladder
from compressor.run.ladder import compress_ladder
from compressor.run.write_report import code_of
from compressor.training import processes
from graph_passes import GraphErrorCode, GraphPassError
from tests.command import compress
from tests.report import reports
from tests.run.listeners import RecordingListener
from tests.tasks.own_tasks import task_of_the_page, write_module

VALUES = "90%,80%,70%"
NAMES = ["macs-90", "macs-80", "macs-70"]


class Runs:
    """A run in place of `compress`, which writes the report and the plan of a rung at once.

    Attributes:
        names: the rungs that ran, in order.
        errors: what rungs raise, by name.
        losses: what rungs lose, by name.
        kept: share of the multiply-accumulates that rungs keep, by name; without a name they are not counted.
        recipes: the recipes of the rungs that ran, by name.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.names: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self.losses: dict[str, float] = {}
        self.kept: dict[str, float] = {}
        self.recipes: dict[str, Recipe] = {}
        self.seconds = 1_000_000_000

    def __call__(self, recipe: Recipe, listener: object) -> Report:
        folder = recipe.output.out
        name = folder.relative_to(self.out).as_posix()
        if name in self.errors:
            raise self.errors[name]
        self.names.append(name)
        self.recipes[name] = recipe
        result = reports.report(
            recipe=recipe.flat(),
            task_code=code_of(load_own_task(recipe.source.task)),
            scores=(reports.accuracy(0.9, 0.9 - self.losses.get(name, 0.0)),),
            speeds=(reports.speed(1, 128, 40.0, 20.0 / len(self.names)),),
            costs=tuple(self.costs(name)),
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_NAME).write_text(to_json(result))
        result.plan.save(folder / "plan.json")
        self.date(folder / "plan.json")
        return result

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


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
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
    monkeypatch.setattr(ladder, "compress", fake)
    monkeypatch.setattr(frontier_page, "render", lambda frontier: "")  # figures take most of the time
    return fake


def flags_of(runs: Runs, **flags: Any) -> dict[str, Any]:
    folder = runs.out.parent
    rows = {"data": str(folder / "rows"), "test_data": str(folder / "test.tsv")}
    return {**rows, "macs": VALUES, "out": str(runs.out), **flags}


def climb(runs: Runs, listener: RecordingListener | None = None, **flags: Any) -> Frontier:
    fields, model = flags_of(runs, **flags), str(runs.out.parent / "model")
    recipes = recipes_of(model, None, fields)
    return compress_ladder(recipes, runs.out, listener, others=compared_ladders(model, None, fields, recipes))


def test_finished_rungs_do_not_run_again(runs: Runs) -> None:
    first = climb(runs)
    assert runs.take() == NAMES
    assert climb(runs) == first
    assert runs.take() == []


@pytest.mark.parametrize("name", ["model/model.safetensors", "rows", "rows/train.tsv", "test.tsv"])
def test_rungs_run_again_where_a_file_that_they_read_has_changed(runs: Runs, name: str) -> None:
    climb(runs)
    runs.take()
    runs.date(runs.out.parent / name)
    listener = RecordingListener()
    climb(runs, listener)
    assert runs.take() == NAMES
    assert listener.codes.count(NoteCode.RUNG_OUTDATED) == len(NAMES)


def test_rungs_are_used_beside_methods_that_are_added_later(runs: Runs) -> None:
    climb(runs)
    runs.take()
    climb(runs, compare_with="fisher")
    assert runs.take() == [f"fisher/{name}" for name in NAMES]


def test_rungs_run_again_where_their_recipe_has_changed(runs: Runs) -> None:
    climb(runs)
    runs.take()
    climb(runs, seed=1)
    assert runs.take() == NAMES


def test_a_rung_that_is_added_to_the_recipe_runs_alone(runs: Runs) -> None:
    climb(runs)
    runs.take()
    recipe = runs.out.parent / "model" / "compress.toml"
    recipe.write_text("distill = false")
    runs.date(recipe)
    climb(runs, macs=f"{VALUES},60%")
    assert runs.take() == ["macs-60"]


def test_rungs_run_again_where_the_rung_before_has_changed(runs: Runs) -> None:
    climb(runs)
    runs.take()
    runs.date(runs.out / "macs-80" / "plan.json")
    climb(runs)
    assert runs.take() == ["macs-70"]


def test_a_finished_rung_runs_again_where_its_task_has_changed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_module(tmp_path, task_of_the_page(), "tags_of_ladder")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe(model=tmp_path / "model", out=runs.out / "macs-90", task="tags_of_ladder:Tags")
    for text, expected in (("", ["macs-90"]), ("", []), ("# changed", ["macs-90"])):
        task.write_text(task_of_the_page() + text)
        compress_ladder([recipe], runs.out)
        assert runs.take() == expected


def test_a_forced_ladder_goes_on_where_it_was_interrupted(runs: Runs) -> None:
    climb(runs)
    runs.take()
    runs.errors["macs-70"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        climb(runs, force=True)
    assert runs.take() == ["macs-90", "macs-80"]
    runs.errors.clear()
    climb(runs, force=True)
    assert runs.take() == ["macs-70"]
    climb(runs)
    assert runs.take() == []
    climb(runs, force=True)
    assert runs.take() == NAMES


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


def test_an_interrupt_ends_the_methods_to_compare_with_too(runs: Runs) -> None:
    runs.errors["fisher/macs-80"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        climb(runs, compare_with="fisher,magnitude")
    assert runs.take() == [*NAMES, "fisher/macs-90"]


def test_an_error_on_the_minutes_of_a_rung_has_those_of_the_ladder(runs: Runs) -> None:
    runs.errors["macs-80"] = UsageError("few", code=ErrorCode.OUT_OF_RANGE, field="minutes", value=2.0)
    with pytest.raises(UsageError) as caught:
        climb(runs, distill=True, minutes=6)
    assert caught.value.code is ErrorCode.OUT_OF_RANGE
    assert caught.value.details == {"field": "minutes", "value": 6.0}


@pytest.mark.parametrize(("losses", "fastest"), [((0.0, 0.0, 0.015), "macs-80"), ((0.015, 0.02, 0.03), None)])
def test_the_exit_code_states_whether_a_rung_holds(
    runs: Runs, capfd: pytest.CaptureFixture[str], losses: tuple[float, ...], fastest: str | None
) -> None:
    runs.losses = dict(zip(NAMES, losses, strict=True))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs, max_drop=0.02).items()]
    result = compress(capfd, runs.out.parent / "model", *words, "--json")
    assert result.code == (0 if fastest else 4)
    assert [rung["holds"] for rung in result.json["rungs"]] == [loss + 0.01 <= 0.02 for loss in losses]
    assert (fastest or "no rung") in result.json["sentence"]


def test_a_ladder_that_ends_early_is_a_success(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    runs.errors["macs-80"] = BudgetError("80% < 85%", code=ErrorCode.BUDGET_UNREACHABLE)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs).items()]
    result = compress(capfd, runs.out.parent / "model", *words, "--with", "fisher", "--json")
    assert result.code == 0, result.err
    assert [rung["name"] for rung in result.json["rungs"]] == ["macs-90"]
    assert [rung["name"] for rung in result.json["others"]["fisher"]] == [f"fisher/{name}" for name in NAMES]
    assert "macs-80" in result.json["ended"]


@pytest.mark.parametrize(
    ("is_main", "exit_type"), [(True, UsageError), (False, SystemExit)], ids=["main process", "other process"]
)
def test_several_processes_are_refused_in_one_line(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, is_main: bool, exit_type: type[BaseException]
) -> None:
    state = SimpleNamespace(num_processes=2, is_main_process=is_main)
    monkeypatch.setattr(processes, "process_state", lambda: state)
    with pytest.raises(exit_type) as caught:
        climb(runs)
    assert is_main or caught.value.code == UsageError.exit_code  # type: ignore[attr-defined]
    assert runs.take() == []
