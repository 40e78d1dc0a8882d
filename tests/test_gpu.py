"""What needs an NVIDIA GPU (`make test-gpu`): engines of TensorRT and of ONNX Runtime's CUDA provider."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig, BertForSequenceClassification

from compressor.errors import InputError, TargetMissingError, UsageError
from compressor.export import export_reference
from compressor.measure import interleave
from compressor.model_folder import ModelFolder, example_inputs
from compressor.run import verify
from compressor.targets import ENGINE_FILES, TOLERANCE, BuildOptions, Engine, Precision, check, target
from compressor.targets.onnxruntime import ort_session
from compressor.targets.random_inputs import random_feeds
from compressor.targets.relative_error import relative_error
from compressor.targets.tensorrt.engine import TrtEngine
from compressor.units import find_sites, keep_all
from graph_passes import Plan, load, save, shrink
from tests.engines import Pruned, parsed, pruned
from tests.test_lower_block_sparse import exported
from tests.test_models import all_attention
from tests.zoo import VOCABULARY, text

pytestmark = pytest.mark.gpu
TUNING = BuildOptions(batch=(1, 4, 8), seq=(1, 16, 32))


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


def built(runtime: str, graph: Path, folder: Path, precision: Precision, tuning: BuildOptions = TUNING) -> Engine:
    try:
        check(runtime, precision, "cuda")
    except TargetMissingError as error:
        if os.environ.get("COMPRESSOR_REQUIRE_GPU"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    out = folder / ENGINE_FILES[runtime]
    return target(runtime)(graph, out, precision=precision, provider="cuda", tuning=tuning)


def error(engine: Engine, graph: Path) -> float:
    """The largest over several sizes, padded ones among them."""
    plain = ort_session.open_session(graph, {**ort_session.describe("cpu", None), "graph_optimization": "none"})
    errors = []
    for batch, seq, padded in ((1, 5, False), (2, 17, True), (8, 32, True)):
        feeds = random_feeds(load(graph), batch, seq, seed=batch, padded=padded)
        expected, got = ort_session.run(plain, feeds), engine.run(feeds)
        errors += [relative_error(expected[name], got[name], feeds) for name in expected]
    return max(errors)


@pytest.mark.parametrize(
    ("runtime", "precision"), [("trt", "fp32"), ("trt", "fp16"), ("trt", "bf16"), ("ort", "fp32"), ("ort", "fp16")]
)
def test_an_engine_computes_what_the_graph_computes(
    runtime: str, precision: Precision, bert: Pruned, tmp_path: Path
) -> None:
    try:
        engine = built(runtime, bert.shrunk, tmp_path, precision)
    except UsageError as refused:  # 8.6 has no bfloat16
        pytest.skip(str(refused))
    assert error(engine, bert.shrunk) <= TOLERANCE[precision]
    assert engine.precision == precision
    feeds = random_feeds(load(bert.shrunk), 4, 16)
    assert engine.memory(feeds) is not None
    speed = interleave(engine, engine, feeds, batch=4, seq=16, seconds=0.1)
    assert (speed.dense.device is not None) is (runtime == "trt")
    assert speed.dense.device is None or 0 < speed.dense.device[0] < speed.dense.p50, "a part of what the clock says"


@pytest.mark.parametrize("runtime", ["trt", "ort"])
def test_attention_of_usual_heads_stays_fused(runtime: str, tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=VOCABULARY
    )
    model, inputs = BertForSequenceClassification(config).eval(), text(2, 8)
    every = keep_all(find_sites(model, inputs)).sites
    plan = Plan(sites=(replace(every[0], kept=(1,), scale=()), replace(every[1], kept=(0, 2, 3), scale=())))
    export_reference(model, plan, inputs, tmp_path / "reference.onnx")
    save(shrink(load(tmp_path / "reference.onnx"), plan).model, tmp_path / "graph.onnx")
    engine = built(runtime, tmp_path / "graph.onnx", tmp_path, "fp16")
    assert error(engine, tmp_path / "graph.onnx") <= TOLERANCE["fp16"]
    assert engine.fused == engine.attentions, engine.optimization
    assert engine.attentions == 2 or "cannot be told" in engine.optimization


@pytest.mark.parametrize("family", ["gpt2", "t5", "vit"])
def test_families_build_with_tensorrt(family: str, tmp_path: Path) -> None:
    made = pruned(family)
    batch = next(iter(made.inputs.values())).shape[0]
    tuning = BuildOptions(batch=(batch, batch, batch), seq=(1, 16, 32))
    engine = built("trt", made.shrunk, tmp_path, "fp32", tuning)
    expected = ort_session.run(ort_session.open_session(made.shrunk, ort_session.describe("cpu", None)), made.inputs)
    got = engine.run(made.inputs)
    assert max(relative_error(expected[name], got[name], made.inputs) for name in expected) <= TOLERANCE["fp32"]


@pytest.mark.parametrize("what", ["hardware_compatible", "version_compatible"])
def test_compatible_engines_are_built_and_loaded(what: str, bert: Pruned, tmp_path: Path) -> None:
    tuning = replace(TUNING, hardware_compatible=what.startswith("hard"), version_compatible=what.startswith("version"))
    try:
        engine = built("trt", bert.shrunk, tmp_path, "fp16", tuning)
    except UsageError as refused:  # before Ampere
        pytest.skip(str(refused))
    except InputError as refused:
        if "lean" not in str(refused):
            raise
        pytest.skip(f"the library of the lean runtime is not here: {refused}")
    assert error(engine, bert.shrunk) <= TOLERANCE["fp16"]


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
def test_integers_come_out_and_quantized_graphs_compute(
    body: str, output: str, tolerance: float, tmp_path: Path
) -> None:
    weights = "float s = {0.03125}, int8 z = {0}, float[32, 32] w"
    save(parsed(f"h = Relu(x)  {body}", "float[B, 32] x", output, weights), tmp_path / "graph.onnx")
    engine = built("trt", tmp_path / "graph.onnx", tmp_path, "fp32")
    feeds = random_feeds(load(tmp_path / "graph.onnx"), 4, 1)
    wanted = ort_session.run(
        ort_session.open_session(tmp_path / "graph.onnx", ort_session.describe("cpu", None)), feeds
    )
    got = engine.run(feeds)["y"]
    assert relative_error(wanted["y"], got, feeds) <= tolerance
    assert isinstance(engine, TrtEngine)
    assert engine.metadata.outputs == {"y": got.dtype.name}


def test_block_sparse_attention_runs(tmp_path: Path) -> None:
    plan, reference = exported("bert", "eager", 18)
    save(shrink(load(reference), plan).model, tmp_path / "graph.onnx")
    assert error(built("trt", tmp_path / "graph.onnx", tmp_path, "fp32"), reference) <= TOLERANCE["fp32"]


def test_a_model_with_memories_runs_with_none_and_with_all(tmp_path: Path) -> None:
    model = all_attention(num_hidden_layers=2)
    folder = ModelFolder(Path("model"), model, None, model.config, "sha256:1", "causal-lm", model.config.model_type)
    inputs = example_inputs(folder, 2, 8)
    plan, graph = keep_all(find_sites(model, inputs)), tmp_path / "graph.onnx"
    export_reference(model, plan, inputs, tmp_path / "reference.onnx")
    save(shrink(load(tmp_path / "reference.onnx"), plan).model, graph)
    engine = built("trt", graph, tmp_path, "fp32")
    tried = verify.cases(lambda *size: example_inputs(folder, *size), longest=32)
    assert verify.prove_engine(graph, engine, tried, "dense").holds
    assert engine.run(random_feeds(load(graph), 2, 8))


def test_an_engine_is_loaded_again(bert: Pruned, tmp_path: Path) -> None:
    from compressor.targets.tensorrt import target as trt

    engine = built("trt", bert.shrunk, tmp_path, "fp16")
    feeds = random_feeds(load(bert.shrunk), 2, 9)
    np.testing.assert_array_equal(trt.load(engine.path).run(feeds)["logits"], engine.run(feeds)["logits"])
    with pytest.raises(InputError, match="and the engine takes"):
        engine.run(random_feeds(load(bert.shrunk), 9, 9))
    engine.path.write_bytes(engine.path.read_bytes()[:-1])
    with pytest.raises(InputError, match="is damaged"):
        trt.load(engine.path)


def test_the_same_inputs_and_timings_give_the_same_engine(bert: Pruned, tmp_path: Path) -> None:
    tuning = BuildOptions(batch=(1, 4, 8), seq=(1, 16, 32), timing_cache=tmp_path / "timings")
    layers = []
    for _ in range(3):  # the first fills the cache
        engine = built("trt", bert.shrunk, tmp_path, "fp16", tuning)
        assert engine.built is not None
        # TensorRT counts the kernels that it makes, from one engine to the next.
        layers.append(
            [re.sub(r"mye\d+|myl\d+_\d+", "", f"{layer.name} {layer.tactic}") for layer in engine.built.layers]
        )
    assert layers[1] == layers[2]
    (tmp_path / "timings").write_bytes(b"torn")
    assert "was damaged" in built("trt", bert.shrunk, tmp_path, "fp16", tuning).optimization
