"""Engines of ONNX Runtime: everything that can be fused is fused and reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import ErrorCode, InputError
from compressor.measure import macs
from compressor.targets import TOLERANCE
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.engine import OrtEngine, build_engine, load_engine
from compressor.targets.relative_error import relative_error
from graph_passes import load, save
from graph_passes.block_sparse.masks import REACH
from graph_passes.passes import ReducePrecision
from tests.targets.graphs import Pruned, parsed, pruned
from tests.zoo import FAMILIES


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


@pytest.fixture(scope="module")
def engine(bert: Pruned, tmp_path_factory: pytest.TempPathFactory) -> OrtEngine:
    return build_engine(bert.shrunk, tmp_path_factory.mktemp("bert") / "engine.onnx", provider="cpu", threads=1)


@pytest.mark.parametrize(
    "family", [name if name == "bert" else pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES]
)
def test_every_attention_and_every_normalization_is_fused(family: str, tmp_path: Path) -> None:
    graphs = pruned(family)
    engine = build_engine(graphs.shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1)
    assert engine.fusion is not None
    assert engine.fusion.fused
    assert engine.fused == engine.attentions == graphs.attentions
    assert "Softmax" not in engine.kernels
    assert "ReduceMean" not in engine.kernels, "a normalization was not fused"
    expected = ort_session.run_session(ort_session.open_session(graphs.reference, engine.session), graphs.inputs)
    outputs = engine.run(graphs.inputs)
    errors = [relative_error(expected[name], outputs[name], graphs.inputs) for name in expected]
    assert max(errors) <= TOLERANCE["fp32"]
    assert macs(load(engine.path), 2, 7) == macs(load(graphs.shrunk), 2, 7), "fusing changes no arithmetic"


def test_operators_and_settings_are_reported(engine: OrtEngine, bert: Pruned) -> None:
    assert engine.kernels["Attention"] == bert.attentions
    assert f"runs {bert.attentions} Attention" in engine.optimization
    assert "SkipLayerNormalization" in engine.optimization
    assert engine.session["provider"] == "CPUExecutionProvider"
    assert engine.session["intra_op_threads"] == 1
    assert engine.session["runtime"].startswith("onnxruntime ")
    assert set(engine.inputs) == set(bert.inputs)
    assert engine.outputs == ("logits",)
    assert (engine.precision, engine.built, engine.device_seconds) == ("fp32", None, None)


def test_a_loaded_engine_is_the_one_that_was_built(engine: OrtEngine, bert: Pruned) -> None:
    loaded = load_engine(engine.path, provider="cpu", threads=1)
    np.testing.assert_array_equal(loaded.run(bert.inputs)["logits"], engine.run(bert.inputs)["logits"])
    assert (loaded.session, loaded.kernels, loaded.precision) == (engine.session, engine.kernels, "fp32")
    assert (loaded.fused, loaded.attentions) == (engine.fused, engine.attentions)


def test_memory_holds_at_least_the_weights(engine: OrtEngine, bert: Pruned) -> None:
    growth = engine.memory(bert.inputs)
    weights = sum(
        value.const_value.nbytes for value in load(bert.shrunk).graph.initializers.values() if value.const_value
    )
    assert growth is not None
    assert weights < growth < 2**30


def test_half_precision_is_close(bert: Pruned, tmp_path: Path) -> None:
    graph = tmp_path / "half.onnx"
    save(ReducePrecision(ir.DataType.FLOAT16)(load(bert.shrunk)).model, graph)
    weights = [value for value in load(graph).graph.initializers.values() if value.const_value]
    assert {value.dtype for value in weights if value.const_value and value.const_value.size > 99} == {
        ir.DataType.FLOAT16
    }
    settings = ort_session.session_settings("cpu", 1)
    expected, outputs = (
        ort_session.run_session(ort_session.open_session(path, settings), bert.inputs)["logits"]
        for path in (bert.shrunk, graph)
    )
    assert outputs.dtype == np.float32
    assert relative_error(expected, outputs, bert.inputs) <= TOLERANCE["fp16"]


def test_a_missing_input_is_named(engine: OrtEngine, bert: Pruned) -> None:
    with pytest.raises(InputError) as error:
        engine.run({"input_ids": bert.inputs["input_ids"]})
    assert (error.value.code, error.value.details["tensor"]) == (ErrorCode.TENSOR_MISMATCH, "attention_mask")
    assert "\n" not in str(error.value)


def test_rows_that_are_longer_than_the_block_masks_are_refused(tmp_path: Path) -> None:
    model = parsed("y = Identity(x)", "float[B, S] x", "float[B, S] y")
    model.metadata_props[REACH] = '{"x": 16}'
    save(model, tmp_path / "graph.onnx")
    engine = build_engine(tmp_path / "graph.onnx", tmp_path / "engine.onnx", provider="cpu", threads=1)
    assert engine.run({"x": np.ones((1, 16), np.float32)})["y"].shape == (1, 16)
    with pytest.raises(InputError) as error:
        engine.run({"x": np.ones((1, 17), np.float32)})
    assert error.value.code is ErrorCode.OUT_OF_RANGE
    assert error.value.details == {"tensor": "x", "value": 17, "maximum": 16}
