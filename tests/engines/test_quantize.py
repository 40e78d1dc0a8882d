"""A run for a target in 8 bits that this machine lacks leaves the quantized graph to build its engine from."""

from __future__ import annotations

from pathlib import Path

import pytest

import compressor
from compressor import report as reports
from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.results import NoteCode
from compressor.run.rebuild import load_run, rebuild
from compressor.targets import Precision
from compressor.targets.graph_facts import graph_digest
from compressor.workdir import FP8_GRAPH, QUANTIZED_GRAPHS, SYMMETRIC_GRAPH
from graph_passes import load
from graph_passes.quantizers.faults import quantizer_faults
from tests.faults import fails_with
from tests.run.listeners import RecordingListener
from tests.run.runs import learning_recipe


@pytest.mark.parametrize(
    ("precision", "file"), [("int8", SYMMETRIC_GRAPH), pytest.param("fp8", FP8_GRAPH, marks=pytest.mark.zoo)]
)
def test_the_symmetric_graph_is_in_the_folder(precision: Precision, file: str, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = learning_recipe(inputs, out, keep=None, target="trt", precision=precision, calibration_rows=8)
    report = compressor.compress(recipe)
    assert report.missing is not None
    assert (report.target, report.precision, report.candidates) == ("ort", "fp32", ())
    assert NoteCode.QUANTIZED_FOR_TARGET in [note.code for note in report.notes]
    assert [name for name in QUANTIZED_GRAPHS if (out / name).is_file()] == [file]
    assert reports.load(out).graphs[file] == graph_digest(out / file)
    assert quantizer_faults(load(out / file)) == []
    run = load_run(out, {})
    assert (run.recipe.engine.target, run.recipe.engine.precision) == ("trt", precision)
    with pytest.raises(TargetMissingError):
        rebuild(out, {}, RecordingListener())
    (out / file).write_bytes((out / "model.onnx").read_bytes())
    with fails_with(ErrorCode.FILE_MISMATCH, InputError, path=out / file):
        load_run(out, {})
    (out / file).unlink()
    with fails_with(ErrorCode.FILE_MISSING, InputError, path=out / file):
        load_run(out, {})
