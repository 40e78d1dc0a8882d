"""Runs that distill: any plan, no labels, resumed at any point, and teachers that do not fit are refused."""

from __future__ import annotations

import copy
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers

import compressor
from compressor.config.run import Recipe
from compressor.config.steps import Distill
from compressor.errors import CompressorError, DivergedError, ErrorCode, UsageError
from compressor.model_folder import example_inputs, load
from compressor.results import NoteCode, Report
from compressor.run.steps import distill
from compressor.run.steps.distill import rounded_precision
from compressor.tasks import Data
from compressor.units.layers import is_linear
from graph_passes import Plan
from tests import folders
from tests.command import compress
from tests.graph_passes.exporters import trace
from tests.graph_passes.graphs import error
from tests.graph_passes.graphs import run as run_graph
from tests.graph_passes.test_shrink_exports import feeds
from tests.run.distillation.distilled_runs import distilled_recipe, have_same_weights, run, weights
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import Learned, learn
from tests.targets.cpu import needs_vnni


def test_units_are_removed_and_the_rest_is_trained(
    pruned: tuple[Recipe, Learned], distilled: tuple[Path, Report]
) -> None:
    (_, before), (out, report) = pruned, distilled
    assert report.plan.groups == before.selected.plan.groups
    assert report.plan.heads_kept + report.plan.neurons_kept < report.plan.heads + report.plan.neurons
    assert NoteCode.DISTILLED in {note.code for note in report.notes}
    assert all(proof.holds for proof in report.proofs)
    assert any("loss" in point.values for point in report.curves)
    (row,) = report.budget
    assert row.met
    after = weights(out)
    assert any(not torch.equal(before.weights[name], after[name]) for name in after)
    assert Plan.load(out / "plan.json").model == load(out).fingerprint


@pytest.mark.zoo
def test_heads_of_another_method_are_trained_on(inputs: Path, tmp_path: Path) -> None:
    learned = learn(distilled_recipe(inputs, tmp_path / "out", keep=1, training_steps=2, macs=None))
    assert learned.selected.plan.heads_kept == 1
    assert (learned.selected.plan.method or "").startswith("dsp")
    assert NoteCode.DISTILLED in learned.codes


@pytest.mark.zoo
@pytest.mark.parametrize("macs", [None, "85%"])
def test_a_run_trains_heads_of_another_method_on(inputs: Path, tmp_path: Path, macs: str | None) -> None:
    report = run(inputs, tmp_path / "out", keep=1, training_steps=2, macs=macs)
    assert report.plan.heads_kept == 1
    assert NoteCode.DISTILLED in {note.code for note in report.notes}
    assert all(proof.holds for proof in report.proofs)


def test_a_plan_of_a_file_is_trained(inputs: Path, tmp_path: Path, distilled: tuple[Path, Report]) -> None:
    out, first = distilled
    fields: dict[str, Any] = {"model": out, "teacher": inputs / "model", "macs": None}
    learned = learn(distilled_recipe(inputs, tmp_path / "second", **fields))
    assert NoteCode.PLAN_FOLLOWED in learned.codes
    assert {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN} & learned.codes
    assert learned.selected.plan.groups == first.plan.groups


@pytest.mark.zoo
def test_training_rows_need_no_labels(inputs: Path, tmp_path: Path) -> None:
    lines = (inputs / "rows.tsv").read_text().splitlines()
    (tmp_path / "train.tsv").write_text("\n".join(line.partition("\t")[2] for line in lines) + "\n")
    report = run(inputs, tmp_path / "out", data=str(tmp_path / "train.tsv"), eval_data=str(inputs / "rows.tsv"))
    assert {NoteCode.ROWS_UNLABELLED, NoteCode.DISTILLED} <= {note.code for note in report.notes}


@pytest.mark.zoo
@pytest.mark.parametrize("field", ["data", "unlabelled_data"])
def test_rows_may_be_lines_of_text(inputs: Path, tmp_path: Path, field: str) -> None:
    lines = (inputs / "rows.tsv").read_text().splitlines()[1:]
    (tmp_path / "train.txt").write_text("\n".join(line.partition("\t")[2] for line in lines) + "\n")
    rows = {"eval_data": str(inputs / "rows.tsv"), field: str(tmp_path / "train.txt")}
    learned = learn(distilled_recipe(inputs, tmp_path / "out", **rows))
    assert {NoteCode.ROWS_UNLABELLED, NoteCode.DISTILLED} <= learned.codes


@pytest.mark.zoo
def test_lengths_of_training_rows_follow_all_evaluation_rows(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model is compared with its teacher on some of them."""
    header, *lines = (inputs / "rows.tsv").read_text().splitlines()
    rows = (lines * (1200 // len(lines) + 1))[:1200]
    (tmp_path / "eval.tsv").write_text("\n".join([header, *rows, ""]))
    counts, draw_rows = [], distill.draw_rows

    def counted(data: Data, *arguments: Any) -> Any:
        counts.append(len(data.eval))
        return draw_rows(data, *arguments)

    monkeypatch.setattr(distill, "draw_rows", counted)
    learn(distilled_recipe(inputs, tmp_path / "out", eval_data=str(tmp_path / "eval.tsv"), distill_steps=1))
    assert counts == [600]  # the others are set aside for the test


def test_minutes_limit_the_steps(inputs: Path, tmp_path: Path, distilled: tuple[Path, Report]) -> None:
    fields: dict[str, Any] = {"model": distilled[0], "teacher": inputs / "model", "macs": None}
    recipe = distilled_recipe(inputs, tmp_path / "out", minutes=5e-3, distill_steps=10_000_000, **fields)
    assert 0 < max(point.step for point in learn(recipe).selected.curves) < 10_000
    with pytest.raises(UsageError) as caught:
        run(inputs, tmp_path / "none", minutes=1e-9, **fields)
    assert caught.value.details["field"] == "minutes"


@pytest.mark.zoo
def test_the_time_of_a_step_is_that_of_its_update_too(
    inputs: Path, tmp_path: Path, distilled: tuple[Path, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, update = 0.2, torch.optim.AdamW.step

    def slow_update(optimizer: torch.optim.AdamW, *arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return update(optimizer, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", slow_update)
    fields: dict[str, Any] = {"model": distilled[0], "teacher": inputs / "model", "macs": None}
    learned = learn(distilled_recipe(inputs, tmp_path / "out", minutes=5 * seconds / 60, distill_steps=100, **fields))
    assert 0 < max(point.step for point in learned.selected.curves) <= 5


@pytest.mark.zoo
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_time_of_a_step_is_that_of_its_rounding_too(
    share: float, inputs: Path, tmp_path: Path, distilled: tuple[Path, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, steps, round_inputs = 0.02, 8, torch.fake_quantize_per_tensor_affine
    linears = sum(is_linear(module) for module in load(distilled[0]).model.modules())

    def slow_rounding(*arguments: Any) -> Any:
        time.sleep(seconds)
        return round_inputs(*arguments)

    monkeypatch.setattr(torch, "fake_quantize_per_tensor_affine", slow_rounding)
    fields: dict[str, Any] = {"model": distilled[0], "teacher": inputs / "model", "macs": None}
    minutes = steps * share * linears * seconds / 60
    quantized: dict[str, Any] = {"target": "openvino", "precision": "int8", "quantized_share": share}
    recipe = distilled_recipe(inputs, tmp_path / "out", minutes=minutes, distill_steps=1000, **quantized, **fields)
    assert 0 < max(point.step for point in learn(recipe).selected.curves) <= steps


@pytest.mark.zoo
def test_minutes_that_suffice_change_nothing(inputs: Path, tmp_path: Path, distilled: tuple[Path, Report]) -> None:
    learned, whole = learn(distilled_recipe(inputs, tmp_path / "out", minutes=1000)), weights(distilled[0])
    assert all(torch.equal(learned.weights[name], whole[name]) for name in whole)


@pytest.mark.zoo
def test_an_interruption_before_the_training_changes_nothing(
    inputs: Path, tmp_path: Path, pruned: tuple[Recipe, Learned], distilled: tuple[Path, Report]
) -> None:
    folder = pruned[0].output.out.parent
    assert [path.name for path in folder.iterdir()] == ["out.partial"]
    shutil.copytree(folder / "out.partial", tmp_path / "out.partial")  # other tests resume this run too
    resumed, whole = learn(distilled_recipe(inputs, tmp_path / "out")), weights(distilled[0])
    assert NoteCode.RESUMED in resumed.codes
    assert have_same_weights(resumed.weights, whole)


@pytest.mark.zoo
@pytest.mark.parametrize("stage", ["compressed: exporting", "refitting"])
def test_an_interruption_changes_nothing(
    stage: str, inputs: Path, tmp_path: Path, distilled: tuple[Path, Report]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(distilled_recipe(inputs, tmp_path / "out"), RecordingListener(stage, interrupt))
    listener = RecordingListener()
    compressor.compress(distilled_recipe(inputs, tmp_path / "out"), listener)
    assert NoteCode.RESUMED in listener.codes
    resumed, whole = weights(tmp_path / "out"), weights(distilled[0])
    assert have_same_weights(resumed, whole)


@pytest.mark.zoo
def test_a_training_that_diverges_keeps_its_work(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        run(inputs, tmp_path / "out", distill_learning_rate=1e30)
    assert (tmp_path / "out.partial").is_dir()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"num_labels": 3}, ErrorCode.LABEL_MISMATCH),
        ({"num_hidden_layers": 2}, ErrorCode.FILE_MISMATCH),
        ({"id2label": {0: "bad", 1: "good"}}, ErrorCode.LABEL_MISMATCH),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    fields: dict[str, Any], code: ErrorCode, inputs: Path, tmp_path: Path
) -> None:
    teacher = transformers.BertForSequenceClassification(transformers.BertConfig(**{**folders.SIZES, **fields}))
    folders.save(teacher, tmp_path / "teacher")
    with pytest.raises(CompressorError) as caught:
        run(inputs, tmp_path / "out", teacher=tmp_path / "teacher")
    assert caught.value.code is code
    assert caught.value.details["field"] == "teacher"
    assert not (tmp_path / "out").exists()


def test_a_teacher_with_other_tokens_is_refused(inputs: Path, tmp_path: Path) -> None:
    folders.save(folders.bert(), tmp_path / "teacher")
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace('"film"', '"movie"'))
    with pytest.raises(CompressorError) as caught:
        run(inputs, tmp_path / "out", teacher=tmp_path / "teacher")
    assert caught.value.code is ErrorCode.FILE_MISMATCH


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"data": None}, "distill"),
        ({"macs": None, "precision": "auto"}, "distill"),
        ({"distill": False}, "distill_steps"),
        ({"quantized_share": 0.2}, "quantized_share"),
    ],
)
def test_distillation_needs_rows_a_plan_and_its_flag(
    fields: dict[str, Any], named: str, inputs: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        distilled_recipe(inputs, tmp_path / "out", **fields)
    assert caught.value.details["field"] == named


@pytest.mark.zoo
@pytest.mark.parametrize("keeps", [False, True])
def test_further_rows_are_those_of_a_run_without_an_interruption(inputs: Path, tmp_path: Path, keeps: bool) -> None:
    fields = {"teacher_outputs": tmp_path / "teacher"} if keeps else {}
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(
            distilled_recipe(inputs, tmp_path / "out", **fields),
            RecordingListener("training on the outputs", interrupt),
        )
    run(inputs, tmp_path / "out", **fields)
    run(inputs, tmp_path / "whole", **fields)
    resumed, whole = (weights(tmp_path / name) for name in ("out", "whole"))
    assert have_same_weights(resumed, whole)


@pytest.mark.parametrize("differs", [False, True])
def test_tables_of_the_teacher_are_not_trained(differs: bool, inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "model", tmp_path / "teacher")
    teacher = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "teacher")
    if differs:
        teacher.get_input_embeddings().weight.data[-1] += 0.1
        teacher.save_pretrained(tmp_path / "teacher")
    learned = learn(distilled_recipe(inputs, tmp_path / "out", teacher=tmp_path / "teacher"))
    before, (name,) = weights(inputs / "model"), [name for name in learned.weights if "word_embeddings" in name]
    assert NoteCode.DISTILLED in learned.codes
    assert torch.equal(before[name], learned.weights[name]) != differs


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_a_head_shares_is_trained(tied: bool) -> None:
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=20, tie_word_embeddings=tied)
    model = transformers.GPT2LMHeadModel(config)
    table = model.get_input_embeddings().weight
    assert (model.lm_head.weight is table) == tied
    assert [each is table for each in distill._shared_tables(model, copy.deepcopy(model))] == [True] * (not tied)


@needs_vnni
@pytest.mark.zoo
def test_the_last_steps_may_round_as_an_int8_engine_does(inputs: Path, tmp_path: Path) -> None:
    report = run(inputs, tmp_path / "out", target="openvino", precision="int8", quantized_share=0.5)
    assert {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN} & {note.code for note in report.notes}
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path / "out").values())


def test_rows_without_the_columns_are_refused(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("words\na\n")
    with pytest.raises(CompressorError) as caught:
        run(inputs, tmp_path / "out", data=str(tmp_path / "train.tsv"), eval_data=str(inputs / "rows.tsv"))
    assert caught.value.code is ErrorCode.COLUMN_MISSING
    assert not (tmp_path / "out").exists()


def test_a_distilled_plan_is_applied_to_a_graph_of_another_exporter(
    inputs: Path, tmp_path: Path, distilled: tuple[Path, Report], capfd: pytest.CaptureFixture[str]
) -> None:
    """Every parameter was trained, so that all are known by their original values and replaced."""
    (out, _), folder, graph = distilled, load(inputs / "model"), tmp_path / "foreign.onnx"
    example = dict(example_inputs(folder, 3, 6))
    trace(folder.model, example, graph, opset=17, attention="eager")
    result = compress(capfd, "apply", graph, "--plan", out / "plan.json", "-o", tmp_path / "small.onnx", "--json")
    assert result.code == 0, result.err
    plan, trained, small = Plan.load(out / "plan.json"), load(out).model, ir.load(tmp_path / "small.onnx")
    original = dict(folder.model.named_parameters())
    changed = {name for name, record in plan.weights.items() if record.is_changed}
    assert changed >= {name for name, weight in trained.named_parameters() if not torch.equal(weight, original[name])}
    assert set(result.json["transferred"]) == changed
    with torch.no_grad(), compressor.gated(trained, plan, attention="eager"):
        expected = trained(**example).logits.numpy()
    assert error(run_graph(small, feeds(example, small)), [expected]) <= 1e-5


@pytest.mark.parametrize(
    ("precision", "engine", "rounded"),
    [
        ("auto", "openvino bf16", "bf16"),
        ("auto", "openvino int8 portable, where faster", "int8"),
        ("auto", "ort fp32", ""),
        ("auto", "", "int8"),
        ("bf16", "", "bf16"),
        ("int8", "", "int8"),
    ],
)
def test_weights_round_to_the_precision_of_the_engine(precision: str, engine: str, rounded: str) -> None:
    section: Any = SimpleNamespace(precision=precision)
    selected: Any = SimpleNamespace(engine=engine)
    assert rounded_precision(Distill(quantized_share=0.5), section, selected) == rounded
    assert rounded_precision(Distill(), section, selected) == ""
