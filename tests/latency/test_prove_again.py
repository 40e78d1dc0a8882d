"""An engine of a run that was proven on another machine is proven again before it is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.config.check import CheckRequest
from compressor.environment import INT8_INSTRUCTIONS, machine
from compressor.errors import ErrorCode, MismatchError
from compressor.latency import check
from compressor.latency.prove_again import changes_since
from compressor.quantization import quantize_graph
from compressor.report import JSON_NAME
from compressor.results import NoteCode, ProofStage
from compressor.targets import target
from compressor.targets.trial_inputs import random_feeds
from graph_passes import load, save
from tests.latency.notes import NoteListener
from tests.latency.timers import EQUAL_TIMES
from tests.serving.outputs import report
from tests.targets.cpu import needs_vnni
from tests.targets.graphs import pruned

_NAMES = st.sampled_from(["none", "avx_vnni", "avx512_vnni", "amx_int8, avx512_vnni"])


@given(_NAMES, _NAMES, st.sampled_from(["a 1", "a 2"]), st.sampled_from(["CPU", "NVIDIA"]))
def test_instruction_set_and_runtime_are_compared(there: str, here: str, runtime: str, provider: str) -> None:
    proven = report(machine={INT8_INSTRUCTIONS: there}, session={"runtime": "a 1"})
    session = {"runtime": runtime, "provider": provider}
    changes = list(changes_since(proven, {INT8_INSTRUCTIONS: here}, session))
    assert len(changes) == (runtime != "a 1") + (there != here and provider == "CPU")
    assert list(changes_since(report(), {INT8_INSTRUCTIONS: here}, session)) == [], "reports of earlier versions"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run in int8 for OpenVINO, without its report."""
    pytest.importorskip("nncf")
    save(load(pruned("bert").shrunk), tmp_path / "model.onnx")
    rows = [random_feeds(load(tmp_path / "model.onnx"), 1, 8, seed=seed) for seed in range(4)]
    quantize_graph(tmp_path / "model.onnx", rows, tmp_path / "model.int8.onnx")
    target("openvino").build(tmp_path / "model.int8.onnx", tmp_path / "engine.xml", precision="int8", threads=1)
    return tmp_path


def write_report(folder: Path, instructions: str, runtime: str, error: float = 0.0) -> None:
    """Write the report of an engine that was proven on a machine with these instructions and this runtime."""
    proof = {"variant": "compressed", "error": error, "tolerance": 1e-2, "cases": ("batch 1",)}
    stages = (ProofStage.PRODUCTS, ProofStage.BUILD_INT8)
    fields: dict[str, Any] = {
        "machine": {INT8_INSTRUCTIONS: instructions},
        "recipe": {"target": "openvino", "precision": "int8"},
        "session": {"runtime": runtime, "provider": "CPU"},
        "proofs": [{"stage": stage, **proof} for stage in stages],
    }
    quantized = report(sizes=((1, 8),), target="openvino", precision="int8", **fields)
    quantized = quantized.model_copy(
        update={"compressed": quantized.compressed.model_copy(update={"file": "engine.xml"})}
    )
    (folder / JSON_NAME).write_text(quantized.model_dump_json())


@needs_vnni
def test_int8_proofs_run_again_on_another_machine(folder: Path) -> None:
    path = folder / "engine.xml"
    request = CheckRequest(model=path, baseline=path, seq=8, threads=1)
    runtime = str(target("openvino").load(path).session["runtime"])
    for instructions, version, expected in (
        (machine()[INT8_INSTRUCTIONS], runtime, []),
        ("none", runtime, [ProofStage.PRODUCTS, ProofStage.BUILD_INT8]),
        (machine()[INT8_INSTRUCTIONS], "openvino 2020.1", [ProofStage.PRODUCTS, ProofStage.BUILD_INT8]),
    ):
        write_report(folder, instructions, version)
        listener = NoteListener()
        verdict = check(request, listener, timer=EQUAL_TIMES)
        assert [proof.stage for proof in verdict.proofs] == expected
        assert (NoteCode.PROVEN_ELSEWHERE in listener.codes) == bool(expected)
        assert any(line.startswith("proofs") for line in verdict.lines()) == bool(expected)
    (folder / "model.int8.onnx").unlink()
    listener = NoteListener()
    assert check(request.model_copy(update={"expect": "any"}), listener, timer=EQUAL_TIMES).proofs == ()
    assert NoteCode.PROVEN_ELSEWHERE in listener.codes, "the proofs need a file that is missing"


@needs_vnni
def test_an_engine_that_computes_something_else_here_is_not_timed(folder: Path, tmp_path: Path) -> None:
    rows = [{name: array + 0 for name, array in random_feeds(load(folder / "model.onnx"), 1, 8).items()}]
    other = folder / "other.onnx"
    model = load(folder / "model.onnx")
    weights = next(value for value in model.graph.initializers.values() if len(value.shape or ()) == 2)
    assert weights.const_value is not None
    weights.const_value = ir.Tensor(-weights.const_value.numpy(), name=weights.name)
    save(model, other)
    quantize_graph(other, rows, folder / "other.int8.onnx")
    target("openvino").build(folder / "other.int8.onnx", folder / "engine.xml", precision="int8", threads=1)
    write_report(folder, "none", "openvino 2020.1")
    path = folder / "engine.xml"
    with pytest.raises(MismatchError) as error:
        check(CheckRequest(model=path, baseline=path, seq=8, threads=1, expect="any"), timer=EQUAL_TIMES)
    assert (error.value.code, error.value.details["stage"]) == (ErrorCode.NUMBERS_DIFFER, ProofStage.BUILD_INT8)
