"""Tests that need an NVIDIA GPU (`make test-gpu`): engines of TensorRT and of ONNX Runtime's CUDA provider."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig, BertForSequenceClassification

from compressor.engines.prove import prove_engine
from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError
from compressor.export import export_reference
from compressor.measure import interleave
from compressor.quantization import quantize_symmetric
from compressor.targets import TOLERANCE, BuildOptions, Engine, Precision, target
from compressor.targets.onnxruntime import ort_session
from compressor.targets.relative_error import ReferenceOutputs, relative_error
from compressor.targets.tensorrt.bindings import features, library
from compressor.targets.tensorrt.engine import TrtEngine
from compressor.targets.tensorrt.metadata import TimingsState
from compressor.targets.trial_inputs import random_feeds
from compressor.units import find_sites, keep_all
from graph_passes import Plan, load, save, shrink
from tests.targets.graphs import Pruned, masked, parsed, pruned
from tests.targets.segment_models import exported_model
from tests.zoo import VOCABULARY, text

pytestmark = pytest.mark.gpu
OPTIONS = BuildOptions(batch=(1, 4, 8), seq=(1, 16, 32))


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


def build(
    name: str, graph: Path, folder: Path, precision: Precision = "fp32", options: BuildOptions = OPTIONS
) -> Engine:
    """An engine on the GPU; skips the test if the target is missing, unless it is required."""
    runtime = target(name)
    try:
        runtime.check(precision=precision, provider="cuda")
    except TargetMissingError as error:
        if os.environ.get("COMPRESSOR_REQUIRE_GPU"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    return runtime.build(graph, folder / runtime.engine_file, precision=precision, provider="cuda", options=options)


def timings_state(engine: Engine) -> TimingsState | None:
    """How the timing cache was used."""
    assert isinstance(engine, TrtEngine)
    return None if engine.metadata.timings is None else engine.metadata.timings.state


def largest_error(engine: Engine, graph: Path) -> float:
    """The largest relative error over several sizes, with and without padding."""
    settings = {**ort_session.session_settings("cpu", None), "graph_optimization": "none"}
    plain = ort_session.open_session(graph, settings)
    sizes = ((1, 5, False), (2, 17, True), (8, 32, True))
    batches = [random_feeds(load(graph), batch, seq, seed=batch, padded=padded) for batch, seq, padded in sizes]
    reference = ReferenceOutputs([ort_session.run_session(plain, feeds) for feeds in batches], batches)
    return max(
        reference.error(number, name, output)
        for number, feeds in enumerate(batches)
        for name, output in engine.run(feeds).items()
    )


@pytest.mark.parametrize(
    ("name", "precision"), [("trt", "fp32"), ("trt", "fp16"), ("trt", "bf16"), ("ort", "fp32"), ("ort", "fp16")]
)
def test_an_engine_computes_its_graph(name: str, precision: Precision, bert: Pruned, tmp_path: Path) -> None:
    try:
        engine = build(name, bert.shrunk, tmp_path, precision)
    except UsageError as error:  # 8.6 has no bfloat16
        pytest.skip(str(error))
    assert largest_error(engine, bert.shrunk) <= TOLERANCE[precision]
    assert engine.precision == precision
    feeds = random_feeds(load(bert.shrunk), 4, 16)
    assert engine.memory(feeds) is not None
    speed = interleave(engine, engine, feeds, batch=4, seq=16, seconds=0.1)
    assert (speed.dense.device is not None) is (name == "trt")
    assert speed.dense.device is None or 0 < speed.dense.device[0] < speed.dense.p50, "without transfers"


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_symmetric_graph_is_computed_in_8_bits(family: str, precision: Precision, tmp_path: Path) -> None:
    source = pruned(family)
    quantized = quantize_symmetric(source.shrunk, [source.inputs], tmp_path / "quantized.onnx", precision=precision)
    try:
        engine = build("trt", quantized.path, tmp_path, precision)
    except UsageError as error:  # 8.6 has no quantizers in fp8, and GPUs before Ada no kernels
        pytest.skip(str(error))
    assert engine.precision == precision
    assert largest_error(engine, quantized.path) <= TOLERANCE[precision]
    products = engine.quantized
    if products is None:
        assert "it is unknown whether" in engine.optimization
    else:
        assert products.executed == products.requested <= len(quantized.products), engine.optimization


@pytest.mark.parametrize("name", ["trt", "ort"])
def test_attention_of_usual_heads_stays_fused(name: str, tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=VOCABULARY
    )
    model, inputs = BertForSequenceClassification(config).eval(), text(2, 8)
    sites = keep_all(find_sites(model, inputs)).sites
    plan = Plan(sites=(replace(sites[0], kept=(1,), scale=()), replace(sites[1], kept=(0, 2, 3), scale=())))
    export_reference(model, plan, inputs, tmp_path / "reference.onnx")
    save(shrink(load(tmp_path / "reference.onnx"), plan).model, tmp_path / "graph.onnx")
    engine = build(name, tmp_path / "graph.onnx", tmp_path, "fp16")
    assert largest_error(engine, tmp_path / "graph.onnx") <= TOLERANCE["fp16"]
    assert engine.fused == engine.attentions, engine.optimization
    assert engine.attentions == 2 or "it is unknown whether attention is fused" in engine.optimization


@pytest.mark.parametrize("family", ["gpt2", "t5", "vit"])
def test_families_build_with_tensorrt(family: str, tmp_path: Path) -> None:
    graphs = pruned(family)
    batch = next(iter(graphs.inputs.values())).shape[0]
    options = BuildOptions(batch=(batch, batch, batch), seq=(1, 16, 32))
    engine = build("trt", graphs.shrunk, tmp_path, options=options)
    session = ort_session.open_session(graphs.shrunk, ort_session.session_settings("cpu", None))
    expected, outputs = ort_session.run_session(session, graphs.inputs), engine.run(graphs.inputs)
    errors = [relative_error(expected[name], outputs[name], graphs.inputs) for name in expected]
    assert max(errors) <= TOLERANCE["fp32"]


@pytest.mark.parametrize("option", ["hardware_compatible", "version_compatible"])
def test_compatible_engines_are_built_and_loaded(option: str, bert: Pruned, tmp_path: Path) -> None:
    options = replace(
        OPTIONS, hardware_compatible=option.startswith("hard"), version_compatible=option.startswith("version")
    )
    try:
        engine = build("trt", bert.shrunk, tmp_path, "fp16", options)
    except UsageError as error:  # before Ampere
        pytest.skip(str(error))
    except InputError as error:
        if "lean" not in str(error):
            raise
        pytest.skip(f"the library of the lean runtime is not installed: {error}")
    assert largest_error(engine, bert.shrunk) <= TOLERANCE["fp16"]


@pytest.mark.parametrize(
    ("body", "output", "tolerance"),
    [
        ("y = ArgMax <axis = 1, keepdims = 0> (h)", "int64[B] y", 0.0),
        (
            "q = QuantizeLinear(h, s, z)  d = DequantizeLinear(q, s, z)  v = QuantizeLinear(w, s, z)"
            "  e = DequantizeLinear(v, s, z)  y = MatMul(d, e)",
            "float[B, 32] y",
            TOLERANCE["fp16"],
        ),
    ],
)
def test_integer_outputs_and_quantized_graphs(body: str, output: str, tolerance: float, tmp_path: Path) -> None:
    graph, weights = tmp_path / "graph.onnx", "float s = {0.03125}, int8 z = {0}, float[32, 32] w"
    save(parsed(f"h = Relu(x)  {body}", "float[B, 32] x", output, weights), graph)
    engine = build("trt", graph, tmp_path)
    feeds = random_feeds(load(graph), 4, 1)
    session = ort_session.open_session(graph, ort_session.session_settings("cpu", None))
    expected, outputs = ort_session.run_session(session, feeds)["y"], engine.run(feeds)["y"]
    assert relative_error(expected, outputs, feeds) <= tolerance
    assert isinstance(engine, TrtEngine)
    assert engine.metadata.outputs == {"y": outputs.dtype.name}


def test_block_sparse_attention_runs(tmp_path: Path) -> None:
    graphs = masked()
    assert largest_error(build("trt", graphs.shrunk, tmp_path), graphs.reference) <= TOLERANCE["fp32"]


def test_a_model_with_memories_runs_with_empty_and_full_ones(tmp_path: Path) -> None:
    exported, graph = exported_model("all_attention"), tmp_path / "graph.onnx"
    save(exported.shrunk(keep_all(exported.sites)).model, graph)
    engine = build("trt", graph, tmp_path)
    cases = [case for case in exported.cases if case.feeds["input_ids"].shape[1] <= OPTIONS.seq[2]]
    assert prove_engine(graph, engine, cases, "dense").holds
    assert engine.run(random_feeds(load(graph), 2, 8))


def test_an_engine_is_loaded_again(bert: Pruned, tmp_path: Path) -> None:
    engine = build("trt", bert.shrunk, tmp_path, "fp16")
    feeds = random_feeds(load(bert.shrunk), 2, 9)
    loaded = target("trt").load(engine.path)
    np.testing.assert_array_equal(loaded.run(feeds)["logits"], engine.run(feeds)["logits"])
    with pytest.raises(InputError) as error:
        engine.run(random_feeds(load(bert.shrunk), 9, 9))
    assert error.value.code is ErrorCode.TENSOR_MISMATCH
    engine.path.write_bytes(engine.path.read_bytes()[:-1])
    with pytest.raises(InputError) as error:
        target("trt").load(engine.path)
    assert error.value.code is ErrorCode.FILE_UNREADABLE


def test_the_same_inputs_and_timings_give_the_same_engine(bert: Pruned, tmp_path: Path) -> None:
    options = replace(OPTIONS, timing_cache=tmp_path / "timings")
    layers = []
    for _ in range(3):  # the first build fills the cache
        engine = build("trt", bert.shrunk, tmp_path, "fp16", options)
        assert engine.built is not None
        # TensorRT numbers the kernels that it generates, from one engine to the next.
        layers.append(
            [re.sub(r"mye\d+|myl\d+_\d+", "", f"{layer.name} {layer.tactic}") for layer in engine.built.layers]
        )
    if timings_state(engine) is TimingsState.REFUSED and features(library()).version.startswith("8.6"):
        pytest.skip("TensorRT 8.6 refuses timing caches on this GPU, also those it has just written")
    assert layers[1] == layers[2]
    assert timings_state(engine) is TimingsState.REUSED
    (tmp_path / "timings").write_bytes(b"damaged")
    assert timings_state(build("trt", bert.shrunk, tmp_path, "fp16", options)) is TimingsState.DAMAGED
