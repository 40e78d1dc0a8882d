"""Engines of OpenVINO compute what the graph computes, attention is fused, and what runs is reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import pytest

from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.targets import TOLERANCE, Precision, target
from compressor.targets.onnxruntime import ort_session
from compressor.targets.openvino.engine import OpenVinoEngine, build_engine, load_engine
from compressor.targets.relative_error import relative_error
from graph_passes import save
from tests.faults import fails_with
from tests.targets.graphs import Pruned, masked, parsed, pruned
from tests.zoo import FAMILIES

UNFUSED = {"t5": 1}
"""Family -> attentions that OpenVINO does not fuse."""


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


@pytest.fixture(scope="module")
def engine(bert: Pruned, tmp_path_factory: pytest.TempPathFactory) -> OpenVinoEngine:
    return build_engine(bert.shrunk, tmp_path_factory.mktemp("bert") / "engine.xml", threads=1)


@pytest.mark.parametrize(
    "family", [name if name == "bert" else pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES]
)
def test_an_engine_computes_its_graph_with_fused_attention(family: str, tmp_path: Path) -> None:
    graphs = pruned(family)
    engine = build_engine(graphs.shrunk, tmp_path / "engine.xml", threads=1)
    assert engine.attentions == graphs.attentions
    assert engine.fused == graphs.attentions - UNFUSED.get(family, 0)
    settings = {**ort_session.session_settings("cpu", 1), "graph_optimization": "none"}
    expected = ort_session.run_session(ort_session.open_session(graphs.reference, settings), graphs.inputs)
    outputs = engine.run(graphs.inputs)
    assert outputs.keys() == expected.keys()
    errors = [relative_error(expected[name], outputs[name], graphs.inputs) for name in expected]
    assert max(errors) <= TOLERANCE["fp32"]


def test_settings_and_layers_are_reported(engine: OpenVinoEngine, bert: Pruned) -> None:
    assert engine.session["inference_precision"] == "f32"
    assert (engine.session["provider"], engine.session["intra_op_threads"]) == ("CPU", 1)
    assert engine.session["runtime"] == f"openvino {openvino.__version__.partition('-')[0]}"
    assert engine.kernels["Subgraph"] >= bert.attentions
    assert f"{engine.kernels['FullyConnected']} FullyConnected" in engine.optimization
    assert {spec.name for spec in engine.specs} == set(engine.inputs) == set(bert.inputs)
    assert all(spec.dims == (-1, -1) and spec.type == "INT64" for spec in engine.specs)
    assert (engine.precision, engine.built, engine.device_seconds) == ("fp32", None, None)


def test_weights_keep_their_precision(engine: OpenVinoEngine) -> None:
    model = openvino.Core().read_model(engine.path)
    weights = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    assert not any(node.get_element_type().get_type_name() == "f16" for node in weights)


def test_a_loaded_engine_is_the_one_that_was_built(engine: OpenVinoEngine, bert: Pruned) -> None:
    loaded = load_engine(engine.path, threads=1)
    np.testing.assert_array_equal(loaded.run(bert.inputs)["logits"], engine.run(bert.inputs)["logits"])
    assert (loaded.session, loaded.kernels, loaded.inputs) == (engine.session, engine.kernels, engine.inputs)
    assert (loaded.fused, loaded.attentions) == (engine.fused, engine.attentions)


def test_memory_holds_at_least_the_weights(engine: OpenVinoEngine, bert: Pruned) -> None:
    growth = engine.memory(bert.inputs)
    assert growth is not None
    assert engine.path.with_suffix(".bin").stat().st_size < growth < 2**30


def test_outputs_are_the_callers_own(engine: OpenVinoEngine, bert: Pruned) -> None:
    first = engine.run(bert.inputs)["logits"]
    copy = first.copy()
    engine.run({name: np.roll(array, 1, axis=0) for name, array in bert.inputs.items()})
    np.testing.assert_array_equal(first, copy)


@pytest.mark.zoo
def test_block_sparse_attention_runs_and_refuses_longer_inputs(tmp_path: Path) -> None:
    graphs = masked()
    engine = build_engine(graphs.shrunk, tmp_path / "engine.xml", threads=1)
    assert engine.reach
    maximum = max(engine.reach.values())
    ids = np.ones((1, maximum + 1), np.int64)
    with fails_with(ErrorCode.OUT_OF_RANGE, InputError, value=maximum + 1, maximum=maximum):
        engine.run(dict.fromkeys(engine.inputs, ids))
    settings = {**ort_session.session_settings("cpu", 1), "graph_optimization": "none"}
    feeds = dict.fromkeys(engine.inputs, np.ones((2, maximum - 3), np.int64))
    expected = ort_session.run_session(ort_session.open_session(graphs.shrunk, settings), feeds)
    error = relative_error(expected["logits"], engine.run(feeds)["logits"], feeds)
    assert error <= TOLERANCE["fp32"]


def test_an_engine_without_its_weights_is_refused(engine: OpenVinoEngine, tmp_path: Path) -> None:
    path = tmp_path / "engine.xml"
    path.write_bytes(engine.path.read_bytes())
    with fails_with(ErrorCode.FILE_MISSING, InputError, path=path.with_suffix(".bin")):
        load_engine(path)


@pytest.mark.parametrize("damage", ["empty", "truncated", "text"])
def test_a_damaged_engine_is_refused(damage: str, engine: OpenVinoEngine, tmp_path: Path) -> None:
    content = engine.path.read_bytes()
    path = tmp_path / "engine.xml"
    path.write_bytes({"empty": b"", "truncated": content[: len(content) // 2], "text": b"no xml"}[damage])
    path.with_suffix(".bin").write_bytes(engine.path.with_suffix(".bin").read_bytes())
    with fails_with(ErrorCode.RUNTIME_FAILED, InputError, path=path):
        load_engine(path)


def test_an_operator_that_openvino_lacks_is_named(tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    save(parsed("y = Unheard (x)", "float[N, 4] x", "float[N, 4] y"), graph)
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, path=graph) as caught:
        build_engine(graph, tmp_path / "engine.xml")
    assert "Unheard" in caught.value.details["operators"]


def test_a_missing_input_is_named(engine: OpenVinoEngine, bert: Pruned) -> None:
    with fails_with(ErrorCode.TENSOR_MISMATCH, InputError, tensor="input_ids"):
        engine.run({name: array for name, array in bert.inputs.items() if name != "input_ids"})


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_other_precisions_are_refused(precision: Precision) -> None:
    with fails_with(ErrorCode.UNSUPPORTED, TargetMissingError, value=precision):
        target("openvino").check(precision=precision)


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, "compressor.targets.openvino.session")
    monkeypatch.delattr("compressor.targets.openvino.session")
    with pytest.raises(TargetMissingError) as error:
        target("openvino").check()
    assert (error.value.code, error.value.details["package"]) == (ErrorCode.PACKAGE_MISSING, "openvino")
    assert "pip install" in str(error.value)


@pytest.mark.zoo
def test_a_graph_runs_without_the_passes_of_graphs() -> None:
    """The process that measures memory starts with these imports."""
    code = (
        "import sys, compressor.targets.openvino.session\n"
        "print([name for name in ('torch', 'onnx_ir', 'onnx', 'graph_passes') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
