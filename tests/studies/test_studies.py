"""Studies: cells run once and resume after an interruption, every kind writes its files, and faults are refused."""

from __future__ import annotations

import csv
import fcntl
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from compressor.config.methods import HEAD_METHODS
from compressor.config.recipe_file import recipe_of
from compressor.config.run import Recipe
from compressor.config.study import RESERVED, StudyRequest
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.progress import ProgressCallback
from compressor.results import Note
from compressor.selection.options import option_names
from compressor.selection.subset_evaluator import EvaluatorFactory, ModelSubsetEvaluator
from compressor.studies import KINDS, SIZES, StudySize, base, run, study
from compressor.studies.cell_store import Cell, StudyFolder
from compressor.studies.context import StudyContext
from compressor.studies.grid import Grid
from compressor.studies.results import difference
from compressor.studies.run_method import check_options
from tests import folders
from tests.command import compress
from tests.selection import tiny

TINY = replace(SIZES["tiny"], steps=3, trials=3, masks=1, seconds=0.001, evaluations=1, sample=8)
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "grid": {"methods": ("dsp", "ste", "dsp-pipelined", "taylor"), "keeps": (4, 1)},
    "astar": {"budgets": (1.0, 60.0)},
    "penalty": {"penalties": (0.01, 1.0)},
    "blocks": {"shares": (0.5,)},
}
PICTURES = {
    "grid": {"metric_vs_heads", "kept_dsp", "layers_dsp", "kept_taylor", "layers_ste"},
    "astar": {"iterations_b1", "solutions_lazy", "costs_paper_b60", "random_b1", "random_metric_b60"},
    "ablate": {"ablate_one", "ablate_histogram"},
    "dynamics": {"dynamics_k1"},
    "penalty": {"penalty"},
    "importance": {"domain_correlation", "domain_importance", "epoch_correlation", "epoch_importance"},
    "blocks": {"metric_vs_p", "macs_saved", "density", "maps_bidirectional"},
    "speed": {"speed_vs_heads", "size_vs_heads", "speed_vs_batch", "speed_vs_metric", "size_vs_metric"},
}
Cap = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with four heads, and rows of two domains that it can learn."""
    folder = tmp_path_factory.mktemp("study")
    torch.manual_seed(0)
    sizes = {**folders.SIZES, "num_hidden_layers": 2, "num_attention_heads": 4}
    folders.save(BertForSequenceClassification(BertConfig(**sizes)), folder / "model")
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [
        f"{n % 2}\t{'a$b' if n % 3 else '<i>&amp;'}\tthe {('bad', 'good')[n % 2]} film {words[n % 7]} {words[n % 5]}"
        for n in range(64)
    ]
    (folder / "rows.tsv").write_text("\n".join(["label\tdomain\ttext", *rows, ""]))
    return folder


def request_of(
    inputs: Path, out: Path, size: StudySize = TINY, axes: dict[str, tuple[Any, ...]] | None = None, **fields: Any
) -> StudyRequest:
    """The request of a study that takes a second."""
    settings = {"keep": "100%", "batch_size": 8, "max_length": 8, "batch": (1, 2), "seq": (8,), **fields}
    recipe = Recipe(model=inputs / "model", data=str(inputs / "rows.tsv"), out=out, **settings)
    return StudyRequest(recipe, size, (str(inputs / "rows.tsv"),), axes or {})


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of the CSV file without durations."""
    with (folder / "study.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


class StageRecorder:
    """Records the stages, and calls `action` when a stage begins or after some of its steps.

    Args:
        prefix: start of the name of the stage; empty: none.
        action: what to call.
        after: number of finished steps; 0: at the beginning.
    """

    def __init__(self, prefix: str = "", action: Callable[[], None] = lambda: None, *, after: int = 0) -> None:
        self.prefix, self.action, self.after = prefix, action, after
        self.names: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        self.names.append(name.partition(" (")[0])
        is_at_stage = self.prefix and name.startswith(self.prefix)
        if is_at_stage and not self.after:
            self.action()
        yield lambda finished, total: self.action() if is_at_stage and finished == self.after else None

    def note(self, note: Note | str) -> None: ...


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a study of each kind, which runs at its first use."""
    out = tmp_path_factory.mktemp("done")

    @functools.cache
    def folder(kind: str) -> Path:
        axes = AXES.get(kind)
        if kind == "speed":
            study("grid", request_of(inputs, out / "small", axes={"methods": ("ste",), "keeps": (4,)}))
            axes = {"keeps": (4,), "grids": (str(out / "small"),)}
        study(kind, request_of(inputs, out / kind, axes=axes))
        return out / kind

    return folder


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_writes_a_table_and_figures(kind: str, finished: Callable[[str], Path]) -> None:
    figures = {file.stem for file in (finished(kind) / "figures").iterdir()}
    assert figures >= PICTURES[kind]
    for file in (finished(kind) / "figures").iterdir():
        text = file.read_text()
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text
    assert len(table(finished(kind))) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_self_contained(kind: str, finished: Callable[[str], Path]) -> None:
    page = (finished(kind) / "study.html").read_text()
    references = re.findall(r"""(?:src|href)="([^"]*)"|url\(([^)]*)\)""", page)
    assert all("".join(reference).startswith(("#", "data:")) for reference in references)
    assert "<script" not in page
    assert page.count("<svg") == len(list((finished(kind) / "figures").iterdir()))
    assert "<i>&amp;</i>" not in page


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
    cells = Grid(request, StudyContext(request.recipe, TINY), StudyFolder(tmp_path / "cells", {})).cells()
    assert {cell.settings["method"] for cell in cells if cell.needs} == {"dsp-pipelined", "taylor"}
    assert {cell.needs for cell in cells if cell.needs} == {("dense-s1",)}


def test_a_grid_resumes_after_an_interruption(inputs: Path, finished: Callable[[str], Path], tmp_path: Path) -> None:
    request = request_of(inputs, tmp_path / "grid", axes=AXES["grid"])
    first = StageRecorder("taylor-k4", interrupt)
    with pytest.raises(KeyboardInterrupt, match="the same command resumes from"):
        study("grid", request, first)
    second = StageRecorder()
    study("grid", request, second)
    assert [name for name in first.names + second.names if name.count("-s") == 1].count("taylor-k4-s1") == 2
    assert not {*first.names} & {*second.names} - {"taylor-k4-s1", "loading the model and the rows"}
    assert table(tmp_path / "grid") == table(finished("grid"))
    third = StageRecorder()
    study("grid", request, third)
    assert third.names == ["loading the model and the rows", "writing the findings"]


@pytest.mark.parametrize(
    ("kind", "axes", "options", "stage", "after", "remaining_files"),
    [
        ("grid", {"methods": ("dsp",), "keeps": (4,)}, {"evaluations": 3}, "dsp-k4", 2, "cells/dsp-k4*.partial/**/*.*"),
        ("astar", {"variants": ("paper",), "budgets": (60.0,)}, {}, "paper-b60", 3, "kept/searched.npz"),
    ],
)
def test_an_interrupted_cell_gives_the_result_of_an_uninterrupted_cell(
    kind: str,
    axes: dict[str, tuple[Any, ...]],
    options: dict[str, Any],
    stage: str,
    after: int,
    remaining_files: str,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training resumes from a checkpoint, a search with its evaluations; only the total cost differs."""
    monkeypatch.setattr(StudyContext, "write_seconds", 0.0)
    uninterrupted, interrupted = (
        request_of(inputs, tmp_path / name, axes=axes, options=options) for name in ("whole", "stopped")
    )
    study(kind, uninterrupted)
    with pytest.raises(KeyboardInterrupt, match="the same command resumes from"):
        study(kind, interrupted, StageRecorder(stage, interrupt, after=after))
    assert any((tmp_path / "stopped").glob(remaining_files))
    study(kind, interrupted)
    first, second = ([{**row, "forwards": ""} for row in table(tmp_path / name)] for name in ("whole", "stopped"))
    assert first == second


def test_a_later_request_adds_cells(inputs: Path, tmp_path: Path) -> None:
    study("grid", request_of(inputs, tmp_path, axes={"methods": ("ste",), "keeps": (4,)}))
    recorder = StageRecorder()
    study("grid", request_of(inputs, tmp_path, axes={"methods": ("ste",), "keeps": (1,)}), recorder)
    assert recorder.names[1:-1] == ["ste-k1-s1"]
    assert [row["keep"] for row in table(tmp_path)] == ["8", "4", "1"]


def test_an_interrupted_cell_keeps_its_working_folder(tmp_path: Path) -> None:
    """Files that a killed process leaves in the folder of a cell, e.g. checkpoints, remain for the next run."""

    def run_and_interrupt(cell: Cell, work: Path, on_progress: ProgressCallback) -> dict[str, Any]:
        (work / "step").write_text("7")
        raise KeyboardInterrupt

    def resume(cell: Cell, work: Path, on_progress: ProgressCallback) -> dict[str, Any]:
        return {"step": (work / "step").read_text()}

    folder = StudyFolder(tmp_path, {})
    with pytest.raises(KeyboardInterrupt):
        folder.run([Cell("a", {})], run_and_interrupt, StageRecorder())
    assert folder.results() == []
    folder.run([Cell("a", {})], resume, StageRecorder())
    assert folder.results() == [{"cell": "a", "settings": {}, "step": "7"}]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_cell_that_another_process_holds_is_not_run(tmp_path: Path) -> None:
    """Cells b and c run while another process holds a; then this process waits until a is finished."""
    holder_code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input();"
    )
    holder_code += "open(sys.argv[1].replace('.lock', '.json'), 'w').write('{\"cell\": \"a\", \"by\": \"other\"}')"
    folder = StudyFolder(tmp_path, {})
    lock = tmp_path / "cells" / "a.lock"
    lock.parent.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", holder_code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other_process:
        assert other_process.stdin
        assert other_process.stdout
        other_process.stdout.readline()
        cells_run = []

        def run_cell(cell: Cell, work: Path, on_progress: ProgressCallback) -> dict[str, Any]:
            cells_run.append(cell.name)
            if cell.name == "c":
                other_process.stdin.write("\n")  # type: ignore[union-attr]
                other_process.stdin.flush()  # type: ignore[union-attr]
            return {}

        folder.run([Cell(name, {}, ("b",) * (name == "c")) for name in "abc"], run_cell, StageRecorder())
    assert cells_run == ["b", "c"]
    assert [result.get("by") for result in folder.results()] == ["other", None, None]


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path, {})
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.lock").touch()  # left by a killed process
    folder.run([Cell("a", {})], lambda cell, work, on_progress: {}, StageRecorder())
    assert len(folder.results()) == 1
    with (tmp_path / "cells" / "a.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


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


@pytest.mark.parametrize("kind", ["astar", "dynamics", "importance"])
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


def test_astar_keeps_at_most_as_many_heads_as_random(finished: Callable[[str], Path]) -> None:
    rows = table(finished("astar"))
    assert {row["variant"] for row in rows} == {"paper", "lazy", "random"}
    for budget in ("1.0", "60.0"):
        fewest_heads = {
            variant: min(int(r["heads"]) for r in rows if (r["variant"], r["budget"]) == (variant, budget))
            for variant in ("paper", "random")
        }
        assert fewest_heads["paper"] <= fewest_heads["random"]


@pytest.mark.parametrize("kind", ["astar", "ablate"])
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
    monkeypatch.setattr(base, "check_reachable", lambda ray: None)
    request = request_of(inputs, tmp_path, axes=AXES.get(kind))
    study(kind, replace(request, ray="local:2"))
    assert (addresses, bool(evaluators)) == (["local:2"], True)
    assert table(tmp_path) == table(finished(kind))
    study(kind, request)


def test_domains_come_from_a_column(finished: Callable[[str], Path]) -> None:
    rows = table(finished("importance"))
    assert list(dict.fromkeys(row["which"] for row in rows if row["what"] == "domain")) == ["<i>&amp;", "a$b"]
    assert list(dict.fromkeys(row["which"] for row in rows if row["what"] == "epoch")) == ["0", "1", "2"]


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
    result = compress(
        capfd, "study", kind, inputs / "model", *rows, "-o", tmp_path / "out", "--size", "tiny", *flags, "--quiet"
    )
    assert (result.error_code, result.out) == (code, "")
    assert expected in result.error
    assert result.code in (2, 3)
    assert not (tmp_path / "out").exists()


def test_missing_and_repeated_data_are_refused(inputs: Path, tmp_path: Path, capfd: Cap) -> None:
    rows: list[str | Path] = ["--data", inputs / "rows.tsv"]
    arguments: list[str | Path] = ["study", "grid", inputs / "model", "-o", tmp_path / "out", "--quiet"]
    for added, code in (([], MISSING), ([*rows, *rows], CONFLICT)):
        result = compress(capfd, *arguments, *added)
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
    @contextmanager
    def fail(ray: str | None) -> Iterator[EvaluatorFactory]:
        raise InputError("no workers")
        yield

    monkeypatch.setattr(run, "evaluator_factory", fail)
    with pytest.raises(InputError, match="no workers"):
        study("ablate", request_of(inputs, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_another_study_has_claimed_is_refused(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path, {"kind": "grid"})
    StudyFolder(tmp_path, {"kind": "blocks"}).run([], lambda cell, work, on_progress: {}, StageRecorder())
    with pytest.raises(UsageError, match=r"another recipe \(kind was blocks, now grid\)"):
        folder.run([Cell("a", {})], lambda cell, work, on_progress: {}, StageRecorder())
    with pytest.raises(UsageError, match=r"another recipe \(kind was blocks, now grid\)"):
        StudyFolder(tmp_path, {"kind": "grid"})


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_shows_every_field_that_identifies_the_study(kind: str, finished: Callable[[str], Path]) -> None:
    page = (finished(kind) / "study.html").read_text()
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    facts_by_kind = {
        "blocks": {"block size": "64", "map rows": "2000", "weight by count": "no", "data": "rows.tsv"},
        "importance": {"data": "rows.tsv"},
        "speed": {"target": "ort", "opset": "18", "batch": "1, 2", "seq": "8", "seconds": "0.001"},
    }
    assert facts.items() >= {"max length": "8", "metric": "accuracy", **facts_by_kind.get(kind, {})}.items()
    stamp = json.loads((finished(kind) / "study.json").read_text())
    unlisted = {"kind", "size", "model", "rows", "seed", "options", "batch_size", "learning_rate", "steps", "sources"}
    requested = {name for name, value in stamp.items() if value is not None} - unlisted
    assert {name.replace("_", " ") for name in requested} <= facts.keys()


def test_the_page_shows_the_batches_that_speed_measures(inputs: Path, tmp_path: Path) -> None:
    """Unless the batches are requested, they are those of the study and not those of the recipe."""
    request = request_of(inputs, tmp_path)
    values = {name: request.recipe.value(name) for name in request.recipe.fields_set - {"batch"}}
    instance = KINDS["speed"](replace(request, recipe=Recipe(**values)), StudyContext(request.recipe, TINY), None)  # type: ignore[arg-type]
    assert instance.settings() == {"batch": [1, 4, 8, 16, 64], "seq": 8, "seconds": 0.001}


@pytest.mark.parametrize(("shares", "base"), [((0.0, 0.5), "retrained"), ((0.5,), "dense")])
def test_legend_and_description_name_the_same_baseline(
    shares: tuple[float, ...], base: str, inputs: Path, tmp_path: Path
) -> None:
    findings = study("blocks", request_of(inputs, tmp_path, axes={"shares": shares, "masks": ("own",)}))
    (chart,) = (picture for picture in findings.pictures if picture.name == "metric_vs_p")
    (legend,) = chart.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [base, "own, all"]
    assert chart.description.endswith(f"The grey line is {base}.")


def test_table_and_figure_give_saved_macs_the_same_name(inputs: Path, tmp_path: Path) -> None:
    findings = study("blocks", request_of(inputs, tmp_path, axes={"shares": (0.5,), "masks": ("own",)}, block_size=1))
    (printed_table,) = findings.tables
    dense_cell, masked_cell = (
        {"left": row["macs_left"], "text": line[-1]}
        for row, line in zip(findings.rows, printed_table.rows, strict=True)
    )
    assert printed_table.columns[-1] == "MACs saved"
    assert dense_cell == {"left": 1.0, "text": "0%"}
    assert (masked_cell["left"], masked_cell["text"]) == (
        pytest.approx(0.5, abs=0.05),
        f"{100 * (1 - masked_cell['left']):.0f}%",
    )
    (chart,) = (picture for picture in findings.pictures if picture.name == "macs_saved")
    (line,) = findings.summary
    assert line.removeprefix("MACs saved: ") == chart.description.removeprefix("Here ").removesuffix(".")
    assert chart.description.startswith("Here the share of attention's multiply-accumulates")


def test_a_folder_of_another_recipe_is_refused(inputs: Path, finished: Callable[[str], Path], tmp_path: Path) -> None:
    folder = finished("penalty")
    with pytest.raises(UsageError, match=r"another recipe \(learning_rate was 5e-05, now 0.1\)"):
        study("penalty", request_of(inputs, folder, learning_rate=0.1, axes=AXES["penalty"]))
    with pytest.raises(UsageError, match=r"another recipe \(kind was penalty, now grid\)"):
        study("grid", request_of(inputs, folder))
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="no study wrote this folder"):
        study("grid", request_of(inputs, tmp_path))
    with pytest.raises(UsageError, match="is a file"):
        study("grid", request_of(inputs, tmp_path / "mine"))


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path, {})
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.json").write_text("{")
    with pytest.raises(InputError, match=r"a\.json: is damaged"):
        folder.results()


def test_options_go_to_the_methods_that_have_them() -> None:
    assert {"cooldown", "evaluations", "pool"} <= set(option_names("dsp"))
    check_options({"cooldown": 0.5, "taylor.share": 0.2}, ["dsp", "taylor"])
    with pytest.raises(UsageError, match=r"did you mean share\?"):
        check_options({"taylor.shar": 0.2}, ["dsp", "taylor"])


def test_the_command_prints_its_table(inputs: Path, tmp_path: Path, capfd: Cap) -> None:
    arguments: list[str | Path] = [
        "study",
        "ablate",
        inputs / "model",
        "--data",
        inputs / "rows.tsv",
        "--size",
        "tiny",
        "-o",
        tmp_path / "out",
    ]
    result = compress(capfd, *arguments)
    assert result.code == 0
    assert "one head left in a layer" in result.out
    assert "note: size tiny: at most 256 training" in result.err
    json_result = compress(capfd, *arguments, "--json", "--quiet")
    assert (json_result.err, len(json_result.json["rows"])) == ("", 2 * 4 + 2)


def test_a_study_accepts_the_recipe_of_a_run(inputs: Path, tmp_path: Path) -> None:
    """Fields that a study sets itself are ignored in a recipe file."""
    file = tmp_path / "compress.toml"
    file.write_text('data = "rows.tsv"\nmethod = "astar"\nmax_drop = 0.01\ncertify = 0.95\nray = "local"\nseed = 3\n')
    recipe = recipe_of(str(inputs / "model"), str(file), {}, reserved=RESERVED)
    selection = recipe.selection
    assert (selection.keep, selection.max_drop, selection.certify, selection.ray) == ("100%", None, None, None)
    assert selection.seed == 3
