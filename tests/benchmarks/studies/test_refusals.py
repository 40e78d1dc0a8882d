"""Studies that cannot run are refused in one line, and claim no folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import run
from benchmarks.studies.base import check_options
from benchmarks.studies.cell_store import Cell, CellStore
from benchmarks.studies.run import study
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.selection.options import option_names
from compressor.selection.subset_evaluator import EvaluatorFactory
from tests.benchmarks.studies.requests import AXES, StageRecorder, request_of, run_command
from tests.faults import fails_with

Cap = pytest.CaptureFixture[str]

UNKNOWN, INVALID, CONFLICT, RANGE, MISSING = (
    ErrorCode.UNKNOWN_NAME,
    ErrorCode.INVALID_VALUE,
    ErrorCode.CONTRADICTION,
    ErrorCode.OUT_OF_RANGE,
    ErrorCode.MISSING_VALUE,
)

REFUSED: list[tuple[list[str], ErrorCode, str]] = [
    (["gird"], UNKNOWN, "did you mean grid?"),
    (["grid", "--size", "smal"], UNKNOWN, "did you mean small?"),
    (["grid", "--methods", "dps"], UNKNOWN, "did you mean dsp?"),
    (["grid", "--keeps", "9"], RANGE, "--keeps 9: "),
    (["grid", "--keeps", "x"], INVALID, "--keeps"),
    (["grid", "--seeds", "-1"], RANGE, "--seeds"),
    (["grid", "--seeds", ","], MISSING, "--seeds"),
    (["grid", "--budgets", "1"], CONFLICT, "--methods, --keeps, --seeds"),
    (["grid", "--options", "coldown=1"], UNKNOWN, "'coldown'"),
    (["grid", "--options", "astar.variant=lazy"], UNKNOWN, "'astar.variant'"),
    (["penalty", "--options", "penalty=1"], CONFLICT, "'penalty'"),
    (["penalty", "--options", "hard-concrete.cooldown=1"], CONFLICT, "'hard-concrete.cooldown'"),
    (["importance", "--options", "evaluations=3"], CONFLICT, "'evaluations'"),
    (["grid", "--ray", "local"], CONFLICT, "--ray local"),
    (["astar", "--ray", "here"], INVALID, "--ray 'here'"),
    (["astar", "--variants", "lasy"], UNKNOWN, "did you mean lazy?"),
    (["ablate", "--seeds", "1"], CONFLICT, "it varies nothing"),
    (["ablate", "--options", "a=1"], CONFLICT, "--options"),
    (["speed", "--grids", "nowhere"], ErrorCode.FILE_UNREADABLE, "nowhere: "),
    (["dynamics", "--options", "coldown=1"], UNKNOWN, "'coldown'"),
    (["importance", "--data", "nowhere.tsv"], ErrorCode.FILE_MISSING, "nowhere.tsv: "),
    (["blocks", "--masks", "foo"], UNKNOWN, "choose one of own, random"),
    (["blocks", "--kinds", "all+crss"], UNKNOWN, "did you mean cross?"),
    (["blocks", "--data", "random"], CONFLICT, "--data random"),
    (["grid", "--eval-data", "nowhere.tsv"], ErrorCode.FILE_MISSING, "nowhere.tsv: "),
]
"""Arguments of a command, its error code, and a text of its message."""

NEEDS_MODEL = (["grid", "--keeps", "9"],)
"""Commands that can only be refused with the model."""


@pytest.mark.parametrize(("arguments", "code", "expected"), REFUSED)
def test_a_refusal_gives_a_one_line_error(
    arguments: list[str],
    code: ErrorCode,
    expected: str,
    inputs: Path,
    tmp_path: Path,
    capfd: Cap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults are refused before the model and the rows are loaded, and the study claims no folder."""
    if arguments not in NEEDS_MODEL:
        monkeypatch.setattr(run, "StudyContext", None)
    kind, *flags = arguments
    rows: list[str | Path] = ["--data", inputs / "rows.tsv"]
    result = run_command(
        capfd, kind, inputs / "model", *rows, "-o", tmp_path / "out", "--size", "tiny", *flags, "--quiet"
    )
    assert (result.error_code, result.out) == (code, "")
    assert expected in result.error
    assert result.code in (2, 3)
    assert not (tmp_path / "out").exists()


def test_missing_and_repeated_data_are_refused(inputs: Path, tmp_path: Path, capfd: Cap) -> None:
    rows: list[str | Path] = ["--data", inputs / "rows.tsv"]
    arguments: list[str | Path] = ["grid", inputs / "model", "-o", tmp_path / "out", "--quiet"]
    for added, code in (([], MISSING), ([*rows, *rows], CONFLICT)):
        result = run_command(capfd, *arguments, *added)
        assert (result.error_code, result.details["field"]) == (code, "data")


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("grid", {"keeps": (9,)}),
        ("dynamics", {"keeps": (9,)}),
        ("penalty", {"keeps": (9,)}),
        ("blocks", {"kinds": ("cross",)}),
        ("speed", {"keeps": (9,)}),
    ],
)
def test_a_study_that_is_refused_claims_no_folder(
    kind: str, axes: dict[str, tuple[Any, ...]], inputs: Path, tmp_path: Path
) -> None:
    """If a fault is only known from the model or the rows, another study can still use the folder."""
    with pytest.raises(UsageError):
        study(kind, request_of(inputs, tmp_path / "out", axes=axes))
    assert not (tmp_path / "out").exists()


def test_a_study_whose_workers_fail_claims_no_folder(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = InputError("no workers")

    @contextmanager
    def fail(ray: str | None) -> Iterator[EvaluatorFactory]:
        raise error
        yield

    monkeypatch.setattr(run, "evaluator_factory", fail)
    with pytest.raises(InputError) as caught:
        study("ablate", request_of(inputs, tmp_path / "out"))
    assert caught.value is error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_another_study_has_claimed_is_refused(tmp_path: Path) -> None:
    folder = CellStore(tmp_path, {"kind": "grid"})
    CellStore(tmp_path, {"kind": "blocks"}).run([], lambda cell, work, on_progress: {}, StageRecorder())
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError, path=tmp_path):
        folder.run([Cell("a", {})], lambda cell, work, on_progress: {}, StageRecorder())
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError, path=tmp_path):
        CellStore(tmp_path, {"kind": "grid"})


def test_a_folder_of_another_recipe_is_refused(inputs: Path, finished: Callable[[str], Path], tmp_path: Path) -> None:
    folder = finished("penalty")
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError, path=folder) as caught:
        study("penalty", request_of(inputs, folder, learning_rate=0.1, axes=AXES["penalty"]))
    assert "learning_rate" in str(caught.value)
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError, path=folder) as caught:
        study("grid", request_of(inputs, folder))
    assert "kind" in str(caught.value)
    (tmp_path / "mine").write_text("")
    with fails_with(ErrorCode.OUTPUT_EXISTS, UsageError, path=tmp_path):
        study("grid", request_of(inputs, tmp_path))
    with fails_with(ErrorCode.INVALID_VALUE, UsageError, path=tmp_path / "mine"):
        study("grid", request_of(inputs, tmp_path / "mine"))


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    folder = CellStore(tmp_path, {})
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.json").write_text("{")
    with fails_with(ErrorCode.FILE_UNREADABLE, path=tmp_path / "cells" / "a.json"):
        folder.results()


def test_options_go_to_the_methods_that_have_them() -> None:
    assert {"cooldown", "evaluations", "pool"} <= set(option_names("dsp"))
    check_options({"cooldown": 0.5, "taylor.share": 0.2}, ["dsp", "taylor"])
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="taylor.shar"):
        check_options({"taylor.shar": 0.2}, ["dsp", "taylor"])


@pytest.mark.parametrize("flags", [["--macs", "50%"], ["--distill"], ["--prune-rows", "8"]])
def test_flags_of_budgets_and_distillation_are_refused(flags: list[str], tmp_path: Path, capfd: Cap) -> None:
    assert run_command(capfd, "grid", tmp_path / "model", *flags).code == 2


def test_keys_of_budgets_in_a_recipe_are_noted(tmp_path: Path, capfd: Cap) -> None:
    (tmp_path / "recipe.toml").write_text('macs = "50%"\ndistill = true\nunlabelled_data = "u"\nseed = 1\n')
    recipe: list[str | Path] = ["--recipe", tmp_path / "recipe.toml"]
    result = run_command(capfd, "grid", tmp_path / "model", *recipe, "--size", "smal")
    assert "recipe.toml: studies do not read macs, distill, unlabelled_data" in " ".join(result.err.split())
    assert result.error_code == UNKNOWN
