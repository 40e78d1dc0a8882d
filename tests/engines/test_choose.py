"""Runs in int8: every allowed engine is tried, and the fastest that keeps the metric is delivered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import compressor
from compressor.config.run import Recipe, definite_fields
from compressor.config.sections import EngineConfig
from compressor.config.unused_flags import unused_field_notes
from compressor.engines.choices import Choice, choices
from compressor.engines.choose import _with_equal_answers
from compressor.engines.score import ScoredAnswers
from compressor.engines.trials import Trial
from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from compressor.quantization.portable import float_model
from compressor.report import load as load_report
from compressor.results import MetricUnit, MissingTarget, NoteCode, ProofStage, Report, deciding_scores
from compressor.targets import Precision, target
from compressor.targets.graph_facts import float_matmuls, quantized_matmuls, weight_matmuls
from compressor.targets.machine import usable_cores
from graph_passes import load
from tests import folders
from tests.engines import saturating_process
from tests.quantization.graphs import needs_nncf
from tests.report import reports
from tests.run.listeners import RecordingListener
from tests.run.runs import NUMBERS, learning_recipe
from tests.targets.cpu import needs_vnni

pytestmark = needs_nncf


@dataclass(frozen=True)
class Int8Run:
    """The output folder of a run that tried every engine, its report, and its listener."""

    out: Path
    report: Report
    listener: RecordingListener


def int8_recipe(inputs: Path, out: Path, **fields: object) -> Recipe:
    """A short run that keeps every head."""
    return learning_recipe(inputs, out, **{"keep": "100%", "target": "auto", "precision": "auto", **fields})


@pytest.fixture(scope="module")
def int8_run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Int8Run:
    out = tmp_path_factory.mktemp("int8") / "out"
    listener = RecordingListener()
    return Int8Run(out, compressor.compress(int8_recipe(inputs, out, max_drop=0.99, threads=None), listener), listener)


def test_every_allowed_engine_is_tried() -> None:
    engine = Recipe(model=Path("model"), data="rows.tsv", target="auto", precision="auto").engine
    assert [choice.label for choice in choices(engine)] == [
        "ort int8 dynamic, where faster",
        "openvino int8 portable, where faster",
        "trt int8 symmetric",
        "trt fp8 symmetric",
        "ort int8 portable, where faster",
        "ort fp32",
        "openvino fp32",
        "openvino bf16",
        "trt fp32",
        "trt fp16",
    ]
    alone = Recipe(model=Path("model"), data="rows.tsv", target="openvino", precision="int8").engine
    assert [choice.label for choice in choices(alone)] == ["openvino int8 portable"]
    assert alone.reference.precision == "fp32"
    assert alone.reference.target == "openvino"
    assert engine.reference.target == "ort"


def test_the_table_holds_every_engine_and_one_is_chosen(int8_run: Int8Run) -> None:
    table = int8_run.report.candidates
    engine = Recipe(model=Path("model"), data="rows.tsv", target="auto", precision="auto").engine
    # Beside an engine that mixes int8 and floats, the one in int8 alone is tried.
    assert [row.label for row in table if "int8" not in row.label or "," in row.label or row.target == "trt"] == [
        choice.label for choice in choices(engine)
    ]
    (best,) = (row for row in table if row.chosen)
    built = [row for row in table if not row.failure]
    assert best.speed == max(row.speed or 0.0 for row in built if row.holds)
    assert (int8_run.report.target, int8_run.report.precision) == (best.target, best.precision)
    (deciding,) = deciding_scores(int8_run.report.scores)
    assert (deciding.split, deciding.compressed, deciding.difference) == ("eval", best.metric, best.difference)
    for row in built:
        assert row.metric is not None
        assert row.agreement is not None
        assert 0 <= row.agreement <= 1
        assert row.milliseconds
        assert row.file_bytes
        assert row.unit is MetricUnit.POINTS
        assert row.holds == (row.peak_memory_bytes is not None)
        assert row.proofs
        assert all(proof.holds for proof in row.proofs)
        if row.precision == "int8":
            assert row.quantized is not None
            assert row.quantized.executed >= row.quantized.requested
    assert all(row.failure for row in table if row.target == "trt")
    assert NoteCode.ENGINE_CHOSEN in int8_run.listener.codes
    assert NoteCode.FEW_CALIBRATION_ROWS in int8_run.listener.codes
    assert not any("learning" in stage for stage in int8_run.listener.stages)


def test_throughput_is_reported_at_every_size(int8_run: Int8Run) -> None:
    sizes = [(row.batch, row.seq) for row in int8_run.report.speeds]
    assert [(row.batch, row.seq) for row in int8_run.report.throughputs] == (sizes if usable_cores() > 1 else [])
    for row in int8_run.report.throughputs:
        assert row.callers == usable_cores()
        assert min(row.dense.one_caller, row.dense.all_callers) > 0
        assert min(row.compressed.one_caller, row.compressed.all_callers) > 0


@pytest.mark.zoo
def test_an_int8_run_is_proven_down_to_its_products(inputs: Path, tmp_path: Path) -> None:
    recipe = int8_recipe(inputs, tmp_path / "out", target="openvino", precision="int8", shapes=("1x8", "4x16"))
    report = compressor.compress(recipe)
    stages = [proof.stage for proof in report.proofs if proof.variant == "compressed"]
    built = [ProofStage.EXPORT, ProofStage.SHRINK, ProofStage.PRODUCTS, ProofStage.BUILD_INT8]
    assert stages == [*built, *[ProofStage.FIXED_SHAPE] * 4], "two graphs, in two runtimes"
    assert all(proof.holds for proof in report.proofs)
    built_proof = next(proof for proof in report.proofs if proof.stage is ProofStage.BUILD_INT8)
    assert any("batch 4, length 16" in case for case in built_proof.cases)
    assert report.dense.quantized is None
    assert report.compressed.quantized is not None
    assert all(row.void is None for row in report.speeds)
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(stored["graphs"]) == {"model.onnx", "model.int8.onnx"}
    engine = target("openvino").load(tmp_path / "out" / "engine.xml")
    assert engine.precision == "int8"
    assert engine.session["shapes"] == ["1x8", "4x16"]


@pytest.mark.zoo
def test_the_engine_is_chosen_before_units_are_removed_for_it(answered: Path, tmp_path: Path) -> None:
    recipe = int8_recipe(answered, tmp_path / "out", keep=None, target="openvino", max_drop=0.99)
    assert recipe.prunes
    report = compressor.compress(recipe)
    assert list(dict.fromkeys(row.precision for row in report.candidates)) == ["int8", "fp32", "bf16"]
    (best,) = (row for row in report.candidates if row.chosen)
    assert (report.target, report.precision) == (best.target, best.precision)
    assert sum(row.speed_pruned is not None for row in report.candidates) != 1
    assert best.speed_pruned == max((row.speed_pruned for row in report.candidates if row.speed_pruned), default=None)


@pytest.mark.zoo
def test_an_int8_engine_is_built_again_from_the_folder(int8_run: Int8Run, tmp_path: Path) -> None:
    import shutil

    from compressor.run.rebuild import rebuild

    out = tmp_path / "out"
    shutil.copytree(int8_run.out, out)
    for name in ("openvino", "ort"):
        report = rebuild(out, {"target": name, "precision": "int8"}, RecordingListener())
        assert (report.target, report.precision) == (name, "int8")
        assert report.candidates == ()
        assert report.compressed.quantized is not None
        assert all(proof.holds for proof in report.proofs)
    again = rebuild(out, {}, RecordingListener())
    assert (again.target, again.precision) == ("ort", "int8")
    (out / "model.int8.onnx").write_bytes((out / "model.onnx").read_bytes())
    with pytest.raises(InputError) as caught:
        rebuild(out, {"target": "openvino", "precision": "int8"}, RecordingListener())
    assert caught.value.code is ErrorCode.FILE_MISMATCH
    (out / "model.int8.onnx").unlink()
    with pytest.raises(InputError) as caught:
        rebuild(out, {"target": "openvino", "precision": "int8"}, RecordingListener())
    assert caught.value.code is ErrorCode.FILE_MISSING


@pytest.mark.zoo
@needs_vnni
def test_products_that_fail_their_proof_return_to_floats(inputs: Path, tmp_path: Path) -> None:
    """In a process whose int8 products have 16-bit sums, which saturate."""
    subprocess.run(
        [sys.executable, "-m", saturating_process.__name__, inputs, tmp_path / "out"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        check=True,
    )
    report = load_report(tmp_path / "out")
    (candidate,) = report.candidates
    assert candidate.chosen
    assert candidate.in_float
    assert all(proof.holds and not proof.failing for proof in report.proofs)
    assert NoteCode.PRODUCTS_IN_FLOAT in {note.code for note in report.notes}
    delivered = load(tmp_path / "out" / "model.int8.onnx")
    assert {node.name for node in float_matmuls(delivered)} >= set(candidate.in_float)
    assert report.compressed.quantized is not None
    assert len(quantized_matmuls(delivered)) == report.compressed.quantized.executed > 0


def test_int8_without_rows_ends_before_anything_is_built(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        compressor.compress(int8_recipe(inputs, tmp_path / "out", keep=None, data=None, precision="int8"))
    assert caught.value.code is ErrorCode.MISSING_VALUE
    assert not (tmp_path / "out").exists()


@pytest.mark.zoo
def test_without_rows_the_engines_in_floats_are_tried(inputs: Path, tmp_path: Path) -> None:
    fields = {"target": "openvino", "precision": "auto", "seq": (8,), "batch": (1,), "seconds": 0.01, "threads": 1}
    report = compressor.compress(Recipe(model=inputs / "model", out=tmp_path / "out", **fields))
    assert [row.precision for row in report.candidates] == ["fp32", "bf16"]
    (best,) = (row for row in report.candidates if row.chosen)
    assert best.holds
    assert best.proofs
    assert all(bool(row.failure) != bool(row.speed) for row in report.candidates)


@pytest.mark.parametrize(("answers", "holds"), [((1, 0, 1), True), ((1, 0, 0), False)])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_an_engine_in_bfloat16_has_the_answers_of_fp32(answers: tuple[int, ...], holds: bool, in_fp32: bool) -> None:
    def trial(precision: Precision, ids: tuple[int, ...]) -> Trial:
        choice = Choice(EngineConfig(target="openvino", precision=precision))
        return Trial(choice, choice.row, scored=ScoredAnswers(np.zeros((3, 1)), np.array(ids)))

    reference = ScoredAnswers(np.zeros((3, 1)), np.array((1, 0, 1)))
    whole = SimpleNamespace(plan=SimpleNamespace(drops_any=False))
    trials: Any = SimpleNamespace(graph=whole, scorer=SimpleNamespace(dense_answers=reference))
    built = [*([trial("fp32", (1, 0, 1))] if in_fp32 else []), trial("bf16", answers), trial("int8", (0, 0, 0))]
    *_, rounded, quantized = _with_equal_answers(trials, built)
    assert rounded.candidate.holds == holds
    assert quantized.candidate.holds, "the loss of int8 is bounded by --max-drop alone"


def constant_factor(node: ir.Node) -> np.ndarray:
    """The constant second factor `[inputs, outputs]` of a product."""
    value = node.inputs[1]
    assert value is not None
    assert value.const_value is not None
    return value.const_value.numpy()


@needs_vnni
@pytest.mark.zoo
def test_products_return_to_floats_where_int8_loses_too_much(tmp_path: Path) -> None:
    rows = "\n".join(["text", *(f"the {word} film is {word} and {word}" for word in NUMBERS * 8), ""])
    (tmp_path / "rows.tsv").write_text(rows)
    torch.manual_seed(2)
    folders.save(folders.gpt2(), tmp_path / "model")
    timing = {"batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1}
    fields = {"keep": "100%", "target": "openvino", "precision": "int8", "max_drop": 0.0025, **timing}
    report = compressor.compress(
        Recipe(model=tmp_path / "model", data=str(tmp_path / "rows.tsv"), out=tmp_path / "out", **fields)
    )
    first, returned = report.candidates
    assert not first.holds
    assert returned.holds
    assert returned.chosen
    assert returned.in_float
    assert report.compressed.quantized is not None
    delivered = load(tmp_path / "out" / "model.int8.onnx")
    assert 0 < len(report.compressed.quantized.float_in_graph) == len(float_matmuls(delivered))
    assert len(quantized_matmuls(delivered)) == report.compressed.quantized.executed
    weights = {
        node.name: constant_factor(node) for node in weight_matmuls(float_model(tmp_path / "out" / "model.onnx"))
    }
    for node in float_matmuls(delivered):
        # Smoothing moves a scale of each input from the activations into the weights; nothing is rounded.
        scales = constant_factor(node) / weights[node.name]
        np.testing.assert_allclose(
            scales, np.broadcast_to(np.median(scales, 1, keepdims=True), scales.shape), rtol=1e-4
        )


def test_a_run_for_a_missing_target_is_built_in_the_precision_that_it_named() -> None:
    missing = MissingTarget(target="trt", reason="no GPU")
    fallen_back = reports.report().model_copy(
        update={"recipe": {"target": "trt", "precision": "fp16"}, "missing": missing}
    )
    assert definite_fields(fallen_back) == {"target": "trt", "precision": "fp16"}
    chosen = fallen_back.model_copy(
        update={"recipe": {"target": "auto", "precision": "auto"}, "target": "openvino", "precision": "int8"}
    )
    assert definite_fields(chosen) == {"target": "openvino", "precision": "int8"}


def test_fields_of_any_engine_have_an_effect_where_it_is_chosen() -> None:
    fields = {"model": Path("model"), "data": "rows.tsv", "shapes": ("1x8",), "calibration_rows": 9}
    chosen = Recipe(target="auto", precision="auto", **fields)
    assert not list(unused_field_notes(chosen, None))
    (shapes, rows) = unused_field_notes(Recipe(target="ort", keep=1, **fields), None)
    assert ("--shapes" in shapes.text, "--calibration-rows" in rows.text) == (True, True)


def test_auto_is_for_runs_only(int8_run: Int8Run) -> None:
    from compressor.run.rebuild import rebuild

    for field in ("target", "precision"):
        with pytest.raises(CompressorError) as caught:
            rebuild(int8_run.out, {field: "auto"}, RecordingListener())
        assert caught.value.details["field"] == field


@pytest.mark.zoo
def test_positions_that_nothing_reads_are_computed_on_request(inputs: Path, tmp_path: Path) -> None:
    listener = RecordingListener()
    fields = {"data": None, "keep": None, "batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1}
    model = inputs / "model"
    whole = compressor.compress(Recipe(model=model, out=tmp_path / "whole", keep_unread_positions=True, **fields))
    thinned = compressor.compress(Recipe(model=model, out=tmp_path / "thinned", **fields), listener)
    assert NoteCode.POSITIONS_DROPPED in listener.codes
    assert NoteCode.POSITIONS_DROPPED not in {note.code for note in whole.notes}
    assert thinned.compressed.macs is not None
    assert whole.compressed.macs is not None
    assert thinned.compressed.macs < whole.compressed.macs == whole.dense.macs
    assert thinned.speeds_over_rewritten == ()
    feeds = {name: np.ones((2, 7), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    outputs = [target("ort").load(tmp_path / name / "engine.onnx").run(feeds) for name in ("whole", "thinned")]
    for name, output in outputs[0].items():
        np.testing.assert_allclose(outputs[1][name], output, rtol=1e-4, atol=1e-5)
