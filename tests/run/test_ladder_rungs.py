"""Which rungs of a ladder run again, and how it ends; the runs themselves are fakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compressor.config.run import Recipe
from compressor.errors import BudgetError, DivergedError, ErrorCode, InputError, SiteRefusedError, UsageError
from compressor.report import load, write
from compressor.report.frontier import FRONTIER_JSON, Frontier
from compressor.results import NoteCode
from compressor.run.ladder import compress_ladder
from tests import folders
from tests.command import compress
from tests.run.ladder_runs import NAMES, VALUES, Runs, climb, flags_of
from tests.run.listeners import RecordingListener
from tests.tasks.own_tasks import task_of_the_page, write_module


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


def test_rungs_run_again_where_further_rows_have_changed(runs: Runs) -> None:
    further = runs.out.parent / "further.txt"
    further.touch()
    runs.date(further)
    for _ in range(2):
        climb(runs, unlabelled_data=str(further))
        assert runs.take() == NAMES
        climb(runs, unlabelled_data=str(further))
        assert runs.take() == []
        runs.date(further)


def test_rungs_run_again_where_their_recipe_has_changed(runs: Runs) -> None:
    climb(runs)
    runs.take()
    climb(runs, seed=1)
    assert runs.take() == NAMES


def test_a_rung_that_was_built_again_is_finished(runs: Runs) -> None:
    """`compress build` records the lengths that the run chose."""
    climb(runs)
    runs.take()
    report = load(runs.out / NAMES[0])
    write(report.model_copy(update={"recipe": {**report.recipe, "seq": [128]}}), runs.out / NAMES[0])
    climb(runs)
    assert runs.take() == []


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


@pytest.mark.parametrize(
    ("losses", "eval_losses", "fastest", "code"),
    [
        ((0.0, 0.0, 0.015), (0.0, 0.0, 0.0), "macs-70", 0),  # the interval on test rows does not decide
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.015), "macs-80", 0),
        ((0.0, 0.0, 0.03), (0.0, 0.0, 0.0), "macs-70", 4),
        ((0.0, 0.0, 0.0), (0.015, 0.015, 0.015), None, 4),
    ],
)
def test_evaluation_rows_choose_the_rung(
    runs: Runs,
    capfd: pytest.CaptureFixture[str],
    losses: tuple[float, ...],
    eval_losses: tuple[float, ...],
    fastest: str | None,
    code: int,
) -> None:
    runs.losses, runs.eval_losses = (dict(zip(NAMES, part, strict=True)) for part in (losses, eval_losses))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs, max_drop=0.02).items()]
    result = compress(capfd, runs.out.parent / "model", *words, "--json")
    assert result.code == code
    assert [rung["holds"] for rung in result.json["rungs"]] == [loss + 0.01 <= 0.02 for loss in eval_losses]
    assert (fastest or "no rung") in result.json["sentence"]


def test_a_ladder_that_ends_early_is_a_success(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    runs.errors["macs-80"] = BudgetError("80% < 85%", code=ErrorCode.BUDGET_UNREACHABLE)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs).items()]
    result = compress(capfd, runs.out.parent / "model", *words, "--json")
    assert result.code == 0, result.err
    assert [rung["name"] for rung in result.json["rungs"]] == ["macs-90"]
    assert "macs-80" in result.json["ended"]


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_a_ladder_that_diverges_leaves_the_reason(runs: Runs, capfd: pytest.CaptureFixture[str], number: int) -> None:
    runs.errors[NAMES[number]] = DivergedError("NaN at step 3", code=ErrorCode.NOT_FINITE)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags_of(runs).items()]
    result = compress(capfd, runs.out.parent / "model", *words, "--json")
    assert result.code == DivergedError.exit_code == 9
    assert runs.take() == NAMES[:number]
    frontier = Frontier.model_validate_json((runs.out / FRONTIER_JSON).read_text())
    assert [rung.name for rung in frontier.rungs] == NAMES[:number]
    assert frontier.ended is not None
    assert all(part in frontier.ended for part in (NAMES[number], "NaN at step 3"))


@pytest.mark.parametrize("name", NAMES[:2])
def test_any_other_error_of_a_ladder_leaves_the_reason_beside_its_rungs(runs: Runs, name: str) -> None:
    runs.errors[name] = SiteRefusedError("Conv", code=ErrorCode.SITE_REFUSED)
    with pytest.raises(SiteRefusedError):
        climb(runs)
    assert (runs.out / FRONTIER_JSON).exists() == (name != NAMES[0])
    if name != NAMES[0]:
        assert name in json.loads((runs.out / FRONTIER_JSON).read_text())["ended"]


def test_engines_of_other_tools_are_read_before_anything_runs(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
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
