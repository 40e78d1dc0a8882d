"""ONNX Runtime quantizes a float graph dynamically: every product is executed in int8, and attention stays fused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
import onnxruntime.quantization
import pytest

from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.targets import BuildOptions, target
from compressor.targets.graph_facts import quantized_matmuls, weight_matmuls
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.dynamic import INT8_KERNELS, lost_dependencies, quantize_dynamically
from compressor.targets.onnxruntime.engine import OrtEngine, build_engine, load_engine
from compressor.targets.relative_error import relative_error
from graph_passes import Plan, load, save, shrink
from tests.faults import fails_with
from tests.graph_passes.graphs import graph, run
from tests.quick_cases import quick
from tests.targets.cpu import has_vnni
from tests.targets.graphs import Pruned, masked, parsed, pruned

SANITY = 0.3 if has_vnni() else 1.0
"""Largest relative error of a tiny random model in int8 against its float graph."""
INPUTS = "float[B, 8] x, float[B, 8] m"
NORM = "com.microsoft.SkipLayerNormalization"


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


@pytest.fixture(scope="module")
def engine(bert: Pruned, tmp_path_factory: pytest.TempPathFactory) -> OrtEngine:
    out = tmp_path_factory.mktemp("int8") / "engine.onnx"
    return build_engine(bert.shrunk, out, precision="int8", provider="cpu", threads=1)


def plan_of(bert: Pruned, *kept: tuple[int, ...]) -> Plan:
    """The plan that keeps these heads of each layer."""
    sites = (dataclasses.replace(site, kept=heads, scale=()) for site, heads in zip(bert.plan.sites, kept, strict=True))
    return Plan(sites=tuple(sites))


def error_of(engine: OrtEngine, graph: Path, feeds: dict[str, np.ndarray]) -> float:
    """Largest relative error of an engine against a graph that the runtime does not optimize."""
    settings = {**ort_session.session_settings("cpu", 1), "graph_optimization": "none"}
    expected = ort_session.run_session(ort_session.open_session(graph, settings), feeds)
    outputs = engine.run(feeds)
    assert outputs.keys() == expected.keys()
    return max(relative_error(expected[name], outputs[name], feeds) for name in expected)


def test_every_product_is_executed_in_int8(engine: OrtEngine, bert: Pruned) -> None:
    assert engine.precision == "int8"
    assert engine.quantized is not None
    # The projections of queries, keys and values are one product where their attention is fused.
    assert engine.quantized.requested == len(weight_matmuls(load(bert.shrunk))) - 2 * bert.attentions
    assert engine.quantized.executed == engine.quantized.requested
    assert engine.quantized.float_in_graph == ()
    assert not {"Gemm", "MatMul", "FusedMatMul", "FusedGemm"} & engine.kernels.keys()
    assert sum(engine.kernels.get(kernel, 0) for kernel in INT8_KERNELS) == engine.quantized.executed


def test_attention_stays_fused(engine: OrtEngine, bert: Pruned) -> None:
    assert engine.fused == engine.attentions == engine.kernels["QAttention"] == bert.attentions
    assert not {"Attention", "MultiHeadAttention", "Softmax"} & engine.kernels.keys()
    assert "quantized dynamically" in engine.optimization
    assert f"{bert.attentions} QAttention" in engine.optimization


def test_padding_is_masked(engine: OrtEngine, bert: Pruned) -> None:
    mask = np.ones_like(bert.inputs["attention_mask"])
    whole = {**bert.inputs, "attention_mask": mask.copy()}
    mask[:, mask.shape[1] // 2 :] = 0
    padded = {**bert.inputs, "attention_mask": mask}
    settings = {**ort_session.session_settings("cpu", 1), "graph_optimization": "none"}
    session = ort_session.open_session(bert.shrunk, settings)
    expected, unmasked = (ort_session.run_session(session, feeds)["logits"] for feeds in (padded, whole))
    error = np.abs(engine.run(padded)["logits"] - expected).max()
    assert error < 0.5 * np.abs(unmasked - expected).max()


def test_attention_without_a_mask_is_quantized_as_a_whole(tmp_path: Path) -> None:
    body = "y = com.microsoft.Attention <num_heads = 2> (x, w, b)"
    graph = parsed(body, "float[B, S, 8] x", "float[B, S, 8] y", "float[8, 24] w, float[24] b")
    save(graph, tmp_path / "graph.onnx")
    quantize_dynamically(tmp_path / "graph.onnx", tmp_path / "int8.onnx")
    assert [node.op_type for node in load(tmp_path / "int8.onnx").graph][-1] == "QAttention"


def test_attention_with_a_bias_that_is_no_padding_mask_stays_in_floats(tmp_path: Path) -> None:
    body = "y = com.microsoft.Attention <num_heads = 2> (x, w, b, , , bias)"
    inputs = "float[B, S, 8] x, float[B, 1, S, S] bias"
    save(parsed(body, inputs, "float[B, S, 8] y", "float[8, 24] w, float[24] b"), tmp_path / "graph.onnx")
    engine = build_engine(tmp_path / "graph.onnx", tmp_path / "int8.onnx", precision="int8", provider="cpu", threads=1)
    assert engine.kernels["MultiHeadAttention"] == 1
    assert engine.quantized is not None
    assert engine.quantized.executed == engine.quantized.requested == 1
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(2, 5, 8)).astype(np.float32), "bias": np.full((2, 1, 5, 5), -1e4, np.float32)}
    feeds["bias"][:, :, np.tri(5, dtype=bool)] = 0
    assert error_of(engine, tmp_path / "graph.onnx", feeds) < SANITY


def test_outputs_are_near_those_of_the_float_graph(engine: OrtEngine, bert: Pruned) -> None:
    assert 0 < error_of(engine, bert.shrunk, bert.inputs) < SANITY


def test_no_matrix_of_floats_is_left(engine: OrtEngine, bert: Pruned) -> None:
    def types(path: Path) -> set[ir.DataType | None]:
        values = load(path).graph.initializers.values()
        return {value.dtype for value in values if value.shape is not None and len(value.shape) == 2}

    assert ir.DataType.FLOAT in types(bert.shrunk)
    assert ir.DataType.INT8 in types(engine.path)
    assert ir.DataType.FLOAT not in types(engine.path)


def test_a_loaded_engine_is_the_one_that_was_built(engine: OrtEngine, bert: Pruned) -> None:
    loaded = load_engine(engine.path, provider="cpu", threads=1)
    np.testing.assert_array_equal(loaded.run(bert.inputs)["logits"], engine.run(bert.inputs)["logits"])
    assert (loaded.precision, loaded.quantized, loaded.kernels) == ("int8", engine.quantized, engine.kernels)
    assert (loaded.fused, loaded.attentions, loaded.session) == (engine.fused, engine.attentions, engine.session)


@pytest.mark.parametrize(
    "kept", quick([((0, 2), (1, 2, 3), (1,)), ((), (3,), (0, 1, 2, 3))], [((), (3,), (0, 1, 2, 3))]), ids=str
)
def test_layers_with_different_numbers_of_heads_are_quantized(
    kept: tuple[tuple[int, ...], ...], bert: Pruned, tmp_path: Path
) -> None:
    graph = tmp_path / "graph.onnx"
    save(shrink(load(bert.reference), plan_of(bert, *kept)).model, graph)
    engine = build_engine(graph, tmp_path / "engine.onnx", precision="int8", provider="cpu", threads=1)
    assert engine.quantized is not None
    assert engine.quantized.executed == engine.quantized.requested
    assert engine.fused == engine.attentions == sum(map(bool, kept))
    assert error_of(engine, graph, bert.inputs) < SANITY


@pytest.mark.zoo
def test_block_sparse_attention_stays_in_floats(tmp_path: Path) -> None:
    graphs = masked()
    engine = build_engine(graphs.shrunk, tmp_path / "engine.onnx", precision="int8", provider="cpu", threads=1)
    assert engine.quantized is not None
    assert engine.quantized.executed == engine.quantized.requested
    assert engine.reach
    length = max(engine.reach.values())
    feeds = {"input_ids": np.arange(2 * length).reshape(2, -1), "attention_mask": np.ones((2, length), np.int64)}
    assert error_of(engine, graphs.shrunk, feeds) < SANITY


def test_weights_behind_layout_operators_are_quantized(tmp_path: Path) -> None:
    body = "wide = Concat <axis = 0> (v, w)  t = Transpose(wide)  h = MatMul(x, t)  r = Relu(h)  y = MatMul(r, u)"
    weights = "float[16, 8] v, float[16, 8] w, float[32, 8] u"
    save(parsed(body, "float[B, S, 8] x", "float[B, S, 8] y", weights), tmp_path / "graph.onnx")
    products = quantize_dynamically(tmp_path / "graph.onnx", tmp_path / "int8.onnx")
    assert len(products) == 2
    model = load(tmp_path / "int8.onnx")
    assert sum(node.op_type == "MatMulInteger" for node in model.graph) == 2
    assert weight_matmuls(model) == []


@pytest.mark.parametrize("kept_in_float", [True, False])
@pytest.mark.parametrize(
    "product",
    [
        "y = MatMul(x, w)",
        "y = Gemm(x, w)",
        "y = Gemm(x, w, b)",
        "y = Gemm <transB = 1> (x, v, b)",
        "a = Gemm <transB = 1> (x, v, b)  c = Gemm <transB = 1> (x, v)  y = Add(a, c)",
        "y = com.microsoft.FusedMatMul <transB = 1> (x, v)",
    ],
)
def test_matmuls_of_some_widths_stay_in_floats_whatever_operator_computes_them(
    product: str, kept_in_float: bool, tmp_path: Path
) -> None:
    weights = "float[8, 32] w, float[32, 8] v, float[32] b, float[32, 4] u"
    graph = tmp_path / "graph.onnx"
    save(parsed(f"{product}  r = Relu(y)  z = MatMul(r, u)", "float[B, 8] x", "float[B, 4] z", weights), graph)
    widths = frozenset([(8, 32 * product.count("(x"))] if kept_in_float else [])
    engine = build_engine(
        graph,
        tmp_path / "engine.onnx",
        precision="int8",
        provider="cpu",
        threads=1,
        options=BuildOptions(float_widths=widths),
    )
    assert engine.quantized is not None
    in_float = product.count("(x") if kept_in_float else 0
    in_int8 = product.count("(x") + 1 - in_float
    assert engine.quantized.executed == engine.quantized.requested == in_int8
    assert engine.products == {"int8": in_int8, "fp32": in_float}
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)}
    assert error_of(engine, graph, feeds) < SANITY


@pytest.mark.zoo
def test_the_graph_that_is_quantized_stays(bert: Pruned, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in bert.shrunk.parent.iterdir()}
    build_engine(bert.shrunk, tmp_path / "engine.onnx", precision="int8", provider="cpu", threads=1)
    assert {path: path.read_bytes() for path in bert.shrunk.parent.iterdir()} == before


@pytest.mark.zoo
def test_quantizing_prints_nothing(bert: Pruned, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_engine(bert.shrunk, tmp_path / "engine.onnx", precision="int8", provider="cpu", threads=1)
    assert capfd.readouterr() == ("", "")


def test_a_graph_that_is_quantized_is_only_loaded(tmp_path: Path) -> None:
    body = """
        q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)  d = DequantizeLinear(w, ws)
        y = MatMul(a, d)
    """
    weights = "float s = {0.1}, uint8 z = {128}, float ws = {0.1}, int8[2, 2] w = {1, 2, 3, 4}"
    graph = tmp_path / "graph.onnx"
    save(parsed(body, "float[B, S, 2] x", "float[B, S, 2] y", weights), graph)
    engine = build_engine(graph, tmp_path / "engine.onnx", precision="int8", provider="cpu", threads=1)
    assert engine.quantized is not None
    assert (engine.precision, engine.quantized.requested, engine.quantized.executed) == ("int8", 1, 1)
    assert len(quantized_matmuls(load(engine.path))) == 1
    assert error_of(engine, graph, {"x": np.linspace(-2, 2, 12, dtype=np.float32).reshape(2, 3, 2)}) < 1e-5
    loaded = load_engine(engine.path, provider="cpu", threads=1)
    assert (loaded.precision, loaded.quantized) == ("int8", engine.quantized)


def test_a_graph_that_the_quantizer_refuses_is_named(
    bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("no\nluck")

    monkeypatch.setattr(onnxruntime.quantization, "quantize_dynamic", refuse)
    with fails_with(ErrorCode.RUNTIME_FAILED, InputError, path=bert.shrunk) as caught:
        quantize_dynamically(bert.shrunk, tmp_path / "int8.onnx")
    assert "no luck" in str(caught.value)
    assert not (tmp_path / "int8.onnx").exists()


def test_a_graph_of_which_the_quantizer_leaves_out_a_part_is_refused(
    bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_mask(source: Path, out: Path, **_: Any) -> None:
        model = load(source)
        for node in model.graph:
            if node.op_type == "Attention":
                node.replace_input_with(3, None)
        save(model, out)

    monkeypatch.setattr(onnxruntime.quantization, "quantize_dynamic", without_mask)
    with fails_with(ErrorCode.RUNTIME_FAILED, InputError):
        build_engine(bert.shrunk, tmp_path / "engine.onnx", precision="int8", provider="cpu", threads=1)


def test_int8_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "has_cuda", lambda: True)
    with fails_with(ErrorCode.UNSUPPORTED, TargetMissingError, field="precision", value="int8"):
        target("ort").check(precision="int8", provider="cuda")
    assert ort_session.choose_provider(None, "int8") == "cpu"


def test_int8_on_cuda_is_refused_without_a_gpu(bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "has_cuda", lambda: False)
    with fails_with(ErrorCode.DEVICE_MISSING, TargetMissingError, field="provider", value="cuda"):
        build_engine(bert.shrunk, tmp_path / "engine.onnx", precision="int8", provider="cuda")
    assert not (tmp_path / "engine.onnx").exists()


@pytest.mark.parametrize(
    ("after", "lost"),
    [
        ("h = Mul(x, m)  y = Add(h, m)", []),
        ("t = Neg(x)  s = Neg(t)  h = Mul(s, m)  y = Add(h, m)", []),
        ("h = Neg(x)  y = Add(h, m)", ["m -> h"]),
        ("h = Mul(x, m)  y = Add(h, x)", ["m -> y"]),
        ("y = Mul(x, m)", ["h -> y"]),
    ],
)
def test_lost_dependencies_are_named(after: str, lost: list[str]) -> None:
    before, rewritten = (parsed(body, INPUTS, "float[B, 8] y") for body in ("h = Mul(x, m)  y = Add(h, m)", after))
    assert lost_dependencies(before, rewritten) == lost


def test_omitted_outputs_and_constants_are_not_compared() -> None:
    body = f"h, , , s = {NORM}(x, m, w)  k, , , t = {NORM}(h, s, w)  y = Add(k, t)"
    graphs = (parsed(body, INPUTS, "float[B, 8] y", "float[8] w") for _ in range(2))
    assert lost_dependencies(*graphs) == []


def test_a_lookup_whose_table_is_rounded_before_a_matmul(tmp_path: Path) -> None:
    body = "e = Gather(emb, ids)  h = MatMul(e, up)  y = Add(h, e)"
    model = graph(body, "float[20, 8] emb, float[8, 8] up", inputs="int64[B, S] ids")
    save(model, tmp_path / "model.onnx")
    quantize_dynamically(tmp_path / "model.onnx", tmp_path / "int8.onnx")
    ids = {"ids": np.random.default_rng(0).integers(0, 20, (2, 5))}
    (expected,), (actual,) = (run(load(tmp_path / name), ids) for name in ("model.onnx", "int8.onnx"))
    assert np.abs(actual - expected).max() < 0.05 * np.abs(expected).max()
