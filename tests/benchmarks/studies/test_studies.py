"""Studies of every kind: their cells, their rows, and the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.studies import run
from benchmarks.studies.cell_store import CellStore
from benchmarks.studies.context import StudyContext
from benchmarks.studies.findings import difference
from benchmarks.studies.grid import Grid
from benchmarks.studies.request import recipe_of_study
from benchmarks.studies.run import _digest, study
from benchmarks.studies.speed import metric_named
from compressor.config.methods import HEAD_METHODS
from compressor.config.recipe_file import read_recipe
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder
from compressor.results import MetricUnit
from compressor.selection.subset_evaluator import EvaluatorFactory, ModelSubsetEvaluator
from compressor.tasks.metrics import Metric, accuracy, token_accuracy
from tests.benchmarks.studies.requests import AXES, TINY, request_of, run_command, table
from tests.faults import fails_with
from tests.selection import tiny

Cap = pytest.CaptureFixture[str]


@pytest.mark.zoo
def test_a_grid_runs_every_method_and_draws_the_heads_that_it_keeps(inputs: Path, tmp_path: Path) -> None:
    """Global pruning removes a head of every layer at a time: if 3 are requested, it keeps 4."""
    findings = study("grid", request_of(inputs, tmp_path, axes={"methods": HEAD_METHODS, "keeps": (3,)}))
    heads = {row["method"]: row["heads"] for row in table(tmp_path)}
    assert heads == {"dense": "8", **dict.fromkeys(HEAD_METHODS, "3"), "global": "4"}
    assert {picture.name for picture in findings.pictures} >= {f"kept_{method}" for method in HEAD_METHODS}


@pytest.mark.zoo
def test_speed_needs_no_grid(inputs: Path, tmp_path: Path) -> None:
    findings = study("speed", request_of(inputs, tmp_path, axes={"keeps": (4,)}))
    assert {picture.name for picture in findings.pictures} == {"speed_vs_heads", "size_vs_heads", "speed_vs_batch"}


@pytest.mark.zoo
def test_speed_reports_only_the_requested_grids(inputs: Path, tmp_path: Path) -> None:
    """Cells of two grids have the same names; times of the cells of an earlier grid are not reported."""
    for name, method in (("one", "ste"), ("other", "taylor")):
        study("grid", request_of(inputs, tmp_path / name, axes={"methods": (method,), "keeps": (4,)}))
    for name, method in (("one", "ste"), ("other", "taylor")):
        study("speed", request_of(inputs, tmp_path / "speed", axes={"keeps": (4,), "grids": (str(tmp_path / name),)}))
        assert {row["method"] for row in table(tmp_path / "speed")} - {""} == {method}


def test_the_rows_of_a_grid(inputs: Path, finished: Callable[[str], Path]) -> None:
    rows = table(finished("grid"))
    assert [(row["method"], row["keep"]) for row in rows] == [
        ("dense", "8"),
        *((method, keep) for method in ("dsp", "dsp-pipelined", "ste", "taylor") for keep in ("4", "1")),
    ]
    assert all(row["heads"] == row["keep"] == str(len(row["kept"].split())) for row in rows)
    dense = float(rows[0]["test"])
    assert [float(row["difference"]) for row in rows] == pytest.approx([float(row["test"]) - dense for row in rows])
    assert all(float(row["low"]) <= float(row["difference"]) <= float(row["high"]) for row in rows)


def test_pipelined_methods_and_searches_start_from_the_dense_run(inputs: Path, tmp_path: Path) -> None:
    request = request_of(inputs, tmp_path, axes=AXES["grid"])
    cells = Grid(request, StudyContext(request.recipe, TINY), CellStore(tmp_path / "cells", {})).cells()
    assert {cell.settings["method"] for cell in cells if cell.needs} == {"dsp-pipelined", "taylor"}
    assert {cell.needs for cell in cells if cell.needs} == {("dense-s1",)}


class AccuracyWithoutShortcut(tiny.Sign):
    """A task that is scored by accuracy under a name that has no shortcut."""

    metrics = (replace(tiny.Sign.metrics[0], name="another"),)


def test_the_interval_of_accuracy_equals_that_of_other_metrics() -> None:
    """The shortcut for accuracy gives the same interval as scoring every draw."""
    draw = np.random.default_rng(0)
    runs = [np.stack([draw.integers(0, 2, 40), draw.integers(0, 2, 40)], axis=1).astype(float) for _ in range(4)]
    with_shortcut, without_shortcut = tiny.Sign(), AccuracyWithoutShortcut()
    assert difference(with_shortcut, runs[:2], runs[2:]) == pytest.approx(
        difference(without_shortcut, runs[:2], runs[2:])
    )


class TokenAccuracy(tiny.Sign):
    """A task whose accuracy counts tokens, as that of filling masks does."""

    metrics = (replace(tiny.Sign.metrics[0], compute=token_accuracy),)


def test_the_accuracy_of_tokens_is_not_that_of_rows() -> None:
    dense, compared = np.array([[9.0, 10.0]] * 50), np.array([[5.0, 10.0]] * 50)
    assert difference(TokenAccuracy(), [dense], [compared]).difference == pytest.approx(-0.4)


def test_a_folder_of_rows_is_identified_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.tsv").write_text("label\ttext\n1\ta\n")
    before = _digest(str(tmp_path / "rows"))
    (tmp_path / "rows" / "a.tsv").write_text("label\ttext\n1\tb\n")
    assert _digest(str(tmp_path / "rows")) != before
    assert _digest("glue:sst2") == "glue:sst2"


def test_metrics_of_a_custom_task_are_known_beside_those_of_the_package() -> None:
    tag_f1 = Metric("tag-f1", accuracy, MetricUnit.POINTS)
    tags = SimpleNamespace(task_class=SimpleNamespace(metrics=(tag_f1,)))
    folder, without = (cast(ModelFolder, SimpleNamespace(own_task=task)) for task in (tags, None))
    assert metric_named("tag-f1", folder) is tag_f1
    assert metric_named("accuracy", folder) == metric_named("accuracy", without)
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="metric", value="tag-f1"):
        metric_named("tag-f1", without)


@pytest.mark.zoo
@pytest.mark.parametrize("kind", ["astar", "importance", "dynamics"])
def test_the_same_seed_gives_the_same_rows(
    kind: str, inputs: Path, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    study(kind, request_of(inputs, tmp_path, axes=AXES.get(kind)))
    assert table(tmp_path) == table(finished(kind))


def test_dynamics_takes_the_number_of_evaluations_from_the_recipe(
    inputs: Path, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    study("dynamics", request_of(inputs, tmp_path, options={"evaluations": 1}))
    requested_steps, default_steps = (
        [row["step"] for row in table(folder) if row["eval_accuracy"]] for folder in (tmp_path, finished("dynamics"))
    )
    assert (set(requested_steps), set(default_steps)) == ({"3"}, {"1", "2", "3"})


@pytest.mark.zoo
def test_astar_keeps_at_most_as_many_heads_as_random(finished: Callable[[str], Path]) -> None:
    rows = table(finished("astar"))
    assert {row["variant"] for row in rows} == {"paper", "lazy", "random"}
    for budget in ("1.0", "60.0"):
        fewest_heads = {
            variant: min(int(r["heads"]) for r in rows if (r["variant"], r["budget"]) == (variant, budget))
            for variant in ("paper", "random")
        }
        assert fewest_heads["paper"] <= fewest_heads["random"]


@pytest.mark.parametrize("kind", [pytest.param("astar", marks=pytest.mark.zoo), "ablate"])
def test_evaluations_are_distributed_on_request(
    kind: str, inputs: Path, finished: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every evaluation goes through the requested evaluator, and the findings are the same without it."""
    addresses: list[str | None] = []
    evaluators: list[int] = []

    @contextmanager
    def counting_factory(ray: str | None) -> Iterator[EvaluatorFactory]:
        def make(*values: Any) -> ModelSubsetEvaluator:
            evaluators.append(len(values))
            return ModelSubsetEvaluator(*values)

        addresses.append(ray)
        yield make

    monkeypatch.setattr(run, "evaluator_factory", counting_factory)
    monkeypatch.setattr(run, "check_reachable", lambda ray: None)
    request = request_of(inputs, tmp_path, axes=AXES.get(kind))
    study(kind, replace(request, ray="local:2"))
    assert (addresses, bool(evaluators)) == (["local:2"], True)
    assert table(tmp_path) == table(finished(kind))
    study(kind, request)


def test_domains_come_from_a_column(finished: Callable[[str], Path]) -> None:
    rows = table(finished("importance"))
    assert list(dict.fromkeys(row["which"] for row in rows if row["what"] == "domain")) == ["<i>&amp;", "a$b"]
    assert list(dict.fromkeys(row["which"] for row in rows if row["what"] == "epoch")) == ["0", "1", "2"]


def test_the_command_prints_its_table(inputs: Path, tmp_path: Path, capfd: Cap) -> None:
    arguments: list[str | Path] = [
        "ablate",
        inputs / "model",
        "--data",
        inputs / "rows.tsv",
        "--size",
        "tiny",
        "-o",
        tmp_path / "out",
    ]
    result = run_command(capfd, *arguments)
    assert result.code == 0
    assert "one head left in a layer" in result.out
    assert "note: size tiny: at most 256 training" in result.err
    json_result = run_command(capfd, *arguments, "--json", "--quiet")
    assert (json_result.err, len(json_result.json["rows"])) == ("", 2 * 4 + 2)


def test_a_study_accepts_the_recipe_of_a_run(inputs: Path, tmp_path: Path) -> None:
    """Fields that a study sets itself are ignored in a recipe file."""
    file = tmp_path / "compress.toml"
    file.write_text('data = "rows.tsv"\nmethod = "astar"\nmax_drop = 0.01\ncertify = 0.95\nray = "local"\nseed = 3\n')
    recipe = recipe_of_study(str(inputs / "model"), read_recipe(file), {})
    selection = recipe.selection
    assert (selection.keep, selection.max_drop, selection.certify, selection.ray) == ("100%", None, None, None)
    assert selection.seed == 3
