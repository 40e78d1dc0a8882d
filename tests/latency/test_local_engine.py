"""Engines on this machine: which files are loaded, how they are called, and which proofs are run again."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.config.check import CheckRequest
from compressor.environment import INT8_INSTRUCTIONS, machine
from compressor.errors import CompressorError, ErrorCode, InputError, MismatchError, UsageError
from compressor.latency import check
from compressor.latency.local_engine import changes_since, library_errors, load_engine
from compressor.quantization import quantize_graph
from compressor.report import JSON_NAME, write
from compressor.results import NoteCode, ProofStage
from compressor.targets import target
from compressor.targets.cuda import Device
from compressor.targets.tensor_specs import FREE, TensorSpec
from compressor.targets.trial_inputs import random_feeds
from graph_passes import load, save
from graph_passes.errors import GraphError
from tests.latency.graphs import cast_graph, rounding_graph, softmax_graph, text_model
from tests.latency.notes import NoteListener
from tests.latency.timers import EQUAL_TIMES
from tests.report import reports
from tests.serving.outputs import report
from tests.targets.cpu import needs_vnni
from tests.targets.graphs import parsed, pruned


def test_a_graph_is_checked_against_itself_unoptimized(tmp_path: Path) -> None:
    path = softmax_graph(tmp_path / "model.onnx")
    verdict = check(CheckRequest(model=path, baseline=path), timer=EQUAL_TIMES)
    assert verdict.passed
    assert (verdict.outputs.expected, verdict.outputs.tolerance) == ("its own unoptimized graph", 1e-4)
    assert "CPUExecutionProvider" in verdict.host


def test_a_quantized_graph_is_loaded_as_it_is(tmp_path: Path) -> None:
    body = """
        q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
        i = QuantizeLinear(f, s, n)  w = DequantizeLinear(i, s, n)  y = MatMul(d, w)
    """
    weights = "float s = {0.1}, uint8 z = {128}, int8 n = {0}, float[4, 3] f"
    save(parsed(body, "float[B, 4] x", "float[B, 3] y", weights), path := tmp_path / "model.int8.onnx")
    assert load_engine(path, tmp_path).precision == "int8"
    assert not (tmp_path / "engine.onnx").exists()


def test_the_folder_of_a_run_stands_for_the_engine_that_its_report_names(tmp_path: Path) -> None:
    softmax_graph(tmp_path / "model.onnx")
    engine = softmax_graph(tmp_path / "engine.onnx")
    with pytest.raises(InputError) as error:
        load_engine(tmp_path, tmp_path)
    assert error.value.code is ErrorCode.FILE_MISSING
    written = reports.report()
    compressed = written.compressed.model_copy(update={"file": engine.name})
    write(written.model_copy(update={"compressed": compressed}), tmp_path)
    assert load_engine(tmp_path, tmp_path).name == str(engine)


def test_a_graph_that_differs_from_the_expected_one_is_wrong(tmp_path: Path) -> None:
    right, wrong = softmax_graph(tmp_path / "right.onnx"), softmax_graph(tmp_path / "wrong.onnx", scale=1.5)
    for expect in ("baseline", str(right)):
        with pytest.raises(MismatchError) as error:
            check(CheckRequest(model=wrong, baseline=right, expect=expect), timer=EQUAL_TIMES)
        assert (error.value.code, error.value.details["model"]) == (ErrorCode.OUTPUTS_DIFFER, str(wrong))
    assert check(CheckRequest(model=wrong, baseline=right), timer=EQUAL_TIMES).passed


def test_integers_may_be_narrower_than_those_of_the_other_model(tmp_path: Path) -> None:
    wide, narrow = str(cast_graph(tmp_path / "wide.onnx")), str(cast_graph(tmp_path / "narrow.onnx", "int32"))
    for model, baseline in ((wide, narrow), (narrow, wide)):
        verdict = check(CheckRequest(model=model, baseline=baseline, expect=baseline), timer=EQUAL_TIMES)
        assert (verdict.outputs.expected, verdict.outputs.error) == (baseline, 0.0)


def test_integer_outputs_of_graphs_must_be_equal(tmp_path: Path) -> None:
    model, baseline = rounding_graph(tmp_path / "a.onnx", 29_500.0), rounding_graph(tmp_path / "b.onnx", 30_000.0)
    np.savez(tmp_path / "ones.npz", x=np.ones((2, 4), np.float32))
    request = CheckRequest(model=model, baseline=baseline, inputs=tmp_path / "ones.npz", expect="baseline")
    with pytest.raises(MismatchError) as error:
        check(request, timer=EQUAL_TIMES)
    assert (error.value.code, error.value.details["tolerance"]) == (ErrorCode.OUTPUTS_DIFFER, 0.0)
    assert check(request.model_copy(update={"tolerance": 0.02}), timer=EQUAL_TIMES).passed


def test_both_models_must_have_the_same_inputs(tmp_path: Path) -> None:
    floats = tmp_path / "floats.onnx"
    save(parsed("y = Identity (ids)", "float[B, 4] ids", "float[B, 4] y"), floats)
    graph, ids = softmax_graph(tmp_path / "graph.onnx"), cast_graph(tmp_path / "ids.onnx")
    for model, dtype in ((graph, None), (floats, "float32")):
        with pytest.raises(InputError) as error:
            check(CheckRequest(model=model, baseline=ids), timer=EQUAL_TIMES)
        assert error.value.code is ErrorCode.TENSOR_MISMATCH
        assert (error.value.details["tensor"], error.value.details["dtype"]) == ("ids", dtype)


def test_a_graph_is_checked_on_texts(tmp_path: Path) -> None:
    folder, rows = text_model(tmp_path / "out"), tmp_path / "rows.tsv"
    rows.write_text("text\n" + "the good film\n" * 40)
    path = folder / "model.onnx"
    request = CheckRequest(model=path, baseline=path, inputs=rows, tokenizer=folder, batch=2, seq=8)
    verdict = check(request, timer=EQUAL_TIMES)
    assert (verdict.inputs, verdict.seq) == ("32 rows of rows.tsv", 8)


def test_a_tensorrt_engine_is_compared_with_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake GPU: an engine in half precision, whose integers are narrower than those of its graph."""
    graph, path = cast_graph(tmp_path / "model.onnx"), tmp_path / "engine.plan"
    path.touch()
    narrow = target("ort").build(cast_graph(tmp_path / "narrow.onnx", "int32"), tmp_path / "engine.onnx")
    specs = (TensorSpec("ids", ir.DataType.INT32, (FREE, 4)),)
    host = f"tensorrt 8.6.1 on {Device('NVIDIA H200', (9, 0), 1 << 37)}"
    engine = SimpleNamespace(
        precision="fp16", specs=specs, host=host, is_reentrant=False, run=narrow.run, quantized=None
    )
    monkeypatch.setattr(type(target("trt")), "load", lambda self, path, *, threads: engine)
    verdict = check(CheckRequest(model=path, baseline=graph), timer=EQUAL_TIMES)
    assert verdict.host == "tensorrt 8.6.1 on NVIDIA H200 (SM 9.0)"
    assert (verdict.outputs.expected, verdict.outputs.tolerance) == ("its own unoptimized graph", 2e-2)
    with pytest.raises(UsageError) as error:
        check(CheckRequest(model=path, baseline=graph, kernel=path), timer=EQUAL_TIMES)
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.CONTRADICTION, "kernel")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        load_engine(tmp_path / "none.onnx", tmp_path)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISSING, tmp_path / "none.onnx")


@pytest.mark.parametrize("fault", [AttributeError("'NoneType'"), RuntimeError("no kernel"), IndexError(), OSError(5)])
def test_an_error_of_a_library_names_the_file_and_the_reason(fault: Exception) -> None:
    with pytest.raises(InputError) as error, library_errors(Path("model.onnx")):
        raise fault
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_UNREADABLE, Path("model.onnx"))
    assert type(fault).__name__ in str(error.value)
    assert error.value.__cause__ is fault


@pytest.mark.parametrize("fault", [UsageError("usage"), GraphError("graph"), MemoryError(), KeyboardInterrupt()])
def test_other_errors_are_not_changed(fault: BaseException) -> None:
    with pytest.raises(type(fault)) as error, library_errors(Path("model.onnx")):
        raise fault
    assert error.value is fault


def bit_flips(content: bytes, count: int, seed: int) -> list[bytes]:
    """Copies of a file with one to three bits flipped each."""
    rng = np.random.default_rng(seed)
    copies = []
    for _ in range(count):
        damaged = bytearray(content)
        for position in rng.integers(0, 8 * len(content), rng.integers(1, 4)):
            damaged[position // 8] ^= 1 << (position % 8)
        copies.append(bytes(damaged))
    return copies


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.zoo)])
def test_a_damaged_graph_gives_an_input_error(count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file with flipped bits is checked or refused with an error of this project, whatever a library raises."""
    whole, damaged = softmax_graph(tmp_path / "whole.onnx"), tmp_path / "damaged.onnx"
    outcomes = {"refused": 0, "checked": 0}
    for content in bit_flips(whole.read_bytes(), count, seed=0):
        damaged.write_bytes(content)
        outcome = "refused"
        with contextlib.suppress(CompressorError, GraphError):
            check(CheckRequest(model=damaged, baseline=whole, expect="any"), timer=EQUAL_TIMES)
            outcome = "checked"
        outcomes[outcome] += 1
    assert min(outcomes.values()) > 0, outcomes
    assert capfd.readouterr().out == "", "libraries print nothing among the results"


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
    changed = folder / "other.onnx"
    model = load(folder / "model.onnx")
    weights = next(value for value in model.graph.initializers.values() if len(value.shape or ()) == 2)
    assert weights.const_value is not None
    weights.const_value = ir.Tensor(-weights.const_value.numpy(), name=weights.name)
    save(model, changed)
    quantize_graph(changed, rows, folder / "other.int8.onnx")
    target("openvino").build(folder / "other.int8.onnx", folder / "engine.xml", precision="int8", threads=1)
    write_report(folder, "none", "openvino 2020.1")
    path = folder / "engine.xml"
    with pytest.raises(MismatchError) as error:
        check(CheckRequest(model=path, baseline=path, seq=8, threads=1, expect="any"), timer=EQUAL_TIMES)
    assert (error.value.code, error.value.details["stage"]) == (ErrorCode.NUMBERS_DIFFER, ProofStage.BUILD_INT8)
