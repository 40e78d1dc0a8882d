"""Ladders of budgets: every rung is a finished run, rungs are ordered and nested, and an interrupted ladder goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor.config import ladder as config_ladder
from compressor.config.ladder import compared_ladders, recipes_of
from compressor.config.own_tasks import load_own_task
from compressor.config.run import Recipe
from compressor.errors import BudgetError, DivergedError, ErrorCode, UsageError
from compressor.report import load
from compressor.report.files import JSON_NAME, to_json
from compressor.report.frontier import FRONTIER_HTML, FRONTIER_JSON, Frontier
from compressor.results import NoteCode, Report
from compressor.run.ladder import compress_ladder
from compressor.run.write_report import code_of
from tests.docs.pages import ROOT, python_block
from tests.report import reports
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import write_inputs
from tests.tasks.own_tasks import task_of_the_page, write_module

TIMING: dict[str, Any] = {"batch": "1", "seq": "8", "seconds": 0.01, "threads": 1}
SHORT: dict[str, Any] = {"max_drop": 0.99, "batch_size": 8, "max_length": 8, **TIMING}
FLAGS: dict[str, Any] = {
    "data": "train.tsv",
    "macs": "90%,80%",
    "distill": True,
    "distill_steps": 4,
    "out": "frontier",
    **SHORT,
}
"""Those of the ladder of the documentation, and of short runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the ladder of the documentation is run: a model, and its rows."""
    folder = write_inputs(tmp_path_factory.mktemp("ladder"))
    (folder / "rows.tsv").rename(folder / "train.tsv")
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def rungs(**flags: Any) -> tuple[Recipe, ...]:
    fields = {**FLAGS, **flags}
    return recipes_of("model", None, {name: value for name, value in fields.items() if value is not None})


def test_rungs_are_ordered_from_the_mildest_and_start_from_each_other() -> None:
    out = Path("frontier")
    mild, strict = rungs()
    assert [recipe.output.out for recipe in (mild, strict)] == [out / "macs-90", out / "macs-80"]
    assert [recipe.budget.macs for recipe in (mild, strict)] == [0.9, 0.8]
    assert mild.budget.start_from is None
    assert strict.budget.start_from == out / "macs-90"
    speedups = rungs(macs=None, speedup="8,2,4")
    assert [recipe.budget.speedup for recipe in speedups] == [2, 4, 8]
    (single,) = rungs(macs="60%")
    assert single.output.out == out


@pytest.mark.parametrize("flags", [{"speedup": "2,3"}, {"macs": "60%,60%"}, {"macs": "60%,150%"}, {"macs": "60%,x"}])
def test_rungs_that_contradict_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        rungs(**flags)
    assert caught.value.code in {ErrorCode.CONTRADICTION, ErrorCode.OUT_OF_RANGE, ErrorCode.INVALID_VALUE}


@pytest.fixture(scope="module")
def ladder(folder: Path) -> tuple[Path, Frontier]:
    """The ladder of the documentation, with short runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(
            config_ladder, "recipes_of", lambda model, file, flags: recipes_of(model, file, {**flags, **SHORT})
        )
        names: dict[str, Any] = {"compressor": compressor, "Path": Path}
        exec(python_block(ROOT / "docs" / "distillation.md"), names)
    return Path("frontier"), names["frontier"]


def test_every_rung_is_a_finished_run(ladder: tuple[Path, Frontier]) -> None:
    out, frontier = ladder
    reports = [load(out / name) for name in ("macs-90", "macs-80")]
    assert all(proof.holds for report in reports for proof in report.proofs)
    assert all(row.met for report in reports for row in report.budget)
    assert [rung.name for rung in frontier.rungs] == ["macs-90", "macs-80"]
    assert [rung.neurons for rung in frontier.rungs] == [report.plan.neurons_kept for report in reports]


def test_units_that_one_rung_removes_stay_removed(ladder: tuple[Path, Frontier]) -> None:
    out, _ = ladder
    mild, strict = (load(out / name).plan for name in ("macs-90", "macs-80"))
    for group in strict.groups:
        assert set(group.kept) <= set(mild[group.name].kept)


def test_the_page_shows_every_rung(ladder: tuple[Path, Frontier]) -> None:
    out, frontier = ladder
    page = (out / FRONTIER_HTML).read_text()
    stored = json.loads((out / FRONTIER_JSON).read_text())
    assert all(f'href="{rung.name}/report.html"' in page for rung in frontier.rungs)
    assert Frontier.model_validate({k: v for k, v in stored.items() if k != "sentence"}) == frontier
    assert frontier.fastest in frontier.rungs
    assert all(rung.holds for rung in frontier.rungs)


def test_a_finished_rung_is_not_run_again(ladder: tuple[Path, Frontier]) -> None:
    out, frontier = ladder
    listener = RecordingListener()
    assert compress_ladder(rungs(), out, listener) == frontier
    assert listener.stages == []


def test_a_finished_rung_runs_again_where_its_task_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, runs = write_module(tmp_path, task_of_the_page(), "tags_of_ladder"), []
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe(model=tmp_path, out=tmp_path / "rungs" / "macs-90", task="tags_of_ladder:Tags")

    def run(recipe: Recipe, listener: object) -> Report:
        runs.append(recipe)
        result = reports.report(recipe=recipe.flat(), task_code=code_of(load_own_task(recipe.source.task)))
        recipe.output.out.mkdir(parents=True, exist_ok=True)
        (recipe.output.out / JSON_NAME).write_text(to_json(result))
        return result

    monkeypatch.setattr("compressor.run.ladder.compress", run)
    for text, expected in (("", 1), ("", 1), ("# changed", 2)):
        task.write_text(task_of_the_page() + text)
        compress_ladder([recipe], tmp_path / "rungs")
        assert len(runs) == expected


def test_an_interrupted_ladder_keeps_its_rungs_and_goes_on(ladder: tuple[Path, Frontier]) -> None:
    out, frontier = ladder
    recipes = rungs()
    shutil.rmtree(out / "macs-80")
    with pytest.raises(KeyboardInterrupt):
        compress_ladder(recipes, out, RecordingListener("compressed: exporting", interrupt))
    assert (out / "macs-90" / "report.json").is_file()
    listener = RecordingListener()
    resumed = compress_ladder(recipes, out, listener)
    assert [rung.neurons for rung in resumed.rungs] == [rung.neurons for rung in frontier.rungs]
    assert NoteCode.RESUMED in listener.codes


@pytest.mark.zoo
def test_other_methods_stand_beside_a_ladder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = {**FLAGS, "out": str(out), "compare_with": "magnitude", "distill": False}
    del flags["distill_steps"]
    recipes = recipes_of("model", None, flags)
    others = compared_ladders("model", None, flags, recipes)
    frontier = compress_ladder(recipes, out, others=others)
    assert [rung.name for rung in frontier.others["magnitude"]] == ["magnitude/macs-90", "magnitude/macs-80"]
    assert load(out / "magnitude" / "macs-80").plan.method == "magnitude"
    page = (out / FRONTIER_HTML).read_text()
    assert 'href="magnitude/macs-80/report.html"' in page
    with pytest.raises(UsageError):
        compared_ladders("model", None, flags, recipes[:1])


def test_a_budget_that_nothing_meets_ends_the_ladder(ladder: tuple[Path, Frontier]) -> None:
    out, _ = ladder
    listener = RecordingListener()
    frontier = compress_ladder(rungs(macs="90%,1%"), out, listener)
    assert [rung.name for rung in frontier.rungs] == ["macs-90"]
    assert frontier.ended is not None
    assert NoteCode.LADDER_ENDED in listener.codes


@pytest.mark.zoo
def test_a_first_budget_that_nothing_meets_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        compress_ladder(rungs(macs="2%,1%", out=str(tmp_path / "out")), tmp_path / "out")
    assert caught.value.code is ErrorCode.BUDGET_UNREACHABLE


@pytest.mark.zoo
def test_a_rung_that_diverges_keeps_those_before(ladder: tuple[Path, Frontier]) -> None:
    out, _ = ladder
    mild, strict = rungs(macs="90%,50%")
    with pytest.raises(DivergedError):
        compress_ladder([mild, strict.updated(distill_learning_rate=1e30)], out)
    stored = json.loads((out / FRONTIER_JSON).read_text())
    assert [rung["name"] for rung in stored["rungs"]] == ["macs-90"]
