"""Building for TensorRT: all that can be known of it without a GPU, against the real bindings of every version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import compressor
from benchmarks import gpu
from compressor import report as reports
from compressor.config.run import make
from compressor.errors import InputError, MismatchError, TargetMissingError, UsageError
from compressor.results import BuiltLayer, EngineBuild
from compressor.run import rebuild, verify
from compressor.run.build_options import build_options
from compressor.segment_memory import LENGTH, POSITIONS
from compressor.targets import BuildOptions, Precision, span, target
from compressor.targets.cuda import Device, driver
from compressor.targets.onnxruntime import ort_session
from compressor.targets.random_inputs import random_feeds
from compressor.targets.relative_error import relative_error
from compressor.targets.tensorrt import bindings, inspector, timing_cache
from compressor.targets.tensorrt import target as trt
from compressor.targets.tensorrt.bindings import Api
from compressor.targets.tensorrt.graph import prepare, profile
from compressor.targets.tensorrt.metadata import Metadata, digest, papers_of, read
from graph_passes import find_attention, load, save, shrink
from tests import folders
from tests.command import compress
from tests.engines import FakeEngine, Pruned, parsed, pruned
from tests.reports import report as made_up
from tests.reports import speed
from tests.test_lower_block_sparse import exported
from tests.zoo import text

HERE = Path(__file__).parent
BINDINGS = Path(os.environ.get("TENSORRT_BINDINGS", HERE.parent / ".venv" / "tensorrt"))
"""A folder a version with the package `tensorrt_bindings`; `make test` fills it."""
VERSIONS = ("8.6", "10.16", "11.4")
OLD = Api("8.6.1", strongly_typed=False, wide=False, precisions=("fp32", "fp16"), tactics=())
NEW = Api("10.16.1", strongly_typed=True, wide=True, precisions=("fp32", "fp16", "bf16"), tactics=())
H200 = Device("NVIDIA H200", (9, 0), 1 << 37)
Cap = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


def outputs(graph: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    opened = ort_session.open_session(graph, ort_session.describe("cpu", 1))
    kinds = {"tensor(int32)": np.int32}
    return ort_session.run(
        opened, {v.name: inputs[v.name].astype(kinds.get(v.type, np.int64)) for v in opened.get_inputs()}
    )


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usual", "also", "expected"),
    [
        ((1, 8, 32), (), (1, 8, 32)),
        ((128, 384), (), (128, 384, 384)),
        ((8,), (1, 3), (1, 8, 8)),
        ((4,), (64,), (4, 4, 64)),
    ],
)
def test_the_usual_size_is_the_middle_of_those_timed(
    usual: tuple[int, ...], also: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    assert span(usual, also) == expected


def test_a_run_builds_for_what_it_proves_times_and_scores() -> None:
    recipe = make("model", None, {"batch": "8,1,32", "seq": "128,384", "workspace": "64", "target": "trt"})
    proven = [{"input_ids": np.zeros((3, 5)), "memory_0": np.zeros((3, 7, 4))}]
    rows: Any = SimpleNamespace(test={"length": [400, 9]}, task=SimpleNamespace(beams=1, longest=0))
    found = build_options(recipe, (128, 384), proven, rows)
    assert (found.batch, found.seq, found.memory) == ((1, 8, 32), (1, 384, 400), (0, 7, 7))
    assert found.workspace == 64 << 20
    made: Any = SimpleNamespace(test={"length": [9]}, task=SimpleNamespace(beams=5, longest=512))
    found = build_options(recipe, (128, 384), proven, made)
    assert (found.batch, found.seq) == ((1, 8, 5 * 32), (1, 384, 512)), "beams, and as long as they may get"
    assert build_options(recipe, (128, 384), proven).seq == (1, 384, 384)


def test_profiles_leave_fixed_axes_and_know_caches() -> None:
    model = parsed(
        "y = Identity(x)",
        "float[B, S, 4] x, int64[B, S] ids, float[B, past_length, 4] past, float[B, M, 4] memory_0, float[2, 3] fixed,"
        " int64[B, past_and_new] mask",
        "float[B, S, 4] y",
    )
    model.graph.inputs[-1].shape = ir.Shape(["B", "past_length + S"])
    found = profile(model, BuildOptions(batch=(1, 8, 32), seq=(1, 128, 384), memory=(0, 5, 9)))
    assert found["ids"] == ((1, 1), (8, 128), (32, 384))
    assert found["x"] == ((1, 1, 4), (8, 128, 4), (32, 384, 4))
    assert found["past"] == found["memory_0"] == ((1, 0, 4), (8, 5, 4), (32, 9, 4))
    assert found["fixed"] == ((2, 3),) * 3
    assert found["mask"] == found["ids"], "the past and what is new is not the past alone"
    with pytest.raises(InputError, match="past: is a key/value cache, and nothing says how long it may be"):
        profile(model, BuildOptions())


def test_memories_may_be_as_long_as_the_model_keeps_them() -> None:
    model = parsed("y = Identity(x)", "float[B, S, 4] x, float[B, M, 4] memory_0", "float[B, S, 4] y")
    with pytest.raises(InputError, match="memory_0: is a memory, and nothing says how long it may be"):
        profile(model, BuildOptions())
    model.metadata_props.update({LENGTH: "64", POSITIONS: "100"})
    least, _, most = profile(model, BuildOptions(memory=(0, 7, 7)))["memory_0"]
    for seq, memory in ((1, 64), (36, 64), (90, 10)):
        shape = random_feeds(model, 2, seq)["memory_0"].shape
        assert shape == (2, memory, 4)
        assert least[1] <= memory <= most[1]
    assert random_feeds(model, 2, 8, memory=3)["memory_0"].shape == (2, 3, 4)


# --- the graph -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "inputs", "outputs", "weights"),
    [
        ('y = Resize <antialias = 1, mode = "linear"> (x, , s)', "float[1, 1, 4, 4] x", "float[1, 1, 2, 2] y", "s"),
        (
            "a, b = Split <axis = 1, num_outputs = 2> (x)  y = Concat <axis = 1> (b, a)",
            "float[B, 5] x",
            "float[B, 5] y",
            "",
        ),
        ("y = ReduceMax <noop_with_empty_axes = 1> (x)", "float[B, 5] x", "float[B, 5] y", ""),
        ('y = ScatterND <reduction = "max"> (x, i, u)', "float[4] x, int64[1, 1] i, float[1] u", "float[4] y", ""),
        ("y = Mish(x)", "float[4] x", "float[4] y", ""),
    ],
)
def test_what_set_17_cannot_say_is_refused(body: str, inputs: str, outputs: str, weights: str, tmp_path: Path) -> None:
    scales = "float[4] s = {1.0, 1.0, 0.5, 0.5}" if weights else ""
    save(parsed(body, inputs, outputs, scales), tmp_path / "graph.onnx")
    with pytest.raises(InputError, match="is written as only operator set 18 allows"):
        prepare(tmp_path / "graph.onnx", tmp_path / "out.onnx", "fp32", OLD)


def test_for_8_6_a_graph_has_old_operators_and_32_bit_inputs(bert: Pruned, tmp_path: Path) -> None:
    done, quantized = prepare(bert.shrunk, tmp_path / "old.onnx", "fp16", OLD)
    model = load(tmp_path / "old.onnx")
    assert model.opset_imports[""] == 17
    assert {value.dtype for value in model.graph.inputs} == {ir.DataType.INT32}
    assert (quantized, "converted to fp16" in done, "operator set 17" in done) == (False, True, True)
    expected, got = (outputs(path, bert.inputs)["logits"] for path in (bert.shrunk, tmp_path / "old.onnx"))
    assert relative_error(expected, got, bert.inputs) <= 2e-2


REDUCED = "m = ReduceMean <keepdims = 1> (x, axes)  a, b = Split <axis = 2, num_outputs = 2> (m)  y = Add(a, b)"


def test_what_set_18_writes_otherwise_is_written_as_in_17(tmp_path: Path) -> None:
    save(parsed(REDUCED, "float[B, S, 4] x", "float[B, 1, 2] y", "int64[1] axes = {1}"), tmp_path / "new.onnx")
    prepare(tmp_path / "new.onnx", tmp_path / "old.onnx", "fp32", OLD)
    old = onnx.load(tmp_path / "old.onnx")
    onnx.checker.check_model(old, full_check=True)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    one, other = (
        ort_session.run(ort_session.open_session(tmp_path / name, ort_session.describe("cpu", 1)), {"x": x})["y"]
        for name in ("new.onnx", "old.onnx")
    )
    np.testing.assert_array_equal(one, other)


def test_what_8_6_cannot_read_is_named(tmp_path: Path) -> None:
    graph = tmp_path / "graph.onnx"
    save(parsed("y = Identity(x)", "float[B] x", "float[B] y", opset=23), graph)
    with pytest.raises(InputError, match=r"is of operator set 23, and TensorRT 8\.6\.1 reads up to 17"):
        prepare(graph, tmp_path / "out.onnx", "fp32", OLD)
    save(parsed("y = ReduceMax(x, axes)", "float[B, 2] x, int64[1] axes", "float[B, 1] y"), graph)
    with pytest.raises(InputError, match=r"ReduceMax .* only operator set 18 allows"):
        prepare(graph, tmp_path / "out.onnx", "fp32", OLD)
    assert prepare(graph, tmp_path / "out.onnx", "fp32", NEW) == ("the graph as it is", False)


def test_bfloat16_rounds_the_numbers_that_were_given(tmp_path: Path) -> None:
    weight = np.array([[1e-9, 1e5], [1.001, -3.0]], np.float32)
    model = parsed("h = MatMul(x, w)  y = Add(h, h)", "float[B, 2] x", "float[B, 2] y", "float[2, 2] w")
    model.graph.initializers["w"].const_value = ir.tensor(weight, name="w")
    save(model, tmp_path / "graph.onnx")
    prepare(tmp_path / "graph.onnx", tmp_path / "half.onnx", "bf16", NEW)
    half = load(tmp_path / "half.onnx")
    kept = half.graph.initializers["w"].const_value
    assert kept is not None
    np.testing.assert_array_equal(kept.numpy(), weight.astype(ml_dtypes.bfloat16))
    assert [value.dtype for value in (*half.graph.inputs, *half.graph.outputs)] == [ir.DataType.FLOAT] * 2
    onnx.checker.check_model(onnx.load(tmp_path / "half.onnx"), full_check=True)


def test_a_whole_graph_in_bfloat16_has_consistent_types(bert: Pruned, tmp_path: Path) -> None:
    done, _ = prepare(bert.shrunk, tmp_path / "half.onnx", "bf16", NEW)
    model = load(tmp_path / "half.onnx")
    assert "queries scaled in place of scores; converted to bf16" in done
    kinds = {value.dtype for value in model.graph.initializers.values()}
    assert ir.DataType.BFLOAT16 in kinds
    assert ir.DataType.FLOAT16 not in kinds
    onnx.checker.check_model(onnx.load(tmp_path / "half.onnx"), full_check=True)


def test_a_quantized_graph_passes_through(tmp_path: Path) -> None:
    body = "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)"
    save(parsed(body, "float[B] x", "float[B] y", "float s = {0.5}, int8 z = {0}"), tmp_path / "graph.onnx")
    assert prepare(tmp_path / "graph.onnx", tmp_path / "out.onnx", "fp16", NEW) == ("quantized as it came", True)
    assert [node.op_type for node in load(tmp_path / "out.onnx").graph] == ["QuantizeLinear", "DequantizeLinear"]


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        g (float[B, 4] x) => (float[B, 4] y) { y = own.twice(x) }
        <domain: "own", opset_import: ["" : 18]> twice (a) => (b) { b = Add(a, a) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "graph.onnx")
    done, _ = prepare(tmp_path / "graph.onnx", tmp_path / "out.onnx", "fp32", NEW)
    out = load(tmp_path / "out.onnx")
    assert done == "1 local functions inlined"
    assert ([node.op_type for node in out.graph], dict(out.functions)) == (["Add"], {})


@pytest.mark.parametrize(("api", "precision", "tolerance"), [(OLD, "fp32", 1e-5), (NEW, "fp16", 2e-2)])
def test_block_sparse_attention_is_inlined(api: Api, precision: Precision, tolerance: float, tmp_path: Path) -> None:
    plan, reference = exported("bert", "eager", 18)
    save(shrink(load(reference), plan).model, tmp_path / "graph.onnx")
    assert load(tmp_path / "graph.onnx").functions
    prepare(tmp_path / "graph.onnx", tmp_path / "out.onnx", precision, api)
    assert not load(tmp_path / "out.onnx").functions
    for length in (7, 21, 32):
        feeds = {name: value.numpy() for name, value in text(3, length).items()}
        expected, got = (outputs(path, feeds)["logits"] for path in (reference, tmp_path / "out.onnx"))
        assert relative_error(expected, got, feeds) <= tolerance


# --- the engine's papers ---------------------------------------------------------------------------------------------


def papers(plan: Path, **more: Any) -> Metadata:
    plan.write_bytes(b"an engine")
    facts: dict[str, Any] = {
        "tensorrt": "10.16.1",
        "gpu": H200.name,
        "capability": H200.capability,
        "precision": "fp16",
        "profiles": {"ids": ((1, 1), (8, 128), (32, 384))},
        "inputs": {"ids": "int64"},
        "outputs": {"logits": "float32"},
        "plan": digest(plan),
        "model": "sha256:0",
        "hardware_compatible": False,
        "version_compatible": False,
        "attentions": 12,
        "fused": 12,
        "optimization": "",
        "session": {},
        "built": EngineBuild(seconds=1, plan_bytes=9, weight_bytes=None, activation_bytes=0, attention=""),
    }
    found = Metadata(**{**facts, **more})
    papers_of(plan).write_text(found.model_dump_json())
    return found


def test_metadata_is_read_back(tmp_path: Path) -> None:
    assert papers(tmp_path / "engine.plan") == read(tmp_path / "engine.plan")


@pytest.mark.parametrize(
    ("more", "device", "version", "refused"),
    [
        ({}, H200, "10.16.1", None),
        (
            {},
            Device("NVIDIA A10", (8, 6), 1),
            "10.16.1",
            r"built for another GPU, NVIDIA H200 \(SM 9\.0\), and this is",
        ),
        ({}, Device("NVIDIA H100", (9, 0), 1), "10.16.1", "another GPU"),
        ({"hardware_compatible": True}, Device("NVIDIA A10", (8, 6), 1), "10.16.1", None),
        ({"hardware_compatible": True}, Device("Tesla T4", (7, 5), 1), "10.16.1", "another GPU"),
        ({}, H200, "10.17.0", r"was built by TensorRT 10\.16\.1, and this is 10\.17\.0"),
        ({"version_compatible": True}, H200, "10.17.0", None),
        ({"version_compatible": True}, H200, "10.9.0", "was built by"),
        ({"version_compatible": True}, H200, "11.0.0", None),
        ({"version_compatible": True}, H200, "12.0.0", "was built by"),
        ({"version_compatible": True, "tensorrt": "8.6.1"}, H200, "10.3.0", None),
        ({"version_compatible": True, "tensorrt": "8.6.1"}, H200, "11.0.0", "was built by"),
    ],
)
def test_an_engine_of_another_machine_is_refused(
    more: dict[str, Any], device: Device, version: str, refused: str | None, tmp_path: Path
) -> None:
    plan = tmp_path / "engine.plan"
    found = papers(plan, **more)
    if refused is None:
        found.check_machine(plan, device, version)
    else:
        with pytest.raises(InputError, match=f"{refused}.*compress build OUT --target trt"):
            found.check_machine(plan, device, version)


def test_a_damaged_engine_never_reaches_tensorrt(tmp_path: Path) -> None:
    plan = tmp_path / "engine.plan"
    with pytest.raises(InputError, match=r"engine\.plan: no such engine"):
        trt.load(plan)
    plan.write_bytes(b"an engine")
    with pytest.raises(InputError, match=r"engine\.plan\.json, which says what it was built for, is missing"):
        trt.load(plan)
    papers(plan)
    plan.write_bytes(b"an engin")
    with pytest.raises(InputError, match="is damaged, or was not built with"):
        trt.load(plan)
    papers_of(plan).write_text("{}")
    with pytest.raises(InputError, match=r"engine\.plan\.json: tensorrt: Field required"):
        trt.load(plan)


@pytest.mark.parametrize(
    ("shapes", "refused"),
    [
        ({"ids": (32, 384), "other": (9,)}, None),
        ({"ids": (33, 384)}, r"ids: is \[33, 384\], and the engine takes \[1, 1\] to \[32, 384\]; build it for such"),
        ({"ids": (1, 0)}, "ids: is"),
        ({"ids": (1,)}, "ids: is"),
        ({}, "wants an input named ids; give ids"),
    ],
)
def test_sizes_outside_the_profile_are_named(
    shapes: dict[str, tuple[int, ...]], refused: str | None, tmp_path: Path
) -> None:
    found = papers(tmp_path / "engine.plan")
    if refused is None:
        found.check_shapes(shapes)
    else:
        with pytest.raises(InputError, match=refused):
            found.check_shapes(shapes)


# --- the timing cache ------------------------------------------------------------------------------------------------


def test_a_timing_cache_is_used_again_unless_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "timings"
    first = timing_cache.opened(path, "10.16", H200)
    assert (first.readable, first.told) == (False, "")
    timed: Any = SimpleNamespace(get_timing_cache=lambda: SimpleNamespace(serialize=lambda: b"times"))
    assert first.keep(timed) == ""
    assert timing_cache.opened(path, "10.16", H200).readable
    other = timing_cache.opened(path, "11.4", H200)
    assert not other.readable
    assert "was of TensorRT 10.16 on NVIDIA H200" in other.told
    first.keep(timed)
    path.write_bytes(b"time")
    torn = timing_cache.opened(path, "10.16", H200)
    assert (torn.readable, torn.told.endswith("was damaged")) == (False, True)
    assert not path.exists()
    path.write_bytes(b"of another tool")
    timing_cache._seal_of(path).unlink()
    assert timing_cache.opened(path, "10.16", H200).readable
    shutil.rmtree(path.parent)
    assert first.keep(timed) == f", its timings not kept in {path} (No such file or directory)"


def test_a_timing_cache_that_cannot_be_written_is_refused_before_the_build(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "timings", tmp_path):
        with pytest.raises(InputError, match=r"cannot keep TensorRT's timings there .*--timing-cache"):
            timing_cache.opened(path, "10.16", H200)


def test_every_gpu_and_version_has_a_timing_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = {timing_cache.opened(None, version, H200).path for version in ("8.6.1", "10.16")}
    assert len(made) == 2
    assert {path.parent for path in made} == {tmp_path / "compressor"}


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "fused"),
    [
        (BuiltLayer(name="_gemm_mha_v2_myl0_5", kind="kgen"), True),
        (BuiltLayer(name="x", tactic="fmha_v2_flash_attention_fp16_64_64_S_64_sm90_kernel_nl"), True),
        (BuiltLayer(name="__myl_MatMul", nodes="/encoder/mha/MatMul"), False),
        (BuiltLayer(name="{ForeignNode[/encoder/attention/mha/MatMul]}"), False),
        (BuiltLayer(name="[HostToDeviceCopy] alphamhax"), False),
        (BuiltLayer(name="x", tactic="fmhaSm90Kernel"), True),
        (BuiltLayer(name="__mye12_gemv_mha_v1_0"), True),
        (BuiltLayer(name="Reformatting CopyNode for Output Tensor 0 to _gemm_mha_v2", kind="Reformat"), False),
        (BuiltLayer(name="mha.MatMul_3", nodes="mha.MatMul_3"), False),
    ],
)
def test_a_fused_attention_is_known_by_its_kernel(layer: BuiltLayer, fused: bool) -> None:
    assert inspector.is_fused(layer) is fused


def test_the_table_of_layers_says_where_attention_was_lost(bert: Pruned) -> None:
    sites = find_attention(load(bert.shrunk))
    nodes = [str(producer.name) for site in sites if (producer := site.output.producer()) is not None]
    told = {"Name": "_gemm_mha_v2", "LayerType": "kgen", "Metadata": f"[ONNX Layer: a]\x1e[ONNX Layer: {nodes[0]}]"}
    table = inspector.layers(json.dumps({"Layers": [told, "reformat"], "Bindings": []}))
    assert [layer.name for layer in table] == ["_gemm_mha_v2", "reformat"]
    count, of, line = inspector.describe(table, sites, (9, 0), "fp16")
    assert (count, of) == (1, len(sites))
    assert line.startswith(f"fused attention in 1 of {len(sites)} attention layers (not in ")
    assert "heads 8 wide" in line
    assert "needs SM 7.5, this GPU has 7.0" in inspector.describe(table[1:], sites, (7, 0), "fp16")[2]
    assert "needs fp16 or bf16" in inspector.describe(table[1:], sites, (9, 0), "fp32")[2]
    kept = (len(sites), len(sites), f"fused attention kept in each of {len(sites)} attention layers")
    fused = [BuiltLayer(name="_gemm_mha_v2", nodes=node) for node in nodes]
    assert inspector.describe(fused, sites, (9, 0), "fp16") == kept
    assert inspector.describe([BuiltLayer(name="_gemm_mha_v2")] * len(sites), sites, (9, 0), "fp16") == kept
    assert inspector.describe(fused[:1] * len(sites), sites, (9, 0), "fp16")[0] == 1, "one attention of several kernels"
    other = BuiltLayer(name="_gemm_mha_v2", nodes="its softmax")
    assert inspector.describe([fused[0], other], sites, (9, 0), "fp16")[0] == 1, (
        "of which one names another of its nodes"
    )
    assert inspector.describe([other] * len(sites), sites, (9, 0), "fp16") == kept, (
        "where names are none that are known"
    )


def test_what_tensorrt_does_not_show_is_not_called_lost(bert: Pruned) -> None:
    sites = find_attention(load(bert.shrunk))
    nodes = [str(producer.name) for site in sites if (producer := site.output.producer()) is not None]
    whole = BuiltLayer(name="{ForeignNode[/embeddings/Gather.../classifier/Gemm]}", kind="Myelin")
    count, of, line = inspector.describe([whole], sites, (9, 0), "fp16")
    assert (count, of) == (0, 0)
    assert line.startswith(
        f"whether attention is fused cannot be told of {len(sites)} of {len(sites)} attention layers"
    )
    alone = [BuiltLayer(name=node) for node in nodes]
    assert inspector.describe([whole, *alone], sites, (9, 0), "fp16")[:2] == (0, len(sites)), (
        "those that are shown are lost"
    )
    torn = json.dumps({"Layers": [{"Name": "_gemm_mha_v2", "Metadata": f"{nodes[0]}|{nodes[1]}"}]}).replace("|", "\x1e")
    assert inspector.layers(torn)[0].nodes == "\x1e".join(nodes[:2]), "control characters as they are"
    for odd in ("", "no layers", "[]"):
        assert inspector.describe(inspector.layers(odd), sites, (9, 0), "fp16")[:2] == (0, 0), odd
    listed = BuiltLayer(name="{ForeignNode[a...b]}", nodes=nodes[0])
    assert inspector.describe([listed], sites, (9, 0), "fp16")[:2] == (0, len(sites) - 1)


def test_layers_compute_in_the_types_of_the_graph() -> None:
    kinds: Any = SimpleNamespace(FLOAT="float", HALF="half", INT32="int")
    outputs = [SimpleNamespace(name=name, dtype="float", is_shape_tensor=name == "size") for name in "abc"]
    outputs.append(SimpleNamespace(name="size", dtype="float", is_shape_tensor=True))
    layers = [
        SimpleNamespace(
            type=SimpleNamespace(name="MATRIX_MULTIPLY"),
            num_outputs=1,
            precision=None,
            get_output=lambda _, one=one: one,
        )
        for one in outputs
    ]
    network = SimpleNamespace(num_layers=len(layers), get_layer=layers.__getitem__)
    types = {"a": ir.DataType.FLOAT16, "b": ir.DataType.INT64}
    bindings.keep_types(SimpleNamespace(DataType=kinds), network, types)  # type: ignore[arg-type]
    assert [layer.precision for layer in layers] == ["half", None, "float", None]


@pytest.mark.parametrize(
    ("number", "version"), [(8600, "8.6.0"), (8601, "8.6.1"), (101601, "10.16.1"), (110400, "11.4.0"), (0, "8.6.1")]
)
def test_the_version_is_the_librarys(number: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(getInferLibVersion=lambda: number))
    assert bindings._version("8.6.1") == version


# --- without a GPU ---------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said_and_tensorrt_is_not_asked(tmp_path: Path) -> None:
    with pytest.raises(TargetMissingError, match=r"trt: there is no NVIDIA GPU here.*compress build OUT --target trt"):
        target("trt")(tmp_path / "model.onnx", tmp_path / "model.plan")
    with pytest.raises(UsageError, match="--provider cpu: TensorRT runs on a GPU"):
        trt.check("cpu", "fp32")
    with pytest.raises(UsageError, match="TensorRT runs on a GPU"):
        make("model", None, {"target": "trt", "provider": "cpu"})
    assert "tensorrt" not in sys.modules


def test_what_the_driver_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: str) -> None: ...

        def cuInit(self, flags: int) -> int:  # noqa: N802
            return 803

        def cuGetErrorString(self, code: int, said: Any) -> None:  # noqa: N802
            said._obj.value = b"system has unsupported display driver / cuda driver combination"

    monkeypatch.setattr("ctypes.CDLL", Library)
    driver.cache_clear()
    with pytest.raises(TargetMissingError, match=r"cuInit \(error 803: system has unsupported display driver"):
        trt.check(None, "fp32")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run for TensorRT leaves where there is no GPU."""
    place = tmp_path_factory.mktemp("trt")
    folders.save(folders.bert(), place / "model")
    asked = {"target": "trt", "precision": "fp16", "batch": (1, 2), "seq": (8,), "seconds": 0.01, "out": place / "out"}
    recipe = make(str(place / "model"), None, asked)
    report = compressor.compress(recipe)
    assert report.missing is not None
    return place / "out"


def copied(out: Path, to: Path) -> Path:
    return Path(shutil.copytree(out, to))


def test_a_run_without_a_gpu_leaves_proven_graphs(out: Path) -> None:
    report = reports.load(out)
    assert report.verdict.startswith("No trt engine was built, ONNX Runtime stood in for it")
    assert (report.target, report.precision, report.recipe["target"], report.recipe["precision"]) == (
        *("ort", "fp32"),
        *("trt", "fp16"),
    )
    assert all(proof.holds for proof in report.proofs)
    assert set(report.graphs) == {"model.onnx", "dense.onnx"}
    assert all((out / name).is_file() for name in (*report.graphs, "engine.onnx"))
    assert any(note.startswith("trt: there is no NVIDIA GPU here") and "fp32" in note for note in report.notes)


def test_the_command_ends_with_what_is_missing(
    out: Path, tmp_path: Path, capfd: Cap, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reports.load(out)
    monkeypatch.setattr("compressor.run.pipeline.compress", lambda recipe, view: report)
    done = compress(capfd, out.parent / "model", "--target", "trt", "-o", tmp_path / "a b", "--quiet")
    assert done.code == 6
    assert done.error.startswith("trt: there is no NVIDIA GPU here")
    assert f"say compress build {out} --target trt" in done.error


def test_build_needs_the_target_and_leaves_the_folder(out: Path, tmp_path: Path, capfd: Cap) -> None:
    there = copied(out, tmp_path / "there")
    before = {path.name: path.stat().st_mtime_ns for path in there.iterdir()}
    done = compress(capfd, "build", there, "--target", "trt")
    assert (done.code, done.error.startswith("trt: there is no NVIDIA GPU here")) == (6, True)
    assert {path.name: path.stat().st_mtime_ns for path in there.iterdir()} == before


def test_build_takes_a_folder_made_elsewhere(out: Path, tmp_path: Path, capfd: Cap) -> None:
    there = copied(out, tmp_path / "there")
    (there / "engine.onnx").unlink()
    done = compress(capfd, "build", there, "--target", "ort", "--seconds", "0.01", "--batch", "2", "--json", "--quiet")
    assert done.code == 0, done.err
    report = reports.load(there)
    assert report.model_dump(mode="json") == done.json
    assert (report.missing, report.target, report.recipe["batch"]) == (None, "ort", [2])
    assert [(row.batch, row.seq) for row in report.speeds] == [(2, 8)]
    assert len(report.proofs) == 6
    assert all(proof.holds for proof in report.proofs)
    assert not any(note.startswith("trt: ") for note in report.notes)
    assert (there / "engine.onnx").is_file()
    assert {path.name for path in there.iterdir()} == {path.name for path in out.iterdir()}


def test_build_ends_as_the_run_does_where_its_gate_failed(out: Path, tmp_path: Path, capfd: Cap) -> None:
    there = copied(out, tmp_path / "there")
    report = reports.load(there)
    reports.write(report.model_copy(update={"gate": "failed", "recipe": {**report.recipe, "max_drop": 0.01}}), there)
    done = compress(capfd, "build", there, "--target", "ort", "--seconds", "0.01", "--batch", "2", "--quiet")
    assert done.code == 4
    assert "worse than --max-drop 0.01 allows" in done.error
    assert (reports.load(there).gate, reports.load(there).target) == ("failed", "ort")


def test_build_says_nothing_of_a_dense_engine_that_it_did_not_build(out: Path, tmp_path: Path, capfd: Cap) -> None:
    there = copied(out, tmp_path / "there")
    report = reports.load(there)
    reports.write(report.model_copy(update={"graphs": {"model.onnx": report.graphs["model.onnx"]}}), there)
    (there / "dense.onnx").unlink()
    (there / "engine.plan").touch()
    papers_of(there / "engine.plan").touch()
    assert compress(capfd, "build", there, "--target", "ort", "--quiet").code == 0
    found = reports.load(there)
    assert (found.dense.parameters, found.dense.macs) == (report.dense.parameters, report.dense.macs)
    assert (found.dense.peak_memory_bytes, found.dense.optimization, found.speeds) == (None, "not built", ())
    assert any("compared with no dense one" in note for note in found.notes)
    assert papers_of(there / "engine.plan").is_file(), "the engine of another runtime is as it was"


@pytest.mark.parametrize("moves", range(4))
def test_an_engine_is_replaced_whole_and_with_its_report_or_not_at_all(
    moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["engine.onnx", "engine.onnx.data"]

    def made(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file in names:
            (folder / file).write_text(name)
        return folder

    old, told = made("old"), {name: made_up().model_copy(update={"verdict": name}) for name in ("old", "new")}
    reports.write(told["old"], old)
    real, left = Path.replace, iter([True] * moves)

    def killed(self: Path, to: Path) -> Path:
        if not next(left, False):
            raise KeyboardInterrupt
        return real(self, to)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):  # at the weights, at either file of the report, at the graph
        rebuild._put(made("new"), old, "engine.onnx", told["new"])
    assert not (old / "engine.onnx").exists(), "a graph never lies beside another's weights, or another's report"
    monkeypatch.undo()
    rebuild._put(made("new"), old, "engine.onnx", told["new"])
    assert {(old / name).read_text() for name in names} == {"new"}
    assert reports.load(old).verdict == "new"


def test_a_graph_of_a_fixed_batch_is_proven_at_it_and_nothing_on_nothing(tmp_path: Path) -> None:
    save(parsed("y = Mul(x, x)", "float[4, S] x", "float[4, S] y"), tmp_path / "graph.onnx")
    cases = rebuild._cases(tmp_path / "graph.onnx", 8)
    assert [case.feeds["x"].shape for case in cases] == [(4, 5), (4, 8)]
    with pytest.raises(MismatchError, match="there is nothing to try it on"):
        verify.prove_engine(tmp_path / "graph.onnx", FakeEngine(), (), "dense")


def test_build_refuses_another_graph_than_was_proven(out: Path, tmp_path: Path, capfd: Cap) -> None:
    there = copied(out, tmp_path / "there")
    shutil.copy(there / "dense.onnx", there / "model.onnx")
    done = compress(capfd, "build", there, "--target", "ort")
    assert (done.code, "is not the graph that the run has proven" in done.error) == (3, True)
    (there / "dense.onnx").unlink()
    shutil.copy(out / "model.onnx", there / "model.onnx")
    done = compress(capfd, "build", there, "--target", "ort")
    assert (done.code, "dense.onnx: is missing; copy the whole folder" in done.error) == (3, True)
    done = compress(capfd, "build", tmp_path, "--target", "ort")
    assert (done.code, "no report there" in done.error) == (3, True)
    done = compress(capfd, "build", there, "--batch", "0")
    assert (done.code, "--batch" in done.error) == (2, True)


def test_weights_that_were_left_out_are_drawn_the_same_again(bert: Pruned, tmp_path: Path) -> None:
    graphs = []
    for name in ("whole", "here", "there"):
        (place := tmp_path / name).mkdir()
        graphs.append(place / "graph.onnx")
        model = load(bert.shrunk)
        model.graph.initializers["val_5"].const_value = ir.tensor(np.arange(500), name="val_5")  # no weight, and large
        save(model, graphs[-1])
    before = load(graphs[0]).graph.initializers
    for graph in graphs[1:]:
        gpu.leave_weights(graph)
        assert not graph.with_name("graph.onnx.data").exists()
        gpu.draw_weights(graph)
        drawn = load(graph).graph.initializers
        assert list(drawn) == list(before)
        for name, value in drawn.items():
            held = before[name].const_value
            assert value.const_value is not None
            assert held is not None
            content = value.const_value.numpy()
            if isinstance(held, ir.ExternalTensor) and held.dtype == ir.DataType.FLOAT:
                assert 0.01 < content.std() < 0.03, name
            else:
                np.testing.assert_array_equal(content, held.numpy(), name)
    files = [graph.with_name("graph.onnx.data").read_bytes() for graph in graphs]
    assert files[1] == files[2] != files[0]
    gpu.draw_weights(graphs[0])
    assert graphs[0].with_name("graph.onnx.data").read_bytes() == files[0], "weights that are there stay"


def test_rows_of_the_gpu_are_kept_for_what_they_are_of(
    bert: Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Cap
) -> None:
    graphs, times = dict.fromkeys((gpu.DENSE, *gpu.KEPT), bert.shrunk), []

    def build(graph: Path, place: Path, asked: Any, timings: Path) -> FakeEngine:
        if place.name == str(gpu.KEPT[0]) and asked.seed:
            raise InputError("no room")
        engine = FakeEngine(attentions=2, fused=2, session={"runtime": "fake 1", "provider": "none"})
        engine.path = graph
        return engine

    def interleave(dense: Any, other: Any, feeds: Any, *, batch: int, seq: int, **more: Any) -> Any:
        times.append((batch, seq))
        return speed(batch, seq, 1.0, 1.0)

    for name, function in (("build", build), ("interleave", interleave), ("error_of", lambda engine, graph: 0.0)):
        monkeypatch.setattr(gpu, name, function)
    asked = SimpleNamespace(seconds=1.0, seed=0, precision="fp16", runtime="ort")

    def run() -> gpu.Goals:
        times.clear()
        return gpu.run(asked, graphs, tmp_path)  # type: ignore[arg-type]

    rows = 3 * len(gpu.BATCHES) * len(gpu.SEQS)
    assert any("% faster" in missed for missed in run().missed)
    assert len(times) == rows
    run()
    assert times == []
    next(tmp_path.glob("*.json")).write_text('{"of": ')
    run()
    assert len(times) == 1, "one was torn"
    asked.seconds = 2.0
    run()
    assert len(times) == rows
    asked.seed = 1
    assert any("no room" in missed for missed in run().missed)
    assert len(times) == rows * 2 // 3, "the others go on"


def test_what_is_compared_on_the_gpu_is_within_the_profile() -> None:
    least, _, most = span(gpu.SEQS)
    assert least <= gpu.SEQS[0] <= most


def test_goals_that_are_missed_and_those_that_cannot_be_told() -> None:
    assert gpu.faults(72, speed(8, 128, 2.0, 1.0), None) == [], "is told apart"
    assert gpu.faults(gpu.DENSE, speed(8, 128, 1.0, 1.0), None) == [], "dense beside itself has no goal"
    assert str(gpu.Goals()) == "every goal reached"
    assert str(gpu.Goals(["a", "b"], ["c"])) == "missed: a; b\ncannot be told: c"
    assert gpu.faults(72, speed(8, 128, 2.0, 1.0), 0.9) == []
    share, faster = gpu.faults(72, speed(8, 128, 1.05, 1.0), 0.79)
    assert (share, faster.endswith("% faster")) == ("share 0.79", True)
    assert gpu.faults(72, speed(1, 128, 1.0, 1.0), None) == [], "goals are for batches of 8 and more"


# --- against the real bindings ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for TensorRT's libraries and for the driver of a GPU."""
    place = tmp_path_factory.mktemp("libraries")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, so no stand-ins for TensorRT's libraries")
    made = place / "libraries.so"
    subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", made, HERE / "tensorrt" / "libraries.c"], check=True)
    names = [
        f"lib{name}.so.{n}" for name in ("nvinfer", "nvonnxparser", "nvinfer_plugin", "nvparsers") for n in (8, 10, 11)
    ]
    for name in (*names, "libcuda.so.1"):
        shutil.copy(made, place / name)
    return place


@pytest.fixture(scope="module", params=VERSIONS)
def probed(
    request: pytest.FixtureRequest, libraries: Path, bert: Pruned, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What comes of building with the bindings of a version, its builder and runtime replaced by stand-ins."""
    bindings = BINDINGS / request.param
    if not (bindings / "tensorrt_bindings").is_dir():
        pytest.skip(f"no bindings of TensorRT {request.param} in {BINDINGS}")
    pytest.importorskip("polygraphy")
    place = tmp_path_factory.mktemp(request.param)
    paths = {"LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": os.pathsep.join([str(bindings), str(HERE.parent)])}
    command = [sys.executable, "-W", "ignore", "-m", "tests.tensorrt.probe", str(bert.shrunk), str(place)]
    done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_path_builds_with_every_version(probed: dict[str, Any]) -> None:
    old = probed["version"].startswith("8.6")
    assert probed["missing"] is None
    for precision, tolerance in (("fp32", 1e-6), ("fp16", 2e-2)):
        found = probed[precision]
        assert found["error"] <= tolerance
        assert found["types"] == ["float32"]
        assert found["network"] == (["EXPLICIT_BATCH"] if old else ["STRONGLY_TYPED"])
        assert found["pools"] == {"WORKSPACE": 64 << 20}
        assert found["profile"]["input_ids"] == [[1, 1], [2, 8], [4, 16]]
        assert set(found["inputs"].values()) == {"int32" if old else "int64"}
        assert found["device_seconds"] == pytest.approx(0.0015)
        assert "fused attention in 1 of 2" in found["optimization"]
        half = ["FP16"] if precision == "fp16" else []
        assert found["flags"] == ([*half, "OBEY_PRECISION_CONSTRAINTS"] if old else [])
        assert found["layers"] == (["FLOAT"] if old else [None])
    assert probed["loaded"] == 0
    assert probed["no_room"] is None, "the memory of a second engine cannot be measured where there is none"


def test_shapes_are_set_once_and_a_refused_one_is_told(probed: dict[str, Any]) -> None:
    assert probed["set_again"] == 0
    assert "TensorRT does not take input_ids of shape (3, 9) (" in probed["refused"]
    assert "setInputShape: odd" in probed["refused"]


def test_an_engine_says_what_types_it_gives(probed: dict[str, Any]) -> None:
    assert probed["wide"][2] == {"y": "int32" if probed["version"].startswith("8.6") else "int64"}


def test_a_quantized_graph_says_itself_what_it_computes_in(probed: dict[str, Any]) -> None:
    flags, layers, _ = probed["quantized"]
    assert flags == (["INT8"] if probed["version"].startswith("8.6") else [])
    assert layers == [None]


def test_nothing_that_must_be_installed_beside_tensorrt_is_a_tactic(probed: dict[str, Any]) -> None:
    assert probed["tactics"] == ["EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"]
    assert bin(probed["fp32"]["tactics"]).count("1") == 2


def test_bfloat16_needs_a_version_that_has_it(probed: dict[str, Any]) -> None:
    old = probed["version"].startswith("8.6")
    assert ("bf16" in probed["precisions"]) is not old
    assert probed["bf16"].startswith("UsageError: bf16: TensorRT 8.6" if old else "")


def test_timings_are_kept_and_a_torn_cache_is_said(probed: dict[str, Any]) -> None:
    assert (probed["fp32"]["cache"], probed["fp16"]["cache"]) == ("", "timings")
    first, given, second = probed["torn"]
    assert "timings made anew" in first
    assert "was damaged" in first
    assert given == ""
    assert "with the timings of earlier builds" in second
    assert "timings made anew: TensorRT does not take" in probed["foreign"]


def test_compatible_engines_are_asked_for(probed: dict[str, Any]) -> None:
    assert "VERSION_COMPATIBLE" in probed["compatible_flags"]
    assert probed["compatible"]["hardware_compatible"] is True


def test_what_no_kernel_computes_in_its_own_type_is_computed_in_another(probed: dict[str, Any]) -> None:
    flags, said = probed["preferred"]
    if probed["version"].startswith("8.6"):
        assert flags == ["PREFER_PRECISION_CONSTRAINTS"]
        assert said == "asked of every layer, and not required"
    else:
        assert "Could not find any implementation" in said


def test_faults_of_building_are_one_line(probed: dict[str, Any]) -> None:
    assert probed["smaller"] == "8 MiB", "memory ran out once, and the build was tried in less"
    assert probed["nvtx"] == "ProfilingVerbosity.NONE", "a call names no layers"
    old = probed["version"].startswith("8.6")
    assert probed["short"] == ["64 MiB" if old else "8 MiB"], (
        "kernels were left out for want of memory, and none was left"
    )
    assert probed["still_short"].startswith("InputError: the GPU's memory is too small"), (
        "the same warning, heard again"
    )
    assert probed["too_large"].startswith(
        "InputError: the GPU's memory is too small to build the engine, even with 8 MiB"
    )
    assert "no importer registered for op: Odd" in probed["unreadable"]
    assert "is damaged" in probed["damaged"]
    assert not any("\n" in probed[name] for name in ("too_large", "unreadable", "damaged"))
