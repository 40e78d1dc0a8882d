"""A run whose target is missing leaves proven graphs, and `compress build` builds engines from its folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compressor
from compressor import report as reports
from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.run import Recipe
from compressor.config.sections import EngineConfig
from compressor.engines.prove import prove_engine
from compressor.errors import ErrorCode, MismatchError, UsageError
from compressor.model_folder import example_inputs, load
from compressor.results import BudgetRow, CostShare, DropStatus, Note, NoteCode, ProofStage, Report
from compressor.run.rebuild import load_run, quantized_source, rebuild, replace_engine
from compressor.serving import ServeRequest, export
from compressor.targets import Precision, target
from compressor.targets.example_rows import EXAMPLE_ROWS
from compressor.units import find_sites, keep_all
from graph_passes import BlockMask, save
from graph_passes import load as load_graph
from tests.command import compress
from tests.report import reports as reports_of_tests
from tests.report.reports import FLOAT_STAGES
from tests.run.listeners import RecordingListener
from tests.run.runs import learning_recipe
from tests.targets.engines import FakeEngine
from tests.targets.graphs import parsed
from tests.targets.kernels import compiled

Cap = pytest.CaptureFixture[str]
BUDGET = tuple(
    BudgetRow(unit=unit, label="whole model", requested=2.0, predicted=2.0, reached=2.0, dense=4.0)
    for unit in ("ms", "parameters")
)
COSTS = (CostShare(label="batch 1, length 8", unit="ms", type="rest", before=1.0, after=1.0),)
NOTES = (NoteCode.ENGINES_COMPARED_WHOLE, NoteCode.PRODUCTS_IN_FLOAT, NoteCode.ROWS_SET_ASIDE)
QUICK = ("--seconds", "0.01", "--batch", "2", "--threads", "1", "--quiet")


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run for TensorRT on a machine without a GPU."""
    out = tmp_path_factory.mktemp("trt") / "out"
    fields: dict[str, Any] = {"batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1}
    report = compressor.compress(Recipe(model=inputs / "model", out=out, target="trt", precision="fp16", **fields))
    assert report.missing is not None
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of the folder, as if on another machine."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture(scope="module")
def rebuilt(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a build for ONNX Runtime, whose folder has a budget and notes of another engine."""
    copy = Path(shutil.copytree(finished, tmp_path_factory.mktemp("rebuilt") / "copy"))
    shutil.copy(copy / "model.onnx", copy / "model.fp8.onnx")
    before = reports.load(copy)
    notes = tuple(Note(code=code, text=code.value) for code in NOTES)
    reports.write(before.model_copy(update={"budget": BUDGET, "costs": COSTS, "notes": (*before.notes, *notes)}), copy)
    return rebuild(copy, {"target": "ort", "precision": "fp32", "seconds": 0.01, "threads": 1}, RecordingListener())


def test_a_run_without_its_target_leaves_proven_graphs(finished: Path) -> None:
    report = reports.load(finished)
    assert (report.target, report.precision, report.recipe["target"], report.recipe["precision"]) == (
        *("ort", "fp32"),
        *("trt", "fp16"),
    )
    assert report.missing is not None
    assert report.missing.target == "trt"
    assert report.missing.command == f"compress build {finished} --target trt"
    assert all(proof.holds for proof in report.proofs)
    assert set(report.graphs) == {"model.onnx", "dense.onnx"}
    assert all((finished / name).is_file() for name in (*report.graphs, "engine.onnx"))
    assert NoteCode.TARGET_MISSING in [note.code for note in report.notes]


def test_a_build_notes_that_its_runtime_may_fail_on_graphs_without_positions(
    copy: Path, rebuilt: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NoteCode.POSITIONS_DROPPED in {note.code for note in reports.load(copy).notes}
    monkeypatch.setattr(type(target("ort")), "drops_positions", False)
    report = rebuild(copy, {"target": "ort", "precision": "fp32", "seconds": 0.01}, RecordingListener())
    assert NoteCode.POSITIONS_UNCERTAIN in {note.code for note in report.notes}
    assert NoteCode.POSITIONS_UNCERTAIN not in {note.code for note in rebuilt.notes}


def test_the_command_fails_and_names_what_is_missing(
    finished: Path, tmp_path: Path, capfd: Cap, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reports.load(finished)
    monkeypatch.setattr("compressor.run.pipeline.compress", lambda recipe, listener: report)
    result = compress(capfd, tmp_path, "--target", "trt", "-o", tmp_path / "out", "--quiet")
    assert (result.code, result.error_code) == (6, ErrorCode.DEVICE_MISSING)
    assert result.details["target"] == "trt"
    assert report.missing is not None
    assert report.missing.command in result.error


def test_a_build_chooses_no_engine(copy: Path) -> None:
    for fields in ({"target": "auto"}, {"precision": "auto"}):
        with pytest.raises(UsageError) as error:
            rebuild(copy, fields, RecordingListener())
        assert error.value.code is ErrorCode.CONTRADICTION


@pytest.mark.parametrize("fields", [{}, {"target": "ort"}])
def test_a_build_shows_no_more_rows_than_the_run(fields: dict[str, Any], copy: Path) -> None:
    report = reports.load(copy)
    reports.write(report.model_copy(update={"recipe": {**report.recipe, "report_rows": 0, "batch_size": 3}}), copy)
    recipe = load_run(copy, fields).recipe
    assert recipe.output.report_rows == 0
    assert recipe.selection.batch_size == 3, "texts of a model with memory are read in as many streams"


def test_a_build_says_that_ids_are_random(copy: Path, rebuilt: Report) -> None:
    """A graph that carries no rows of its model, such as that of an earlier version."""
    model = load_graph(copy / "model.onnx")
    del model.metadata_props[EXAMPLE_ROWS]
    save(model, copy / "model.onnx")
    reports.write(reports.load(copy).model_copy(update={"graphs": {}}), copy)
    fields = {"target": "ort", "precision": "fp32", "seconds": 0.01, "threads": 1}
    bare = rebuild(copy, fields, RecordingListener())
    codes = [{note.code for note in report.notes} for report in (rebuilt, bare)]
    assert [NoteCode.RANDOM_INPUTS in of_report for of_report in codes] == [False, True]


def test_a_build_without_its_target_leaves_the_folder(copy: Path, capfd: Cap) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    result = compress(capfd, "build", copy, "--target", "trt")
    assert (result.code, result.error_code) == (6, ErrorCode.DEVICE_MISSING)
    assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == before


def test_a_folder_of_another_machine_is_built(finished: Path, copy: Path, capfd: Cap) -> None:
    (copy / "engine.onnx").unlink()
    result = compress(capfd, "build", copy, "--target", "ort", *QUICK, "--json")
    assert result.code == 0, result.err
    report = reports.load(copy)
    assert report.model_dump(mode="json") == result.json
    assert (report.missing, report.target, report.recipe["batch"]) == (None, "ort", [2])
    assert [(row.batch, row.seq) for row in report.speeds] == [(2, 8)]
    assert {proof.stage for proof in report.proofs} == {*FLOAT_STAGES, ProofStage.FIXED_SHAPE}
    assert sum(proof.stage in FLOAT_STAGES for proof in report.proofs) == 6
    assert all(proof.holds for proof in report.proofs)
    assert NoteCode.TARGET_MISSING not in [note.code for note in report.notes]
    assert (copy / "engine.onnx").is_file()
    assert {path.name for path in copy.iterdir()} == {path.name for path in finished.iterdir()}


def test_a_build_keeps_a_failed_metric(copy: Path, capfd: Cap) -> None:
    report = reports.load(copy)
    failed = {"drop_status": DropStatus.FAILED, "recipe": {**report.recipe, "max_drop": 0.01}}
    reports.write(report.model_copy(update=failed), copy)
    result = compress(capfd, "build", copy, "--target", "ort", *QUICK)
    assert (result.code, result.error_code) == (4, ErrorCode.METRIC_FELL)
    assert (reports.load(copy).drop_status, reports.load(copy).target) == (DropStatus.FAILED, "ort")


def test_times_of_a_budget_are_not_those_of_another_engine(rebuilt: Report) -> None:
    assert (rebuilt.budget, rebuilt.costs) == (BUDGET[1:], ())


def test_notes_on_a_quantized_graph_are_not_those_of_an_engine_in_floats(rebuilt: Report) -> None:
    assert {note.code for note in rebuilt.notes} & set(NOTES) == {NoteCode.ROWS_SET_ASIDE}


def test_a_folder_without_a_dense_graph_is_built_without_a_comparison(copy: Path, capfd: Cap) -> None:
    before = reports.load(copy)
    graphs = {"model.onnx": before.graphs["model.onnx"]}
    reports.write(before.model_copy(update={"graphs": graphs}), copy)
    (copy / "dense.onnx").unlink()
    for name in ("engine.plan", "engine.plan.json"):
        (copy / name).touch()
    fields = {"target": "ort", "batch": (1, 2), "seq": (8,), "seconds": 0.01, "threads": 1}
    report = rebuild(copy, fields, RecordingListener())
    assert (report.dense.parameters, report.dense.macs) == (before.dense.parameters, before.dense.macs)
    assert (report.dense.peak_memory_bytes, report.dense.optimization, report.speeds) == (None, "not built", ())
    texts = {note.code: note.text for note in report.notes}
    assert NoteCode.NO_DENSE_GRAPH in texts
    assert all(f"batch {batch}, length 8" in texts[NoteCode.TIMED_ALONE] for batch in (1, 2))
    assert "engine.plan, engine.plan.json" in texts[NoteCode.FILES_KEPT]
    assert (copy / "engine.plan.json").is_file(), "the engine of another target stays"
    timed = compress(capfd, "bench", copy, "--seconds", "0.01", "--threads", "1", "--json", "--quiet").json
    assert {row["seq"] for row in timed} == {8}, "as the build"


def test_a_build_notes_quantized_graphs_that_it_does_not_use(rebuilt: Report) -> None:
    assert [note.text.partition(":")[0] for note in rebuilt.notes if note.code is NoteCode.FILES_KEPT] == [
        "model.fp8.onnx"
    ]


@pytest.mark.zoo
def test_a_saved_dense_graph_is_compared_with(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fields: dict[str, Any] = {"batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1}
    report = compressor.compress(Recipe(model=inputs / "model", out=out, save_dense=True, **fields))
    assert report.missing is None
    assert set(report.graphs) == {"model.onnx", "dense.onnx"}
    built = rebuild(out, {}, RecordingListener())
    assert [(row.batch, row.seq) for row in built.speeds] == [(1, 8)]
    assert NoteCode.NO_DENSE_GRAPH not in {note.code for note in built.notes}


@pytest.mark.zoo
def test_the_metric_of_a_new_engine_is_measured(inputs: Path, tmp_path: Path) -> None:
    """Also where the recipe of the report names every field of a distillation that the run did not ask for."""
    out = tmp_path / "out"
    recipe = learning_recipe(inputs, out, keep=None, training_steps=None, macs="60%", max_drop=0.9, save_dense=True)
    report = compressor.compress(recipe)
    built = rebuild(out, {}, RecordingListener())
    assert [score.compressed for score in built.scores] == [score.compressed for score in report.scores]
    assert built.drop_status is DropStatus.PASSED
    assert NoteCode.ROWS_MISSING not in {note.code for note in built.notes}
    rows = inputs / "rows.tsv"
    former = rows.read_text()
    rows.write_text(former.replace("good", "bad"))
    try:
        built = rebuild(out, {}, RecordingListener())
    finally:
        rows.write_text(former)
    assert NoteCode.ROWS_MISSING in {note.code for note in built.notes}
    assert not built.scores
    built = rebuild(out, {}, RecordingListener())
    assert [score.split for score in built.scores] == ["test", "eval"]


def test_a_folder_with_changed_graphs_is_refused(finished: Path, copy: Path, tmp_path: Path, capfd: Cap) -> None:
    def refusal(folder: Path, *flags: str) -> tuple[int, str | None, Path | None]:
        result = compress(capfd, "build", folder, *flags)
        return result.code, result.error_code, result.details.get("path")

    shutil.copy(copy / "dense.onnx", copy / "model.onnx")
    assert refusal(copy, "--target", "ort") == (3, ErrorCode.FILE_MISMATCH, copy / "model.onnx")
    (copy / "dense.onnx").unlink()
    shutil.copy(finished / "model.onnx", copy / "model.onnx")
    assert refusal(copy, "--target", "ort") == (3, ErrorCode.FILE_MISSING, copy / "dense.onnx")
    assert refusal(tmp_path)[:2] == (3, ErrorCode.FILE_MISSING)
    assert refusal(copy, "--batch", "0")[0] == 2


@pytest.mark.parametrize("moves", range(4))
def test_an_engine_is_replaced_with_its_report_or_not_at_all(
    moves: int, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption is at the weights, at either file of the report, or at the graph."""
    names = ["engine.onnx", "engine.onnx.data"]

    def write_engine(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file in names:
            (folder / file).write_text(name)
        return folder

    def interrupted_after(moves: Iterator[bool]) -> None:
        def move(self: Path, to: Path) -> Path:
            if not next(moves, False):
                raise KeyboardInterrupt
            return replace(self, to)

        replace = Path.replace
        monkeypatch.setattr(Path, "replace", move)

    out = write_engine("old")
    report = {name: reports.load(finished).model_copy(update={"verdict": name}) for name in ("old", "new")}
    reports.write(report["old"], out)
    interrupted_after(iter([True] * moves))
    with pytest.raises(KeyboardInterrupt):
        replace_engine(write_engine("new"), out, "ort", report["new"])
    assert not (out / "engine.onnx").exists(), "a graph is never beside the weights or the report of another"
    monkeypatch.undo()
    replace_engine(write_engine("new"), out, "ort", report["new"])
    assert {(out / name).read_text() for name in names} == {"new"}
    assert reports.load(out).verdict == "new"
    names.pop()  # of a graph without weights in a file of their own
    shutil.rmtree(tmp_path / "new")
    (out / "engine.xml").touch()
    replace_engine(write_engine("new"), out, "ort", report["new"])
    assert {path.name for path in out.glob("engine.*")} == {"engine.onnx", "engine.xml"}


def test_a_graph_with_a_fixed_batch_is_proven_at_that_batch(finished: Path, tmp_path: Path) -> None:
    save(parsed("y = Mul(x, x)", "float[4, S] x", "float[4, S] y"), tmp_path / "model.onnx")
    reports.write(reports.load(finished).model_copy(update={"graphs": {}}), tmp_path)
    cases = load_run(tmp_path, {"seq": (8,)}).cases
    assert [case.feeds["x"].shape for case in cases] == [(4, 5), (4, 8)]


def test_a_proof_without_cases_fails(tmp_path: Path) -> None:
    save(parsed("y = Mul(x, x)", "float[4, S] x", "float[4, S] y"), tmp_path / "model.onnx")
    with pytest.raises(MismatchError) as error:
        prove_engine(tmp_path / "model.onnx", FakeEngine(), (), "dense")
    assert error.value.code is ErrorCode.OUTPUTS_DIFFER


@pytest.mark.zoo
def test_the_kernel_of_a_run_is_used_only_if_it_is_named_again(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library is code, so the folder of a run, which may come from another machine, must not load one."""
    monkeypatch.setattr(MaskSelector, "lowered", lambda self, plan: frozenset(plan.masks))
    library, out, listener = tmp_path / "kernel.so", tmp_path / "out", RecordingListener()
    shutil.copy(compiled(), library)
    folder = load(inputs / "model")
    plan = keep_all(find_sites(folder.model, example_inputs(folder, 2, 8)))
    (site,) = plan.sites
    mask = BlockMask(np.tri(2, dtype=np.bool_)[None].repeat(site.heads, 0), 8)
    plan.masked({site.name: mask}).save(tmp_path / "plan.json")
    sizes: dict[str, Any] = {"batch": (1,), "seq": (16,), "seconds": 0.01, "threads": 1}
    recipe = Recipe(model=inputs / "model", plan=tmp_path / "plan.json", out=out, kernel=library, **sizes)
    report = compressor.compress(recipe, listener)
    assert all(proof.holds for proof in report.proofs)
    assert report.compressed.optimization.count(f"1 by the kernel of {library.resolve()}") == 1
    served = export(ServeRequest(out=out, repository=tmp_path / "repository"))
    assert NoteCode.KERNEL_NOT_SERVED in [note.code for note in served.notes]
    with_kernel = rebuild(out, {"kernel": library}, listener)
    assert with_kernel.session["kernel"] == str(library.resolve())
    assert NoteCode.KERNEL_UNUSED not in [note.code for note in with_kernel.notes]
    without_kernel = rebuild(out, {}, listener)
    assert "kernel" not in without_kernel.session
    assert NoteCode.KERNEL_UNUSED in [note.code for note in without_kernel.notes]
    library.unlink()
    with pytest.raises(UsageError) as error:
        rebuild(out, {"kernel": library}, listener)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISSING, library)


@pytest.mark.parametrize(
    ("delivered", "target", "precision", "expected"),
    [
        ("ort int8 portable", "ort", "int8", "model.int8.onnx"),
        ("ort int8 portable, 2 products in floats", "ort", "int8", "model.int8.onnx"),
        ("ort int8 dynamic", "ort", "int8", None),
        ("openvino int8 portable", "ort", "int8", None),
        ("ort int8 portable", "openvino", "int8", "model.int8.onnx"),
        ("ort int8 portable", "ort", "fp32", None),
    ],
)
def test_the_delivered_engine_is_built_again_in_its_form(
    delivered: str, target: str, precision: Precision, expected: str | None
) -> None:
    engine = EngineConfig(target=target, precision=precision)
    assert quantized_source(reports_of_tests.report(delivered=delivered), engine) == expected
