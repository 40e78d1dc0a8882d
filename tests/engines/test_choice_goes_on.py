"""An engine that cannot be quantized, built or scored is a row with its reason, and the next is tried."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor.engines import choose as choosing
from compressor.engines import trials
from compressor.engines.choices import Choice
from compressor.engines.choose import fastest
from compressor.engines.score import EvaluationScorer
from compressor.engines.trials import Trial
from compressor.errors import CompressorError, ErrorCode, InputError, MismatchError, TargetMissingError
from compressor.results import Candidate, NoteCode, Report
from compressor.run.rebuild import rebuild
from compressor.targets.onnxruntime import engine as ort_engine
from compressor.workdir import QUANTIZED_GRAPH
from tests.faults import fails_with
from tests.quantization.graphs import needs_nncf
from tests.run.listeners import RecordingListener
from tests.run.runs import learning_recipe

pytestmark = needs_nncf
FLOATS = {"allow_float_products": True}
"""ONNX Runtime computes some products of the portable graph of a tiny model in floats."""
REASON = "its weights exceed 2 GB; use --precision fp32"


def failing(*_: Any, **__: Any) -> Any:
    raise InputError(REASON, code=ErrorCode.RUNTIME_FAILED)


def run_int8(inputs: Path, out: Path, **fields: Any) -> Report:
    recipe = learning_recipe(inputs, out, **{"keep": "100%", "precision": "int8", **FLOATS, **fields})
    return compressor.compress(recipe, RecordingListener())


def quantize_in_part(graph: Path, rows: object, out: Path, **_: Any) -> Any:
    """A quantizer that writes a graph, and then fails."""
    for name in (out.name, f"{out.name}.data"):
        out.with_name(name).write_bytes(b"a part")
    failing()


@pytest.mark.zoo
def test_the_dynamic_engine_is_delivered_where_the_graph_cannot_be_quantized(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.engines.quantize.quantize_without_ruined", quantize_in_part)
    report = run_int8(inputs, tmp_path / "out", target="ort")
    portable, dynamic = report.candidates
    assert (portable.label, portable.failure, portable.holds) == ("ort int8 portable", REASON, False)
    assert (dynamic.label, dynamic.failure, dynamic.chosen) == ("ort int8 dynamic", "", True)
    assert report.precision == "int8"
    assert report.compressed.quantized is not None
    assert all(proof.holds for proof in report.proofs)
    assert not list((tmp_path / "out").glob(f"{QUANTIZED_GRAPH}*"))


def test_a_run_ends_where_no_engine_is_left(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "quantize_as", failing)
    with fails_with(ErrorCode.RUNTIME_FAILED) as caught:
        run_int8(inputs, tmp_path / "out", target="openvino")
    assert isinstance(caught.value, InputError)
    assert REASON in str(caught.value)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that leaves a file and fails at its first call."""
    calls: list[Any] = []

    def call(graph: Any, *args: Any, **settings: Any) -> Any:
        calls.append(graph)
        if len(calls) == 1:
            (graph.path.parent / "left.over").write_text("")
            failing()
        return function(graph, *args, **settings)

    return call


@pytest.fixture(scope="module")
def second(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose best engine cannot be built a second time."""
    out = tmp_path_factory.mktemp("second") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(choosing, "build_variant", once(choosing.build_variant))
        run_int8(inputs, out, target="ort")
    return out


@pytest.mark.zoo
def test_the_next_engine_is_delivered_where_the_best_cannot_be_built_again(second: Path) -> None:
    report = compressor.report.load(second)
    (chosen,) = (row for row in report.candidates if row.chosen)
    (failed,) = (row for row in report.candidates if row.failure)
    assert chosen.label == report.delivered
    assert failed.failure == REASON
    assert not (second / "left.over").exists()


@pytest.mark.zoo
@pytest.mark.parametrize("label", ["ort int8 dynamic", "ort int8 portable"])
def test_an_engine_that_cannot_be_scored_is_a_row(
    label: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = EvaluationScorer.measure

    def measure_others(self: EvaluationScorer, variant: Any, name: str) -> Any:
        return failing() if name == label else measure(self, variant, name)

    monkeypatch.setattr(EvaluationScorer, "measure", measure_others)
    report = run_int8(inputs, tmp_path / "out", target="ort")
    assert {row.label: row.failure for row in report.candidates}[label] == REASON
    assert [row.label for row in report.candidates if row.chosen] == [
        row.label for row in report.candidates if row.label != label
    ]


@pytest.mark.zoo
def test_a_finished_run_is_built_in_int8_in_the_other_way(
    second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(second, tmp_path / "out")
    monkeypatch.setattr(ort_engine, "quantize_dynamically", failing)
    listener = RecordingListener()
    report = rebuild(tmp_path / "out", {"target": "ort", "precision": "int8"}, listener)
    assert report.precision == "int8"
    assert report.compressed.quantized is not None
    rebuilt = NoteCode.ENGINE_CHOSEN in listener.codes
    assert rebuilt == (compressor.report.load(second).delivered == "ort int8 dynamic")


MISSING = TargetMissingError("no device", code=ErrorCode.DEVICE_MISSING)
BROKEN = MismatchError("numbers differ", code=ErrorCode.NUMBERS_DIFFER)


@pytest.mark.parametrize(
    ("errors", "kind", "code"),
    [
        ([MISSING, MISSING], TargetMissingError, ErrorCode.UNSUPPORTED),
        ([MISSING, BROKEN], MismatchError, ErrorCode.NUMBERS_DIFFER),
    ],
)
def test_the_error_is_of_the_kind_of_the_reasons(
    errors: list[CompressorError], kind: type[CompressorError], code: ErrorCode
) -> None:
    choices = [Choice(learning_recipe(Path("in"), Path("out"), target=name).engine) for name in ("openvino", "ort")]
    trials = [
        Trial(choice, Candidate(target=choice.config.target, precision="fp32")).failed(error)
        for choice, error in zip(choices, errors, strict=True)
    ]
    with pytest.raises(kind) as caught:
        fastest(trials, higher_is_better=True)
    assert caught.value.code is code
    assert all(str(error) in str(caught.value) for error in errors)
