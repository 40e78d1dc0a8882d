"""Building for ONNX Runtime: everything that can be fused is, nothing that is wrong is kept, all of it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import InputError, TargetMissingError, UsageError
from compressor.measure import macs
from compressor.targets import TARGETS, target
from compressor.targets.onnxruntime import fusion, ort_session
from compressor.targets.onnxruntime.target import OrtEngine, build
from compressor.targets.random_inputs import random_feeds
from compressor.targets.relative_error import relative_error
from graph_passes import load, save
from graph_passes.passes.fp16 import halve
from graph_passes.passes.prefusion import drop_idle_expands, prepare
from tests.engines import Pruned, parsed, pruned
from tests.zoo import FAMILIES

SLICE = ("bert", "gpt2", "t5")
"""An attention fused with its projections; one whose linear layers are flattened; one with a bias beside the mask."""


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


@pytest.fixture(scope="module")
def engine(bert: Pruned, tmp_path_factory: pytest.TempPathFactory) -> OrtEngine:
    return build(bert.shrunk, tmp_path_factory.mktemp("bert") / "engine.onnx", provider="cpu", threads=1)


def built(family: str, folder: Path) -> None:
    made = pruned(family)
    engine = build(made.shrunk, folder / "engine.onnx", provider="cpu", threads=1)
    assert engine.optimization.startswith("fused by onnxscript's rules")
    assert engine.fused == engine.attentions == made.attentions
    assert "Softmax" not in engine.kernels
    assert "ReduceMean" not in engine.kernels, "a norm was left in pieces"
    expected = ort_session.run(ort_session.open_session(made.reference, dict(engine.session)), made.inputs)
    got = engine.run(made.inputs)
    assert max(relative_error(expected[name], got[name], made.inputs) for name in expected) <= 1e-4
    assert macs(load(engine.path), 2, 7) == macs(load(made.shrunk), 2, 7), "fusing changes no arithmetic"


@pytest.mark.parametrize("family", SLICE)
def test_every_attention_and_every_norm_is_fused(family: str, tmp_path: Path) -> None:
    built(family, tmp_path)


@pytest.mark.zoo
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SLICE])
def test_every_family_is_fused(family: str, tmp_path: Path) -> None:
    built(family, tmp_path)


def test_what_was_done_and_with_which_settings_is_told(engine: OrtEngine, bert: Pruned) -> None:
    assert f"runs {bert.attentions} Attention" in engine.optimization
    assert "SkipLayerNormalization" in engine.optimization
    assert engine.session["provider"] == "CPUExecutionProvider"
    assert engine.session["intra_op_threads"] == 1
    assert engine.session["runtime"].startswith("onnxruntime ")
    assert set(engine.inputs) == set(bert.inputs)
    assert engine.outputs == ("logits",)


def test_memory_holds_the_weights_at_least(engine: OrtEngine, bert: Pruned) -> None:
    grown = engine.memory(bert.inputs)
    weights = sum(
        value.const_value.nbytes for value in load(bert.shrunk).graph.initializers.values() if value.const_value
    )
    assert grown is not None
    assert weights < grown < 2**30


def negated(model: ir.Model) -> ir.Model:
    product = next(node for node in model.graph if node.op_type == "MatMul")
    negative = ir.node("Neg", [product.outputs[0]])
    product.outputs[0].replace_all_uses_with(negative.outputs[0])
    negative.replace_input_with(0, product.outputs[0])
    model.graph.insert_after(product, negative)
    return model


def invalid(model: ir.Model) -> ir.Model:
    node = next(node for node in model.graph if node.op_type == "MatMul")
    node.op_type = "NoSuchOperator"
    return model


def raising(model: ir.Model) -> ir.Model:
    raise KeyError("no rule\nfor this")


@pytest.mark.parametrize(
    ("rewrite", "why"), [(negated, "outputs differ by"), (invalid, "NoSuchOperator"), (raising, "KeyError: 'no rule")]
)
def test_a_fused_graph_that_is_wrong_is_not_kept(
    rewrite: Callable[[ir.Model], ir.Model], why: str, bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "_rewritten", rewrite)
    engine = build(bert.shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1)
    assert engine.optimization.startswith("not fused beyond")
    assert why in engine.optimization
    assert "\n" not in engine.optimization
    assert (engine.fused, engine.attentions) == (0, bert.attentions)
    expected = ort_session.run(ort_session.open_session(bert.shrunk, dict(engine.session)), bert.inputs)
    np.testing.assert_allclose(engine.run(bert.inputs)["logits"], expected["logits"], rtol=1e-5)


def test_a_graph_of_few_positions_is_tried_on_what_it_takes(tmp_path: Path) -> None:
    body = """
        length = Shape <start = 1, end = 2> (x)
        end = Squeeze (length)
        places = Range (zero, end, one)
        offsets = Gather (table, places)
        y = Add (x, offsets)
    """
    weights = "int64 zero = {0}, int64 one = {1}, float[7, 4] table"
    graph = tmp_path / "graph.onnx"
    save(parsed(body, "float[B, S, 4] x", "float[B, S, 4] y", weights), graph)
    engine = build(graph, tmp_path / "engine.onnx", provider="cpu", threads=1)
    assert engine.optimization.startswith("fused by onnxscript's rules")
    save(parsed(body, "float[B, S, 4] x", "float[B, S, 4] y", weights.replace("7", "2")), graph)
    with pytest.raises(InputError, match="cannot run the graph on these inputs"):
        build(graph, tmp_path / "engine.onnx", provider="cpu", threads=1)


def test_half_precision_is_close(bert: Pruned, tmp_path: Path) -> None:
    graph = tmp_path / "half.onnx"
    save(load(bert.shrunk), graph)
    halve(graph)
    model = load(graph)
    kinds = {
        value.dtype for value in model.graph.initializers.values() if value.const_value and value.const_value.size > 99
    }
    assert kinds == {ir.DataType.FLOAT16}
    options = ort_session.describe("cpu", 1)
    expected = ort_session.run(ort_session.open_session(bert.shrunk, options), bert.inputs)["logits"]
    got = ort_session.run(ort_session.open_session(graph, options), bert.inputs)["logits"]
    assert got.dtype == np.float32
    assert relative_error(expected, got, bert.inputs) <= 2e-2


def test_targets_that_are_not_there_are_named_with_the_mend(tmp_path: Path) -> None:
    assert TARGETS == ("ort", "trt")
    with pytest.raises(TargetMissingError, match=r"trt: there is no NVIDIA GPU here.*compress build OUT --target trt"):
        target("trt")(tmp_path / "model.onnx", tmp_path / "model.plan")
    with pytest.raises(TargetMissingError, match=r"fp16: .*GPU.*use fp32"):
        target("ort")(tmp_path / "model.onnx", tmp_path / "out.onnx", precision="fp16", provider="cpu")
    with pytest.raises(UsageError, match="tflite: there is no such target; use one of ort, trt"):
        target("tflite")


def test_cuda_is_not_taken_for_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert ort_session.choose(None, "fp32") == "cpu"
    with pytest.raises(TargetMissingError, match=r"cuda: .*pip install 'compressor\[gpu\]'"):
        ort_session.choose("cuda", "fp32")


def test_faults_of_a_graph_are_one_line(engine: OrtEngine, bert: Pruned, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the graph wants an input named attention_mask; give input_ids") as raised:
        engine.run({"input_ids": bert.inputs["input_ids"]})
    assert "\n" not in str(raised.value)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no graph")
    with pytest.raises(InputError, match=r"broken\.onnx: ONNX Runtime cannot load it") as raised:
        ort_session.open_session(broken, ort_session.describe("cpu", 1))
    assert "\n" not in str(raised.value)


def test_random_feeds_are_valid(bert: Pruned) -> None:
    model = load(bert.shrunk)
    feeds = random_feeds(model, 4, 12, seed=3, padded=True)
    assert {name: array.shape for name, array in feeds.items()} == dict.fromkeys(bert.inputs, (4, 12))
    assert 0 <= feeds["input_ids"].min() <= feeds["input_ids"].max() < 99
    assert len(np.unique(feeds["input_ids"])) > 20
    assert feeds["attention_mask"].sum(1).tolist() == [12, 9, 12, 9]
    assert random_feeds(model, 4, 12)["attention_mask"].all()
    again = random_feeds(model, 4, 12, seed=3, padded=True)
    assert all(np.array_equal(feeds[name], again[name]) for name in feeds)


def test_random_feeds_follow_each_input_to_its_table() -> None:
    model = parsed(
        "a = Gather(words, ids)  flat = Reshape(kinds, shape)  b = Gather(types, flat)  y = Identity(a)",
        "int64[B, S] ids, int64[B, S] kinds, int64[B, S] position_ids, float[B, past_length] past, float[B, 3] x",
        "float[B, S, 4] y",
        "float[7, 4] words, float[3, 4] types, int64[1] shape = {-1}",
    )
    feeds = random_feeds(model, 50, 20)
    assert (feeds["ids"].max(), feeds["kinds"].max()) == (6, 2)
    assert feeds["position_ids"][1].tolist() == list(range(20))
    assert feeds["past"].shape == (50, 0)
    assert feeds["x"].shape == (50, 3)


def test_a_fixed_batch_is_not_overruled() -> None:
    model = parsed("y = Identity(x)", "float[2, S] x", "float[2, S] y")
    assert random_feeds(model, 2, 5)["x"].shape == (2, 5)
    with pytest.raises(InputError, match="x: the graph fixes the batch at 2, 8 was asked for"):
        random_feeds(model, 8, 5)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("reference", "other", "error"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-9], INF),
        ([1.0, NAN], [1.0, NAN], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, -INF], [1.0, -INF], 0.0),
        ([1.0, -INF], [1.0, INF], INF),
        ([1.0, 2.0], [1.0, INF], INF),
        ([1.0, 2.0], [1.0, 2.0, 3.0], INF),
    ],
)
def test_relative_error(reference: list[float], other: list[float], error: float) -> None:
    assert relative_error(np.array(reference), np.array(other), {}) == error


def test_padded_positions_are_not_compared() -> None:
    mask = np.array([[1, 1], [1, 0]])
    reference = np.ones((2, 2, 3))
    other = reference.copy()
    other[1, 1] = NAN
    assert relative_error(reference, other, {"attention_mask": mask}) == 0
    assert relative_error(reference, other, {}) == INF
    # A decoder's outputs stand at the decoder's positions, whatever the encoder's mask says.
    feeds = {"attention_mask": mask, "decoder_input_ids": mask}
    assert relative_error(reference, other, feeds) == INF
    assert relative_error(reference, other, {**feeds, "decoder_attention_mask": mask}) == 0
    # `[batch, classes]` has no positions, though two classes and a length of two look alike.
    assert relative_error(reference[:, :, 0], other[:, :, 0], {"attention_mask": mask}) == INF


FLAT = "flat = Reshape(x, to_rows)  h = Gemm(flat, w, b)  y0 = Reshape(h, back)  y = Relu(y0)"
WEIGHTS = "float[4, 6] w, float[6] b, int64[2] to_rows = {-1, 4}, int64[3] back = {0, 0, 6}"


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_a_flattened_linear_layer_is_unflattened() -> None:
    body = FLAT.replace("back", "shape").replace(
        "y0 =", "s = Shape <start = 0, end = 2> (x)  shape = Concat <axis = 0> (s, n)  y0 ="
    )
    model = parsed(body, "float[B, S, 4] x", "float[B, S, 6] y", WEIGHTS + ", int64[1] n = {6}")
    prepare(model)
    assert kinds(model) == ["MatMul", "Add", "Relu"]
    assert [value.name for value in model.graph.initializers.values() if value.uses()] == ["w", "b"]
    prepare(model)
    assert kinds(model) == ["MatMul", "Add", "Relu"]


@pytest.mark.parametrize(
    "body",
    [
        FLAT.replace("Gemm(", "Gemm <alpha = 2.0> ("),
        FLAT.replace("{0, 0, 6}", "{0, 6}").replace("back", "flip"),
        FLAT.replace("y = Relu(y0)", "y = Relu(y0)  z = Relu(h)"),
    ],
)
def test_other_linear_layers_are_left_alone(body: str) -> None:
    outputs = "float[B, S, 6] y" + (", float[N, 6] z" if "z =" in body else "")
    model = parsed(body, "float[B, S, 4] x", outputs, WEIGHTS + ", int64[3] flip = {2, -1, 6}")
    before = kinds(model)
    prepare(model)
    assert kinds(model) == before


def test_what_is_added_to_scores_is_added_up_first() -> None:
    model = parsed(
        "s = MatMul(q, k)  t = Mul(s, c)  u = Add(t, bias)  v = Add(u, mask)  y = Softmax <axis = -1> (v)",
        "float[B, 2, S, 4] q, float[B, 2, 4, S] k, float[1, 2, S, S] bias, float[B, 1, S, S] mask",
        "float[B, 2, S, S] y",
        "float c = {0.5}",
    )
    prepare(model)
    assert kinds(model) == ["MatMul", "Mul", "Add", "Add", "Softmax"]
    scores = next(node for node in model.graph if node.op_type == "Softmax").inputs[0]
    assert scores is not None
    total = scores.producer()
    assert total is not None
    added = total.inputs[1].producer() if total.inputs[1] is not None else None
    assert added is not None
    assert [value.name for value in added.inputs if value is not None] == ["bias", "mask"]
    prepare(model)
    assert kinds(model) == ["MatMul", "Mul", "Add", "Add", "Softmax"]


def test_an_expand_that_repeats_nothing_goes() -> None:
    model = parsed(
        "s = Shape <start = 2, end = 3> (q)  to = Concat <axis = 0> (one, one, s, one)  e = Expand(mask, to)"
        "  f = Expand(row, to)  y = Add(e, f)",
        "float[B, 2, S, 4] q, float[B, 1, S, S] mask, float[B, 1, 1, S] row",
        "float[B, 1, S, S] y",
        "int64[1] one = {1}",
    )
    drop_idle_expands(model)
    assert kinds(model) == ["Shape", "Concat", "Expand", "Add"]
    assert [value.name for value in model.graph[-1].inputs if value is not None] == ["mask", "f"]
    drop_idle_expands(model)
    assert kinds(model) == ["Shape", "Concat", "Expand", "Add"]
