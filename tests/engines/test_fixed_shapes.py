"""The graphs of an output folder are proven at fixed shapes of one row, in every runtime that may read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.engines.prove import Case, prove_graphs
from compressor.errors import ErrorCode, InputError
from compressor.progress import RunLog
from compressor.quantization import quantize_graph
from compressor.results import NoteCode, ProofStage
from compressor.targets import target
from compressor.targets.base import Feeds, Target
from compressor.workdir import QUANTIZED_GRAPH
from graph_passes import find_attention, load, save
from graph_passes.passes import CleanUp, DropUnreadPositions, TransposeSingleQuery
from tests.quantization.graphs import CASES, calibration_rows, needs_nncf
from tests.run.listeners import RecordingListener
from tests.targets.graphs import pruned

pytestmark = [needs_nncf, pytest.mark.zoo]
RUNTIMES = ("ort", "openvino")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs of a BERT whose last attention has one query, in floats and in int8."""
    out = tmp_path_factory.mktemp("out")
    model = load(pruned("bert").shrunk)
    assert DropUnreadPositions()(model).modified
    CleanUp()(model)
    save(model, out / "model.onnx")
    quantize_graph(out / "model.onnx", calibration_rows(), out / QUANTIZED_GRAPH)
    return out


def test_the_portable_graph_has_no_attention_of_one_query(folder: Path) -> None:
    in_floats, portable = load(folder / "model.onnx"), load(folder / QUANTIZED_GRAPH)
    assert len(find_attention(portable)) == len(find_attention(in_floats)) - 1
    assert len(TransposeSingleQuery()(in_floats).report) == 1
    assert TransposeSingleQuery()(portable).report == ()


def test_graphs_are_proven_in_every_installed_runtime(folder: Path) -> None:
    listener = RecordingListener()
    proofs = prove_graphs(folder, CASES, RunLog(listener))
    assert {proof.stage for proof in proofs} == {ProofStage.FIXED_SHAPE}
    assert all(proof.holds for proof in proofs)
    assert listener.codes == []
    cases = [case for proof in proofs for case in proof.cases]
    assert all("batch 1" in case for case in cases)
    for name in ("model.onnx", QUANTIZED_GRAPH):
        for runtime in RUNTIMES:
            assert any(case.startswith(f"{name} in {target(runtime).title}") for case in cases)


def test_a_dense_graph_that_is_saved_is_proven_too(folder: Path) -> None:
    saved = {"dense.onnx": folder / "model.onnx"}
    proofs = prove_graphs(folder, CASES, RunLog(RecordingListener()), saved)
    assert sum(proof.variant == "dense" for proof in proofs) == len(RUNTIMES)


def wrong(self: Target, onnx: Path, feeds: Feeds, **_: Any) -> dict[str, np.ndarray]:
    """Outputs of a runtime that computes another function."""
    return {name: -output for name, output in target("ort").run_fixed(onnx, feeds).items()}


def unable(self: Target, onnx: Path, feeds: Feeds, **_: Any) -> dict[str, np.ndarray]:
    """A runtime that lacks an operator of the graph."""
    raise InputError("no such operator", code=ErrorCode.RUNTIME_FAILED)


@pytest.mark.parametrize("run_fixed", [wrong, unable])
def test_a_runtime_that_computes_something_else_is_named(
    run_fixed: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(target("openvino")), "run_fixed", run_fixed)
    listener = RecordingListener()
    proofs = prove_graphs(folder, CASES, RunLog(listener))
    assert listener.codes == [NoteCode.GRAPH_WRONG_IN_RUNTIME] * 2
    assert len(proofs) == 2
    assert not any(target("openvino").title in case for proof in proofs for case in proof.cases)


def test_cases_of_several_rows_are_not_fixed(folder: Path) -> None:
    several: list[Case] = [case for case in CASES if next(iter(case.feeds.values())).shape[0] > 1]
    assert several
    assert prove_graphs(folder, several, RunLog(RecordingListener())) == ()


def test_a_runtime_that_reads_no_graph_itself_builds_an_engine_for_the_batch(folder: Path) -> None:
    case, runtime = CASES[0], target("openvino")
    outputs = Target.run_fixed(runtime, folder / "model.onnx", case.feeds)
    expected = runtime.run_fixed(folder / "model.onnx", case.feeds)
    assert outputs.keys() == expected.keys()
    assert all(np.allclose(outputs[name], expected[name], atol=1e-5) for name in expected)
