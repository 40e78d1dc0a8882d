"""Engines of OpenVINO in bfloat16: refused without the instructions, counted, proven, and loaded in fp32 elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.config.sections import EngineConfig
from compressor.engines.build import require_precision
from compressor.environment import BFLOAT16_INSTRUCTIONS
from compressor.errors import ErrorCode, MismatchError, TargetMissingError
from compressor.latency.local_engine import changes_since
from compressor.targets import target
from compressor.targets.graph_facts import weight_matmuls
from compressor.targets.onnxruntime.ort_session import unoptimized_runner
from compressor.targets.openvino import batches, session
from compressor.targets.openvino.engine import _executed, build_engine, load_engine
from compressor.targets.openvino.session import Layer
from compressor.targets.relative_error import relative_error
from graph_passes import load, save
from tests.faults import fails_with
from tests.serving.outputs import report
from tests.targets.graphs import Pruned, pruned
from tests.zoo import FAMILIES

needs_bfloat16 = pytest.mark.skipif(
    not session.native_bfloat16(), reason="the processor has no instructions for bfloat16"
)


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


def pretend(patch: pytest.MonkeyPatch, *flags: str) -> None:
    """Let the processor report these instruction sets for bfloat16."""
    patch.setattr(session, "bfloat16_instructions", lambda: flags)


@pytest.mark.parametrize("flags", [(), ("bf16",)])
def test_a_processor_without_the_instructions_is_refused(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, *flags)
    with fails_with(ErrorCode.UNSUPPORTED, TargetMissingError, value="bf16") as error:
        target("openvino").check(precision="bf16")
    assert error.value.exit_code == 6


@pytest.mark.parametrize("flag", session.OPENVINO_BFLOAT16)
def test_each_of_the_instruction_sets_is_enough(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, flag)
    target("openvino").check(precision="bf16")
    assert session.session_settings(1, inference_precision="bf16")["inference_precision"] == "bf16"


def test_products_that_the_runtime_computes_in_fp32_all_the_same_are_an_error(
    bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO accepts the setting on any processor; only the layers that it executes show what it does."""
    pretend(monkeypatch, "amx_bf16")
    engine = build_engine(bert.shrunk, tmp_path / "engine.xml", precision="bf16", threads=1)
    assert engine.session["inference_precision"] == "bf16"
    assert sum(engine.products.values()) == len(weight_matmuls(load(bert.shrunk)))
    config = EngineConfig(target="openvino", precision="bf16")
    if engine.products["fp32"]:
        with fails_with(ErrorCode.PRODUCTS_IN_FLOAT, MismatchError, executed=engine.products.get("bf16", 0)):
            require_precision(engine, config)
    else:
        require_precision(engine, config)
    require_precision(engine, config.model_copy(update={"allow_float_products": True}))


def test_an_engine_for_bfloat16_computes_in_fp32_where_there_is_none(
    bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.xml"
    with monkeypatch.context() as patch:
        pretend(patch, "amx_bf16")
        build_engine(bert.shrunk, path, precision="bf16", threads=1)
    pretend(monkeypatch)
    engine = load_engine(path, threads=1, cached=False)
    assert (engine.precision, engine.session["inference_precision"]) == ("fp32", "f32")
    expected, outputs = unoptimized_runner(bert.shrunk)(bert.inputs), engine.run(bert.inputs)
    for name, values in expected.items():
        assert relative_error(values, outputs[name], bert.inputs) <= target("openvino").tolerance["fp32"]
    proven = report(machine={BFLOAT16_INSTRUCTIONS: "amx_bf16"}, session={"inference_precision": "bf16"})
    assert len(list(changes_since(proven, {BFLOAT16_INSTRUCTIONS: "none"}, engine.session))) == 2


@needs_bfloat16
def test_every_product_is_computed_in_bfloat16(bert: Pruned, tmp_path: Path) -> None:
    engine = build_engine(bert.shrunk, tmp_path / "engine.xml", precision="bf16", threads=1)
    assert engine.precision == "bf16"
    assert engine.products.get("bf16") == len(weight_matmuls(load(bert.shrunk)))
    require_precision(engine, EngineConfig(target="openvino", precision="bf16"))
    expected, outputs = unoptimized_runner(bert.shrunk)(bert.inputs), engine.run(bert.inputs)
    errors = [relative_error(values, outputs[name], bert.inputs) for name, values in expected.items()]
    assert 0 < max(errors) <= target("openvino").tolerance["bf16"]
    assert all(array.dtype == np.float32 for array in outputs.values())


@needs_bfloat16
@pytest.mark.zoo
@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_is_near_its_graph(family: str, tmp_path: Path) -> None:
    """An engine is no further off than rounding the weights alone, where that exceeds the tolerance: T5's scores are
    not scaled, so that small changes of random weights change its answers."""
    whole = pruned(family)
    engine = build_engine(whole.shrunk, tmp_path / "engine.xml", precision="bf16", threads=1)
    rounded = load(whole.shrunk)
    for value in rounded.graph.initializers.values():
        if value.const_value is not None and value.dtype == ir.DataType.FLOAT:
            values = value.const_value.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
            value.const_value = ir.tensor(values, name=value.name)
    save(rounded, tmp_path / "rounded.onnx")
    expected, outputs = unoptimized_runner(whole.shrunk)(whole.inputs), engine.run(whole.inputs)
    alone = unoptimized_runner(tmp_path / "rounded.onnx")(whole.inputs)
    for name, values in expected.items():
        limit = max(target("openvino").tolerance["bf16"], relative_error(values, alone[name], whole.inputs))
        assert relative_error(values, outputs[name], whole.inputs) <= limit


@given(
    st.integers(0, 20),
    st.lists(
        st.tuples(
            st.sampled_from(["FullyConnected", "MatMul", "Subgraph", "QKVProjection"]),
            st.sampled_from(["f32", "bf16", "u8", "unknown"]),
        )
    ),
)
def test_every_product_of_the_graph_has_one_precision(requested: int, kinds: list[tuple[str, str]]) -> None:
    layers = [Layer(kind, precision, frozenset()) for kind, precision in kinds]
    counts = _executed(requested, layers)
    assert all(0 <= count <= requested for count in counts.values())
    assert sum(counts.values()) == requested or not requested
    executed = sum(kind == "FullyConnected" and precision == "bf16" for kind, precision in kinds)
    assert counts.get("bf16", 0) >= min(executed, requested) or "int8" in counts


def test_the_dense_engine_stays_in_fp32() -> None:
    config = EngineConfig(target="openvino", precision="bf16")
    assert config.chooses
    assert config.reference.precision == "fp32"
    assert EngineConfig(target="trt", precision="bf16").reference.precision == "bf16"


def served(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that a served model loads its engine with, which lies beside `batches.py` there."""
    monkeypatch.setitem(sys.modules, "batches", batches)
    path = Path(session.__file__).parents[2] / "serving/python_backend/openvino_session.py"
    spec = importlib.util.spec_from_file_location("served_session", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_served_engine_computes_in_its_own_precision_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module = served(monkeypatch)
    config: dict[str, Any] = {"parameters": {}, "instance_group": [{"count": 1}]}
    facts = {"inference_precision": "bf16", "native_instructions": list(session.OPENVINO_BFLOAT16)}
    assert module._options(config, {})["INFERENCE_PRECISION_HINT"] == "f32"
    monkeypatch.setattr(module, "_processor_flags", lambda: {"avx2", "amx_bf16"})
    assert module._options(config, facts)["INFERENCE_PRECISION_HINT"] == "bf16"
    monkeypatch.setattr(module, "_processor_flags", lambda: {"avx2"})
    with pytest.raises(RuntimeError):
        module._options(config, facts)
