"""The form of a graph that TensorRT reads: operator set, types, and shapes of the inputs."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from compressor.errors import ErrorCode, InputError
from compressor.quantization import quantize_symmetric
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH
from compressor.targets import BuildOptions, Feeds, Precision
from compressor.targets.onnxruntime import ort_session
from compressor.targets.relative_error import relative_error
from compressor.targets.tensorrt.bindings import Features
from compressor.targets.tensorrt.graph import PreparedGraph, prepare, profile
from compressor.targets.trial_inputs import random_feeds
from graph_passes import load, save
from graph_passes.quantizers.faults import quantizer_faults
from tests.targets.graphs import Pruned, masked, parsed, pruned
from tests.targets.tensorrt.machines import NEW, OLD
from tests.zoo import text

ONLY_IN_SET_18 = [
    ('y = Resize <antialias = 1, mode = "linear"> (x, , s)', "float[1, 1, 4, 4] x", "float[1, 1, 2, 2] y", "s"),
    (
        "a, b = Split <axis = 1, num_outputs = 2> (x)  y = Concat <axis = 1> (b, a)",
        "float[B, 5] x",
        "float[B, 5] y",
        "",
    ),
    ("y = ReduceMax <noop_with_empty_axes = 1> (x)", "float[B, 5] x", "float[B, 5] y", ""),
    ("y = ReduceMax(x, axes)", "float[B, 2] x, int64[1] axes", "float[B, 1] y", ""),
    ('y = ScatterND <reduction = "max"> (x, i, u)', "float[4] x, int64[1, 1] i, float[1] u", "float[4] y", ""),
    ("y = Mish(x)", "float[4] x", "float[4] y", ""),
]


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


def run(graph: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """Outputs of a graph, with integers in the types that it takes."""
    session = ort_session.open_session(graph, ort_session.session_settings("cpu", 1))
    types = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
    inputs = {value.name: feeds[value.name].astype(types.get(value.type, np.float32)) for value in session.get_inputs()}
    return ort_session.run_session(session, inputs)


@pytest.mark.parametrize(("body", "inputs", "outputs", "weights"), ONLY_IN_SET_18)
def test_operators_that_set_17_cannot_express_are_refused_for_8_6(
    body: str, inputs: str, outputs: str, weights: str, tmp_path: Path
) -> None:
    graph, scales = tmp_path / "graph.onnx", "float[4] s = {1.0, 1.0, 0.5, 0.5}" if weights else ""
    save(parsed(body, inputs, outputs, scales), graph)
    with pytest.raises(InputError) as error:
        prepare(graph, tmp_path / "out.onnx", "fp32", OLD)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.UNSUPPORTED, graph)
    assert prepare(graph, tmp_path / "out.onnx", "fp32", NEW) == PreparedGraph()


def test_operator_set_23_is_refused_for_8_6(tmp_path: Path) -> None:
    graph = tmp_path / "graph.onnx"
    save(parsed("y = Identity(x)", "float[B] x", "float[B] y", opset=23), graph)
    with pytest.raises(InputError) as error:
        prepare(graph, tmp_path / "out.onnx", "fp32", OLD)
    assert (error.value.code, error.value.details["opset"]) == (ErrorCode.UNSUPPORTED, 23)


def test_for_8_6_a_graph_has_old_operators_and_32_bit_inputs(bert: Pruned, tmp_path: Path) -> None:
    prepared = prepare(bert.shrunk, tmp_path / "old.onnx", "fp16", OLD)
    model = load(tmp_path / "old.onnx")
    assert prepared == PreparedGraph(precision="fp16", opset=17)
    assert model.opset_imports[""] == 17
    assert {value.dtype for value in model.graph.inputs} == {ir.DataType.INT32}
    expected, outputs = (run(path, bert.inputs)["logits"] for path in (bert.shrunk, tmp_path / "old.onnx"))
    assert relative_error(expected, outputs, bert.inputs) <= 2e-2


def test_operators_of_set_18_compute_the_same_in_set_17(tmp_path: Path) -> None:
    body = "m = ReduceMean <keepdims = 1> (x, axes)  a, b = Split <axis = 2, num_outputs = 2> (m)  y = Add(a, b)"
    new, old = tmp_path / "new.onnx", tmp_path / "old.onnx"
    save(parsed(body, "float[B, S, 4] x", "float[B, 1, 2] y", "int64[1] axes = {1}"), new)
    prepare(new, old, "fp32", OLD)
    onnx.checker.check_model(onnx.load(old), full_check=True)
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)}
    np.testing.assert_array_equal(run(new, feeds)["y"], run(old, feeds)["y"])


def test_bfloat16_rounds_the_original_weights(tmp_path: Path) -> None:
    """Numbers beyond the range of fp16 keep their magnitude."""
    weight = np.array([[1e-9, 1e5], [1.001, -3.0]], np.float32)
    model = parsed("h = MatMul(x, w)  y = Add(h, h)", "float[B, 2] x", "float[B, 2] y", "float[2, 2] w")
    model.graph.initializers["w"].const_value = ir.tensor(weight, name="w")
    save(model, tmp_path / "graph.onnx")
    prepare(tmp_path / "graph.onnx", tmp_path / "half.onnx", "bf16", NEW)
    half = load(tmp_path / "half.onnx")
    rounded = half.graph.initializers["w"].const_value
    assert rounded is not None
    np.testing.assert_array_equal(rounded.numpy(), weight.astype(ml_dtypes.bfloat16))
    assert [value.dtype for value in (*half.graph.inputs, *half.graph.outputs)] == [ir.DataType.FLOAT] * 2
    onnx.checker.check_model(onnx.load(tmp_path / "half.onnx"), full_check=True)


def test_a_whole_graph_in_bfloat16_has_consistent_types(bert: Pruned, tmp_path: Path) -> None:
    prepared = prepare(bert.shrunk, tmp_path / "half.onnx", "bf16", NEW)
    assert prepared == PreparedGraph(scaled_queries=True, precision="bf16")
    types = {value.dtype for value in load(tmp_path / "half.onnx").graph.initializers.values()}
    assert ir.DataType.BFLOAT16 in types
    assert ir.DataType.FLOAT16 not in types
    onnx.checker.check_model(onnx.load(tmp_path / "half.onnx"), full_check=True)


def test_a_quantized_graph_keeps_its_types(tmp_path: Path) -> None:
    body = "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)"
    save(parsed(body, "float[B] x", "float[B] y", "float s = {0.5}, int8 z = {0}"), tmp_path / "graph.onnx")
    prepared = prepare(tmp_path / "graph.onnx", tmp_path / "out.onnx", "fp16", NEW)
    assert prepared == PreparedGraph(quantized=True)
    assert [node.op_type for node in load(tmp_path / "out.onnx").graph] == ["QuantizeLinear", "DequantizeLinear"]


@pytest.mark.parametrize("supported", [pytest.param(OLD, marks=pytest.mark.zoo), NEW])
def test_a_symmetric_graph_computes_the_same_in_the_form_of_a_version(
    supported: Features, bert: Pruned, tmp_path: Path
) -> None:
    quantized = quantize_symmetric(bert.shrunk, [bert.inputs], tmp_path / "int8.onnx")
    prepared = prepare(quantized.path, tmp_path / "out.onnx", "int8", supported)
    model = load(tmp_path / "out.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"), full_check=True)
    weights = [value for value in model.graph.initializers.values() if len(value.shape or ()) == 2]
    has_int8_weights = ir.DataType.INT8 in {value.dtype for value in weights}
    assert prepared.quantized
    if supported is OLD:
        assert (prepared.opset, prepared.weights_inside) == (17, len(quantized.products))
        assert not has_int8_weights
    else:
        assert prepared == PreparedGraph(quantized=True)
        assert has_int8_weights
        assert quantizer_faults(model) == []
    expected, outputs = (run(path, bert.inputs)["logits"] for path in (quantized.path, tmp_path / "out.onnx"))
    assert relative_error(expected, outputs, bert.inputs) <= 1e-2


def test_zero_points_that_are_not_zero_are_refused(tmp_path: Path) -> None:
    body = "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)"
    save(parsed(body, "float[B] x", "float[B] y", "float s = {0.5}, uint8 z = {128}"), tmp_path / "graph.onnx")
    for precision in ("int8", "fp32"):
        with pytest.raises(InputError) as error:
            prepare(tmp_path / "graph.onnx", tmp_path / "out.onnx", precision, NEW)
        assert error.value.code is ErrorCode.UNSUPPORTED_MODEL


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_graph_in_floats_is_refused_in_8_bits(precision: Precision, bert: Pruned, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prepare(bert.shrunk, tmp_path / "out.onnx", precision, NEW)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.UNSUPPORTED_MODEL, bert.shrunk)


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        g (float[B, 4] x) => (float[B, 4] y) { y = own.twice(x) }
        <domain: "own", opset_import: ["" : 18]> twice (a) => (b) { b = Add(a, a) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "graph.onnx")
    assert prepare(tmp_path / "graph.onnx", tmp_path / "out.onnx", "fp32", NEW) == PreparedGraph(inlined=1)
    out = load(tmp_path / "out.onnx")
    assert ([node.op_type for node in out.graph], dict(out.functions)) == (["Add"], {})


@pytest.mark.parametrize(
    ("supported", "precision", "tolerance"),
    [(OLD, "fp32", 1e-5), pytest.param(NEW, "fp16", 2e-2, marks=pytest.mark.zoo)],
)
def test_block_sparse_attention_is_inlined(
    supported: Features, precision: Precision, tolerance: float, tmp_path: Path
) -> None:
    graphs = masked()
    assert load(graphs.shrunk).functions
    prepare(graphs.shrunk, tmp_path / "out.onnx", precision, supported)
    assert not load(tmp_path / "out.onnx").functions
    for length in (7, 21, 32):
        feeds = {name: value.numpy() for name, value in text(3, length).items()}
        expected, outputs = (run(path, feeds)["logits"] for path in (graphs.reference, tmp_path / "out.onnx"))
        assert relative_error(expected, outputs, feeds) <= tolerance


def test_profiles_keep_fixed_axes_and_separate_memories_from_tokens() -> None:
    model = parsed(
        "y = Identity(x)",
        "float[B, S, 4] x, int64[B, S] ids, float[B, past_length, 4] past, float[B, M, 4] memory_0, float[2, 3] fixed,"
        " int64[B, past_and_new] mask",
        "float[B, S, 4] y",
    )
    model.graph.inputs[-1].shape = ir.Shape(["B", "past_length + S"])
    shapes = profile(model, BuildOptions(batch=(1, 8, 32), seq=(1, 128, 384), memory=(0, 5, 9)))
    assert shapes["ids"] == ((1, 1), (8, 128), (32, 384))
    assert shapes["x"] == ((1, 1, 4), (8, 128, 4), (32, 384, 4))
    assert shapes["past"] == shapes["memory_0"] == ((1, 0, 4), (8, 5, 4), (32, 9, 4))
    assert shapes["fixed"] == ((2, 3),) * 3
    assert shapes["mask"] == shapes["ids"], "an axis of past and new tokens counts tokens"


@pytest.mark.parametrize(
    ("inputs", "tensor", "kind"),
    [
        ("float[B, S, 4] x, float[B, past_length, 4] past", "past", "past"),
        ("float[B, S, 4] x, float[B, M, 4] memory_0", "memory_0", "memory"),
    ],
)
def test_caches_and_memories_of_unknown_length_are_refused(inputs: str, tensor: str, kind: str) -> None:
    with pytest.raises(InputError) as error:
        profile(parsed("y = Identity(x)", inputs, "float[B, S, 4] y"), BuildOptions())
    assert error.value.code is ErrorCode.UNSUPPORTED
    assert error.value.details == {"tensor": tensor, "kind": kind}


def test_profiles_have_the_memory_lengths_of_the_model() -> None:
    model = parsed("y = Identity(x)", "float[B, S, 4] x, float[B, M, 4] memory_0", "float[B, S, 4] y")
    model.metadata_props.update({MEMORY_LENGTH: "64", MAX_POSITIONS: "100"})
    smallest, _, largest = profile(model, BuildOptions(memory=(0, 7, 7)))["memory_0"]
    for seq in (1, 36, 90):
        length = random_feeds(model, 2, seq)["memory_0"].shape[1]
        assert smallest[1] <= length <= largest[1]


def test_messages() -> None:
    """The text of reports on a prepared graph."""
    assert str(PreparedGraph()) == "graph unchanged"
    assert str(PreparedGraph(scaled_queries=True, precision="bf16")) == (
        "queries scaled instead of scores; converted to bf16, inputs and outputs unchanged"
    )
    assert str(PreparedGraph(inlined=2, quantized=True, opset=17)) == (
        "2 local functions inlined; quantized types kept; written in operator set 17 with 32-bit inputs"
    )
