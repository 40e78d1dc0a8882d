"""A whole run on a tiny model: the output folder, the proofs, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from transformers import ViTImageProcessorPil

import compressor
import graph_passes
from compressor.config.run import Recipe
from compressor.config.sections import EngineConfig, ExportConfig
from compressor.engines import prove
from compressor.engines.build import drops_unread
from compressor.errors import ErrorCode, MismatchError, SiteRefusedError, TargetMissingError, UsageError
from compressor.model_folder import example_inputs, load
from compressor.report import load as load_report
from compressor.results import DropStatus, NoteCode, ProofStage
from compressor.run.load import load_model
from compressor.run.stages import drop_status
from compressor.targets import target
from graph_passes import Plan, Refusal, Shrunk
from tests.command import compress as command
from tests.faults import fails_with
from tests.report import reports
from tests.report.reports import FLOAT_STAGES
from tests.run.conftest import FinishedRun
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learn, learning_recipe
from tests.units.masks import one_layer

OUTPUT = {
    "model.onnx",
    "model.onnx.data",
    "engine.onnx",
    "plan.json",
    "report.json",
    "report.html",
    "config.json",
    "tokenizer.json",
}
Cap = pytest.CaptureFixture[str]


def test_the_output_folder_has_every_file(finished: FinishedRun) -> None:
    plan = finished.report.plan
    assert {path.name for path in finished.out.iterdir()} >= OUTPUT
    assert not finished.out.with_name("out.partial").exists()
    assert load_report(finished.out) == finished.report
    assert (plan.heads_kept, plan.heads, plan.method) == (1, 2, "dsp")
    assert Plan.load(finished.out / "plan.json") == plan


def test_the_report_has_proofs_score_and_speed(finished: FinishedRun) -> None:
    report = finished.report
    proven = [(proof.variant, proof.stage) for proof in report.proofs]
    stages = [(variant, stage) for variant in ("dense", "compressed") for stage in FLOAT_STAGES]
    assert proven[: len(stages)] == stages
    assert set(proven[len(stages) :]) == {("compressed", ProofStage.FIXED_SHAPE)}
    assert all(proof.holds for proof in report.proofs)
    assert [(score.metric, score.split) for score in report.scores] == [("accuracy", "test"), ("accuracy", "eval")]
    assert [(speed.batch, speed.seq) for speed in report.speeds] == [(1, 8)]
    assert report.drop_status is DropStatus.PASSED
    assert report.curves
    for score in report.scores:
        assert report.plan.evidence[score.split]["compressed"] == score.compressed


def test_parameters_decrease_by_those_of_the_dropped_heads(finished: FinishedRun) -> None:
    width, head_dim = 16, 8
    fewer = finished.report.dense.parameters - finished.report.compressed.parameters
    assert fewer == 4 * width * head_dim + 3 * head_dim


def test_the_engine_computes_the_gated_model(finished: FinishedRun) -> None:
    folder = load(finished.out)
    inputs = example_inputs(folder, 3, 7)
    with compressor.gated(folder.model, finished.report.plan), torch.no_grad():
        expected = folder.model(**inputs).logits
    for name in ("model.onnx", "engine.onnx"):
        session = onnxruntime.InferenceSession(finished.out / name, providers=["CPUExecutionProvider"])
        (logits,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-5)


def test_the_output_is_a_model_folder_with_its_plan(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk_heads: list[int] = []
    shrink = graph_passes.shrink

    def count(model: Any, plan: Plan, **settings: Any) -> Shrunk:
        shrunk_heads.append(plan.heads_kept)
        return shrink(model, plan, **settings)

    monkeypatch.setattr(graph_passes, "shrink", count)
    listener = RecordingListener()
    recipe = Recipe(model=finished.out, out=tmp_path / "out", batch=(1,), seq=(8,), seconds=0.01, threads=1)
    repeated = compressor.compress(recipe, listener)
    assert repeated.plan.sites == finished.report.plan.sites
    assert repeated.compressed.parameters == finished.report.compressed.parameters
    assert not any("learning" in name for name in listener.stages)
    assert shrunk_heads == [2, 1, 2], "dense, by the plan, dense with rewrites; nothing is rehearsed"
    assert repeated.refused == ()
    assert NoteCode.PLAN_FOLLOWED in listener.codes


def test_stages_and_notes_are_reported(finished: FinishedRun) -> None:
    report, listener = finished.report, finished.listener
    assert list(report.seconds) == listener.stages
    assert list(report.notes) == listener.notes
    assert {NoteCode.ROWS_SET_ASIDE, NoteCode.TRAINED_ALONG} <= set(listener.codes)


@pytest.mark.zoo
def test_a_learned_plan_is_not_learned_again(inputs: Path, tmp_path: Path, finished: FinishedRun) -> None:
    out = tmp_path / "out"
    listener = RecordingListener("compressed: exporting", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(learning_recipe(inputs, out, max_drop=0.99), listener)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    listener = RecordingListener()
    compressor.compress(learning_recipe(inputs, out, max_drop=0.99), listener)
    assert NoteCode.RESUMED in listener.codes
    assert (out / "plan.json").read_bytes() == (finished.out / "plan.json").read_bytes()


@pytest.mark.parametrize("rows", [None, "rows.tsv", Path("rows.tsv")])
def test_a_run_of_a_model_is_that_of_its_recipe(rows: Path | str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes, fields = list[Recipe](), dict[str, Any](keep=1 if rows else None)

    def run(rungs: list[Recipe], _: object) -> list[None]:
        recipes.extend(rungs)
        return [None]

    monkeypatch.setattr("compressor.run.pipeline.run_rungs", run)
    engine = compressor.Engine(target="auto", precision="auto")
    compressor.compress("model", rows, engine=engine, **fields)
    assert recipes == [Recipe(model="model", data=rows, engine=engine, **fields)]


@pytest.mark.parametrize("arguments", [(5,), ("model", 5), (Recipe(model="model"), "rows.tsv")])
def test_a_run_of_something_else_is_refused(arguments: Any) -> None:
    with fails_with(ErrorCode.INVALID_VALUE, UsageError):
        compressor.compress(*arguments)


@pytest.mark.parametrize("field", ["data", "eval_data", "test_data"])
def test_a_missing_file_of_rows_ends_the_run_before_the_model_is_loaded(field: str, tmp_path: Path) -> None:
    with fails_with(ErrorCode.FILE_MISSING, path=Path("rows.tsv")):
        load_model(Recipe(model=tmp_path / "no model", keep=1, **{"data": "owner/name", field: "rows.tsv"}), ())


def test_without_rows_and_plan_every_head_stays(inputs: Path, tmp_path: Path) -> None:
    report = compressor.compress(
        Recipe(model=inputs / "model", out=tmp_path / "out", batch=(1,), seconds=0.01, threads=1)
    )
    assert report.plan.heads_kept == report.plan.heads
    assert {NoteCode.NOTHING_LEARNED, NoteCode.NO_METRIC} <= {note.code for note in report.notes}
    assert (report.scores, report.drop_status) == ((), DropStatus.NOT_CHECKED)
    assert report.verdict.startswith("Nothing was learned")


def test_a_search_does_not_change_the_weights(inputs: Path, tmp_path: Path) -> None:
    learned, whole = (
        learn(learning_recipe(inputs, tmp_path / "out", method="taylor", max_length=1000)),
        inputs / "model",
    )
    assert {NoteCode.NO_EFFECT, NoteCode.LENGTH_LIMITED} <= learned.codes
    assert (learned.selected.plan.method, learned.selected.plan.heads_kept) == ("taylor", 1)
    assert learned.selected.plan.model == load(whole).fingerprint
    assert not learned.selected.trained
    assert all(torch.equal(learned.weights[name], weight) for name, weight in load(whole).model.named_parameters())


def test_a_run_whose_metric_falls_too_far_keeps_its_output(inputs: Path, tmp_path: Path, capfd: Cap) -> None:
    """The test rows have the opposite labels, so that learning from the others lowers the metric."""
    rows = (inputs / "rows.tsv").read_text().splitlines()
    flipped = [rows[0], *(f"{1 - int(row[0])}{row[1:]}" for row in rows[1:])]
    (tmp_path / "flipped.tsv").write_text("\n".join([*flipped, ""]))
    data: list[str | Path] = ["--data", tmp_path / "flipped.tsv", "--eval-data", tmp_path / "flipped.tsv"]
    flags = [
        "--keep",
        "1",
        "--training-steps",
        "60",
        "--batch-size",
        "8",
        "--learning-rate",
        "0.01",
        "--max-length",
        "8",
    ]
    sizes = ["--batch", "1", "--seq", "8", "--seconds", "0.01", "--threads", "1", "--max-drop", "0"]
    out, test_rows = tmp_path / "out", inputs / "rows.tsv"
    result = command(capfd, inputs / "model", *data, "--test-data", test_rows, *flags, *sizes, "-o", out, "--quiet")
    assert (result.code, result.error_code) == (4, ErrorCode.METRIC_FELL)
    report = load_report(out)
    assert report.drop_status is DropStatus.FAILED
    assert f"{report.scores[0].dense:.4g} to {report.scores[0].compressed:.4g}" in result.error


def test_different_outputs_end_the_run(
    inputs: Path, tmp_path: Path, capfd: Cap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove.ReferenceOutputs, "error", lambda *arguments: 0.5)
    result = command(capfd, inputs / "model", "-o", tmp_path / "out", "--quiet")
    assert (result.code, result.out, result.error_code) == (5, "", ErrorCode.NUMBERS_DIFFER)
    assert result.details["stage"] is ProofStage.EXPORT
    assert list(tmp_path.iterdir()) == []
    assert MismatchError.exit_code == 5


def refuse_every_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graph_passes refuse each site that a plan drops heads from."""
    shrink = graph_passes.shrink

    def refuse(model: Any, plan: Plan, **settings: Any) -> Shrunk:
        shrunk = shrink(model, plan, **settings)
        sites = [site.name for site in plan.sites if site.dropped]
        refusals = tuple(Refusal(frozenset({name}), "Frobnicate", "node_7", "no rule for it") for name in sites)
        return Shrunk(shrunk.model, shrunk.plan, (), (), refusals, shrunk.parameters)

    monkeypatch.setattr(graph_passes, "shrink", refuse)


def test_a_refused_site_is_reported_before_learning(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_every_drop(monkeypatch)
    listener = RecordingListener()
    with pytest.raises(SiteRefusedError, match=r"self: Frobnicate node_7") as caught:
        compressor.compress(learning_recipe(inputs, tmp_path / "out"), listener)
    assert caught.value.code is ErrorCode.SITE_REFUSED
    assert not any("learning" in name for name in listener.stages)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.zoo
def test_a_site_that_cannot_be_shrunk_is_reported(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a plan every head stays, and the report says which could not be removed."""
    refuse_every_drop(monkeypatch)
    report = compressor.compress(learning_recipe(inputs, tmp_path / "out", data=None, keep=None))
    assert len(report.refused) == len(report.plan.sites) > 0
    assert "Frobnicate node_7: no rule for it" in report.refused[0].why
    assert "refused" in report.verdict


@pytest.mark.zoo
def test_images_have_no_length(tmp_path: Path) -> None:
    model, _ = one_layer("vit")
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    size = {"height": model.config.image_size, "width": model.config.image_size}
    ViTImageProcessorPil(size=size).save_pretrained(folder)
    fields: dict[str, Any] = {"model": folder, "out": tmp_path / "out", "batch": (1,), "seconds": 0.01, "threads": 1}
    report = compressor.compress(Recipe(**fields))
    assert [(row.batch, row.seq) for row in report.speeds] == [(1, None)]
    assert "at batch 1 (" in report.verdict
    with pytest.raises(UsageError) as caught:
        compressor.compress(Recipe(**fields, seq=(8,), force=True))
    assert caught.value.details["field"] == "seq"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"options": {"tau": 3}}, UsageError),
        ({"options": {"tau_ini": -1.0}}, UsageError),
        ({"method": "taylor", "options": {"share": 2.0}}, UsageError),
        ({"precision": "fp16", "provider": "cpu"}, TargetMissingError),
    ],
)
def test_an_impossible_run_fails_before_the_export(
    inputs: Path, tmp_path: Path, fields: dict[str, Any], error: type[Exception]
) -> None:
    listener = RecordingListener()
    with pytest.raises(error):
        compressor.compress(learning_recipe(inputs, tmp_path / "out", **fields), listener)
    assert listener.stages == ["loading the model"]


def test_positions_are_kept_for_a_runtime_that_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig()
    assert drops_unread(ExportConfig(), engine)
    assert not drops_unread(ExportConfig(keep_unread_positions=True), engine)
    monkeypatch.setattr(type(target("ort")), "drops_positions", False)
    assert not drops_unread(ExportConfig(), engine)


@pytest.mark.parametrize(("dense", "compressed"), [(0.9, 0.89), (0.85, 0.84), (0.8, 0.79)])
def test_a_loss_of_the_allowed_size_passes_although_floats_are_rounded(dense: float, compressed: float) -> None:
    assert dense - compressed > 0.01
    assert drop_status(0.01, [reports.accuracy(dense, compressed)]) is DropStatus.PASSED
    assert drop_status(0.0099, [reports.accuracy(dense, compressed)]) is DropStatus.FAILED


@pytest.mark.parametrize("eval_loss", [0.0, 0.5])
def test_the_metric_is_checked_on_test_rows_where_they_have_labels(eval_loss: float) -> None:
    on_eval = reports.accuracy(0.9, 0.9 - eval_loss, split="eval")
    for loss, expected in ((0.005, DropStatus.PASSED), (0.02, DropStatus.FAILED)):
        assert drop_status(0.01, [reports.accuracy(0.9, 0.9 - loss), on_eval]) is expected
    assert drop_status(0.01, [on_eval]) is (DropStatus.FAILED if eval_loss else DropStatus.PASSED)


@pytest.mark.parametrize("field", ["model", "data", "plan", "teacher"])
def test_force_does_not_replace_a_folder_that_the_run_reads(field: str, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("plan.json", "report.json", "rows.tsv"):
        (out / name).touch()
    values = {"model": out, "data": out / "rows.tsv", "plan": out / "plan.json", "teacher": out}
    fields: dict[str, Any] = {"model": inputs / "model", "out": out, "force": True, field: values[field]}
    if field in ("data", "teacher"):
        fields = {"data": inputs / "rows.tsv", "macs": "50%", "distill": True, **fields}
    with fails_with(ErrorCode.CONTRADICTION, UsageError, fields=(field, "out")):
        compressor.compress(Recipe(**fields))
    assert (out / "rows.tsv").exists()
