"""Ladders of budgets: every rung is a finished run, rungs are ordered and nested, and an interrupted ladder goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor
from compressor.config import ladder as config_ladder
from compressor.config.fields import flag_of
from compressor.config.ladder import recipes_of
from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.errors import BudgetError, DivergedError, ErrorCode, UsageError
from compressor.model_folder import load as load_model
from compressor.report import load
from compressor.report.frontier import FRONTIER_HTML, FRONTIER_JSON, Frontier
from compressor.results import NoteCode
from compressor.run.ladder import compress_ladder
from graph_passes import Plan
from tests.command import compress
from tests.docs.pages import ROOT, python_block
from tests.faults import fails_with
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import write_inputs

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


@pytest.mark.zoo
@pytest.mark.parametrize("fields", [{}, {"method": "ste", "training_steps": 4}])
def test_rungs_are_those_of_runs_one_by_one(fields: dict[str, Any], tmp_path: Path) -> None:
    """Also where the ladder is a list of steps. The teacher's outputs that rungs share are rounded."""
    outputs = str(tmp_path / "outputs")
    recipes = rungs(out=str(tmp_path / "alone"), teacher_outputs=outputs, **fields)
    for recipe in recipes:
        compressor.compress(recipe)
    tables = [{step.name: step.changed} for step in (step for rung in rungs(**fields) for step in steps_of(rung))]
    for table in tables:
        table.get("units", {}).pop("start_from", None)
    flags = {name: value for name, value in FLAGS.items() if name not in ("macs", "distill", "distill_steps")}
    listed = recipes_of("model", None, {**flags, "steps": tables, "out": str(tmp_path / "listed")})
    compress_ladder(listed, tmp_path / "listed")
    for recipe in recipes:
        folders = (recipe.output.out, tmp_path / "listed" / recipe.output.out.name)
        plans = [Plan.load(folder / "plan.json") for folder in folders]
        assert plans[0] == plans[1]
        weights = [dict(load_model(folder).model.state_dict()) for folder in folders]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_page_shows_every_rung(ladder: tuple[Path, Frontier]) -> None:
    out, frontier = ladder
    page = (out / FRONTIER_HTML).read_text()
    stored = json.loads((out / FRONTIER_JSON).read_text())
    assert all(f'href="{rung.name}/report.html"' in page for rung in frontier.rungs)
    assert Frontier.model_validate(stored) == frontier
    assert stored["sentence"] == frontier.sentence
    assert frontier.fastest in frontier.rungs
    assert all(rung.holds for rung in frontier.rungs)


def test_a_ladder_does_not_write_into_the_output_of_a_run(ladder: tuple[Path, Frontier]) -> None:
    out = ladder[0] / "macs-90"
    with fails_with(ErrorCode.OUTPUT_EXISTS, UsageError, path=out):
        compress_ladder(rungs(out=str(out)), out)


def test_a_ladder_does_not_write_into_the_folder_of_a_model() -> None:
    with fails_with(ErrorCode.OUTPUT_EXISTS, UsageError, path=Path("model")):
        compress_ladder(rungs(out="model"), Path("model"))


@pytest.mark.parametrize("force", [False, True])
def test_an_error_before_the_first_rung_leaves_nothing(force: bool, tmp_path: Path) -> None:
    out = tmp_path / "frontier"
    with fails_with(ErrorCode.FILE_MISSING):
        compress_ladder(rungs(data="missing.tsv", out=str(out), force=force), out)
    assert not out.exists()


def test_rungs_lie_inside_the_folder_of_the_page(tmp_path: Path) -> None:
    for recipes in ((), rungs()):
        with fails_with(ErrorCode.INVALID_VALUE, UsageError, path=tmp_path / "elsewhere"):
            compress_ladder(recipes, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_a_finished_rung_is_not_run_again(ladder: tuple[Path, Frontier]) -> None:
    out, frontier = ladder
    listener = RecordingListener()
    assert compress_ladder(rungs(), out, listener) == frontier
    assert listener.stages == []


def test_the_command_prints_what_the_page_has(ladder: tuple[Path, Frontier], capfd: pytest.CaptureFixture[str]) -> None:
    out, frontier = ladder
    words = ["--distill" if name == "distill" else f"{flag_of(name)}={value}" for name, value in FLAGS.items()]
    result = compress(capfd, "model", *words, "--json")
    assert result.code == 0, result.err
    assert result.json == json.loads((out / FRONTIER_JSON).read_text())
    assert result.json["sentence"] == frontier.sentence


@pytest.mark.zoo
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
    assert sorted(path.name for path in out.iterdir()) == [FRONTIER_HTML, FRONTIER_JSON, "macs-80", "macs-90"]


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
