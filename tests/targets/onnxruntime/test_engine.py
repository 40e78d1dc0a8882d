"""Engines of ONNX Runtime: everything that can be fused is fused and reported."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from compressor.errors import ErrorCode, InputError
from compressor.measure import macs
from compressor.targets import TOLERANCE, BuildOptions, Feeds, target
from compressor.targets.onnxruntime import engine as norms
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.engine import (
    Fusion,
    OrtEngine,
    Rewrite,
    build_engine,
    choose_decoder,
    choose_norms,
    fuse,
    load_engine,
)
from compressor.targets.relative_error import relative_error
from compressor.targets.trial_inputs import decoding_feeds
from graph_passes import data_files, load, save
from graph_passes.block_sparse.masks import REACH
from graph_passes.flow.caches import record_caches
from graph_passes.passes import NameDecodingAxes, ReducePrecision
from tests.graph_passes.passes.test_fuse_in_place import decoder as masked_decoder
from tests.quantization.graphs import files_of
from tests.targets.graphs import Pruned, parsed, pruned
from tests.zoo import FAMILIES

POSITIONS = """
    length = Shape <start = 1, end = 2> (x)
    end = Squeeze (length)
    positions = Range (zero, end, one)
    offsets = Gather (table, positions)
    y = Add (x, offsets)
"""
NORM = "com.microsoft.SkipLayerNormalization"
BODY = f"""
    h, , , s = {NORM} <epsilon = 1e-05> (x, x, scale, shift)
    f = MatMul(h, w)
    y = {NORM} <epsilon = 1e-05> (f, s, scale, shift, bias)
"""
WEIGHTS = "float[32] scale, float[32] shift, float[32] bias, float[32, 32] w"
FEEDS: Feeds = {"x": np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32)}
SETTINGS = ort_session.session_settings("cpu", 1)
SPLIT, KEPT = 0.0, float("inf")
"""Ratios of times from which on norms are split, so that they always or never are."""


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


def negate_a_product(model: ir.Model) -> ir.Model:
    product = next(node for node in model.graph if node.op_type == "MatMul")
    negative = ir.node("Neg", [product.outputs[0]])
    product.outputs[0].replace_all_uses_with(negative.outputs[0])
    negative.replace_input_with(0, product.outputs[0])
    model.graph.insert_after(product, negative)
    return model


def break_a_product(model: ir.Model) -> ir.Model:
    next(node for node in model.graph if node.op_type == "MatMul").op_type = "NoSuchOperator"
    return model


def fail(model: ir.Model) -> ir.Model:
    raise KeyError("no rule\nfor this")


@pytest.mark.parametrize(
    ("rewrite", "compared", "reason"),
    [
        (negate_a_product, True, "differ by"),
        pytest.param(break_a_product, False, "NoSuchOperator", marks=pytest.mark.zoo),
        pytest.param(fail, False, "KeyError", marks=pytest.mark.zoo),
    ],
)
def test_a_fused_graph_that_is_wrong_is_not_kept(rewrite: Rewrite, compared: bool, reason: str, tmp_path: Path) -> None:
    bert, settings = pruned("bert"), ort_session.session_settings("cpu", 1)
    fusion = fuse(bert.shrunk, tmp_path / "engine.onnx", settings, rewrite)
    assert not fusion.fused
    assert (fusion.error is not None) is compared
    assert fusion.error is None or fusion.error > 1e-4
    assert reason in fusion.reason
    assert "\n" not in str(fusion)
    expected, outputs = (
        ort_session.run_session(ort_session.open_session(path, settings), bert.inputs)
        for path in (bert.shrunk, tmp_path / "engine.onnx")
    )
    np.testing.assert_allclose(outputs["logits"], expected["logits"], rtol=1e-5)


@pytest.mark.parametrize(("positions", "runs"), [(7, True), (2, False)])
def test_a_graph_is_compared_on_the_lengths_that_it_accepts(positions: int, runs: bool, tmp_path: Path) -> None:
    """It has positions for six tokens of nine, or for none of the lengths tried."""
    weights = f"int64 zero = {{0}}, int64 one = {{1}}, float[{positions}, 4] table"
    graph, out = tmp_path / "graph.onnx", tmp_path / "engine.onnx"
    save(parsed(POSITIONS, "float[B, S, 4] x", "float[B, S, 4] y", weights), graph)
    settings = ort_session.session_settings("cpu", 1)
    if runs:
        assert fuse(graph, out, settings).fused
        return
    with pytest.raises(InputError) as error:
        fuse(graph, out, settings)
    assert error.value.code is ErrorCode.RUNTIME_FAILED


def test_messages() -> None:
    """The text of reports on fusion."""
    assert str(Fusion(True, 1e-6)) == "fused by onnxscript's rules, equal to the original graph within 1.0e-06"
    assert str(Fusion(False, None, "KeyError: a")) == ("not fused beyond ONNX Runtime's own optimizations: KeyError: a")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short rounds of timing."""
    monkeypatch.setattr(norms, "ROUNDS", 2)
    monkeypatch.setattr(norms, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A graph of two fused norms; its large weights are in a file beside it."""
    path = tmp_path / "engine" / "engine.onnx"
    path.parent.mkdir()
    save(parsed(BODY, "float[B, S, 32] x", "float[B, S, 32] y", WEIGHTS), path)
    assert data_files(load(path))
    return path


def run(path: Path) -> np.ndarray:
    """The output of a graph."""
    output: np.ndarray = ort_session.runner(path, SETTINGS)(FEEDS)["y"]
    return output


def kinds(path: Path) -> set[str]:
    """The operators of a graph."""
    return {node.op_type for node in load(path).graph}


@pytest.mark.parametrize("gain", [SPLIT, KEPT, None], ids=["split", "kept", "timed"])
def test_the_graph_computes_the_same_whatever_is_chosen(
    gain: float | None, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gain is not None:
        monkeypatch.setattr(norms, "GAIN", gain)
    expected = run(graph)
    choice = choose_norms(graph, SETTINGS, FEEDS, TOLERANCE["fp32"], 0.01)
    assert choice is not None
    assert relative_error(expected, run(graph), FEEDS) < 1e-5
    is_split = "LayerNormalization" in kinds(graph)
    assert is_split is ("SkipLayerNormalization" not in kinds(graph))
    assert re.fullmatch(
        r"norms split, \d+\.\d\d times as fast as fused ones"
        if is_split
        else r"fused norms kept, split ones are \d+\.\d\d times as fast",
        choice,
    )
    if gain is not None:
        assert is_split is (gain == SPLIT)


def test_the_file_of_split_norms_is_complete(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "GAIN", SPLIT)
    expected = run(graph)
    choose_norms(graph, SETTINGS, FEEDS, TOLERANCE["fp32"], 0.01)
    onnx.checker.check_model(str(graph))
    files = data_files(load(graph))
    assert {file.parent for file in files} <= {graph.parent.resolve()}
    assert set(files_of(graph)) == {graph.name, *(file.name for file in files)}, "nothing else is left behind"
    moved = tmp_path / "moved"
    shutil.move(graph.parent, moved)
    assert relative_error(expected, run(moved / graph.name), FEEDS) < 1e-5


@pytest.mark.parametrize(("gain", "tolerance"), [(KEPT, 1e-4), (SPLIT, -1.0)], ids=["slower", "other numbers"])
def test_the_files_of_fused_norms_stay(
    gain: float, tolerance: float, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "GAIN", gain)
    before = files_of(graph)
    choice = choose_norms(graph, SETTINGS, FEEDS, tolerance, 0.01)
    assert choice is not None
    assert choice.startswith("fused norms kept")
    assert files_of(graph) == before


def test_norms_that_are_split_already_are_left(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "GAIN", SPLIT)
    assert choose_norms(graph, SETTINGS, FEEDS, TOLERANCE["fp32"], 0.01) is not None
    before = files_of(graph)
    assert choose_norms(graph, SETTINGS, FEEDS, TOLERANCE["fp32"], 0.01) is None
    assert files_of(graph) == before


@pytest.mark.parametrize(
    "body",
    ["y = LayerNormalization(x, scale, shift)", f"h, mean = {NORM}(x, x, scale)  m = MatMul(h, w)  y = Sub(m, mean)"],
    ids=["no residual", "mean is read"],
)
def test_nothing_is_chosen_without_a_norm_that_can_be_split(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "GAIN", SPLIT)
    path = tmp_path / "engine.onnx"
    save(parsed(body, "float[B, S, 32] x", "float[B, S, 32] y", WEIGHTS), path)
    before = files_of(path)
    assert choose_norms(path, SETTINGS, FEEDS, TOLERANCE["fp32"], 0.01) is None
    assert files_of(path) == before


@pytest.mark.parametrize("gain", [SPLIT, pytest.param(KEPT, marks=pytest.mark.zoo)], ids=["split", "kept"])
def test_an_engine_has_the_form_that_was_chosen(gain: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "GAIN", gain)
    bert = pruned("bert")
    options = BuildOptions(batch=(1, 1, 2), seq=(4, 8, 16), norm_seconds=0.01)
    engine = target("ort").build(bert.shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1, options=options)
    text = "norms split" if gain == SPLIT else "fused norms kept"
    assert text in engine.optimization
    assert ("SkipLayerNormalization" in engine.kernels) is (gain == KEPT)
    assert engine.fused == engine.attentions == bert.attentions
    settings = {**SETTINGS, "graph_optimization": "none"}
    expected = ort_session.runner(bert.shrunk, settings)(bert.inputs)["logits"]
    assert relative_error(expected, engine.run(bert.inputs)["logits"], bert.inputs) <= TOLERANCE["fp32"]
    loaded = target("ort").load(engine.path, provider="cpu", threads=1)
    assert loaded.kernels == engine.kernels


def test_norms_are_not_timed_unless_that_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "GAIN", SPLIT)
    engine = target("ort").build(pruned("bert").shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1)
    assert "norms" not in engine.optimization
    assert "SkipLayerNormalization" in engine.kernels


@pytest.mark.parametrize("split", [True, False])
def test_a_form_that_is_given_is_not_timed(*, split: bool, tmp_path: Path) -> None:
    options = BuildOptions(split_norms=split, norm_seconds=1.0)
    path = tmp_path / "engine.onnx"
    engine = target("ort").build(pruned("bert").shrunk, path, provider="cpu", threads=1, options=options)
    assert ("SkipLayerNormalization" in engine.kernels) is not split
    assert "times as fast" not in engine.optimization


DECODER = """
    k2 = Reshape(x, split)
    k = Transpose <perm = [0, 2, 1, 3]> (k2)
    present = Concat <axis = 2> (past, k)
    values = Concat <axis = 2> (values_past, k)
    kt = Transpose <perm = [0, 1, 3, 2]> (present)
    s = MatMul(k, kt)
    c = Mul(s, scale)
    p = Softmax <axis = -1> (c)
    o = MatMul(p, values)
    ot = Transpose <perm = [0, 2, 1, 3]> (o)
    y = Reshape(ot, merge)
"""


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A decoder of one attention."""
    model = parsed(
        DECODER,
        "float[B, S, 8] x, float[B, 2, P, 4] past, float[B, 2, P, 4] values_past",
        "float[B, S, 8] y, float[B, 2, T, 4] present, float[B, 2, T, 4] values",
        "int64[4] split = {0, 0, 2, 4}, int64[3] merge = {0, 0, 8}, float scale = {0.5}",
    )
    record_caches(model, [("past", "present"), ("values_past", "values")])
    save(model, tmp_path / "decoder.onnx")
    return tmp_path / "decoder.onnx"


@pytest.mark.parametrize("gain", [2.0, 1.0, 0.9])
def test_the_faster_of_two_decoders_is_built(
    gain: float, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "_shortest_times", lambda calls, _: [1.0, gain])
    options = BuildOptions(batch=(1, 1, 2), seq=(4, 8, 16), norm_seconds=0.01)
    engine = build_engine(decoder, tmp_path / "engine.onnx", provider="cpu", threads=1, options=options)
    assert engine.kernels.get("MultiHeadAttention", 0) == (gain >= 1)
    assert engine.kernels.get("Softmax", 0) == (gain < 1)


@pytest.mark.parametrize(("form", "operator"), [(0, "GroupQueryAttention"), (1, "MultiHeadAttention"), (2, "Softmax")])
def test_the_fastest_form_of_a_decoder_is_built(
    form: int, operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(NameDecodingAxes()(masked_decoder()).model, tmp_path / "decoder.onnx")
    monkeypatch.setattr(norms, "_shortest_times", lambda calls, _: [1.0 + (form != n) for n in range(len(calls))])
    options = BuildOptions(batch=(1, 1, 2), seq=(4, 8, 16), norm_seconds=0.01)
    engine = build_engine(
        tmp_path / "decoder.onnx", tmp_path / "engine.onnx", provider="cpu", threads=1, options=options
    )
    assert engine.kernels.get(operator) == 1


def test_a_decoder_is_timed_in_a_step(decoder: Path, tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    assert fuse(decoder, fused, SETTINGS).fused
    feeds = decoding_feeds(load(decoder), 2, 7)
    expected = ort_session.runner(decoder, SETTINGS)(feeds)
    choose_decoder(fused, decoder, SETTINGS, feeds, 0.01)
    outputs = ort_session.runner(fused, SETTINGS)(feeds)
    assert all(relative_error(expected[name], outputs[name], feeds) < 1e-5 for name in expected)
