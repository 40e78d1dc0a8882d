"""What needs an NVIDIA GPU (`make test-gpu`): engines of TensorRT and of ONNX Runtime's CUDA provider."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.errors import InputError, TargetMissingError
from compressor.measure import interleave
from compressor.targets import ENGINE_FILES, TOLERANCE, Engine, Precision, Tuning, check, session, target
from compressor.targets.compare import relative_error
from compressor.targets.feeds import random_feeds
from graph_passes import load
from tests.engines import Pruned, pruned

pytestmark = pytest.mark.gpu
TUNING = Tuning(batch=(1, 4, 8), seq=(1, 16, 32))


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


def built(runtime: str, graph: Path, folder: Path, precision: Precision, tuning: Tuning = TUNING) -> Engine:
    try:
        check(runtime, precision, "cuda")
    except TargetMissingError as error:
        pytest.skip(str(error))
    out = folder / ENGINE_FILES[runtime]
    return target(runtime)(graph, out, precision=precision, provider="cuda", tuning=tuning)


def error(engine: Engine, graph: Path) -> float:
    """The largest over several sizes, padded ones among them."""
    plain = session.open_session(graph, {**session.describe("cpu", None), "graph_optimization": "none"})
    errors = []
    for batch, seq, padded in ((1, 5, False), (2, 17, True), (8, 32, True)):
        feeds = random_feeds(load(graph), batch, seq, seed=batch, padded=padded)
        expected, got = session.run(plain, feeds), engine.run(feeds)
        errors += [relative_error(expected[name], got[name], feeds) for name in expected]
    return max(errors)


@pytest.mark.parametrize(
    ("runtime", "precision"), [("trt", "fp32"), ("trt", "fp16"), ("trt", "bf16"), ("ort", "fp32"), ("ort", "fp16")]
)
def test_an_engine_computes_what_the_graph_computes(
    runtime: str, precision: Precision, bert: Pruned, tmp_path: Path
) -> None:
    if runtime == "trt" and precision == "bf16":
        trt_api = pytest.importorskip("compressor.targets.trt_api")
        pytest.importorskip("tensorrt")
        if "bf16" not in trt_api.api(trt_api.library()).precisions:
            pytest.skip("this TensorRT has no bfloat16")
    engine = built(runtime, bert.shrunk, tmp_path, precision)
    assert error(engine, bert.shrunk) <= TOLERANCE[precision]
    assert engine.precision == precision
    feeds = random_feeds(load(bert.shrunk), 4, 16)
    assert (engine.memory(feeds) or 0) >= 0
    speed = interleave(engine, engine, feeds, batch=4, seq=16, seconds=0.1)
    assert speed.void is None
    assert (speed.dense.device is not None) is (runtime == "trt")


@pytest.mark.parametrize("family", ["gpt2", "t5", "vit"])
def test_families_build_with_tensorrt(family: str, tmp_path: Path) -> None:
    made = pruned(family)
    batch = next(iter(made.inputs.values())).shape[0]
    tuning = Tuning(batch=(batch, batch, batch), seq=(1, 16, 32))
    engine = built("trt", made.shrunk, tmp_path, "fp32", tuning)
    expected = session.run(session.open_session(made.shrunk, session.describe("cpu", None)), made.inputs)
    got = engine.run(made.inputs)
    assert max(relative_error(expected[name], got[name], made.inputs) for name in expected) <= TOLERANCE["fp32"]


def test_an_engine_is_loaded_again(bert: Pruned, tmp_path: Path) -> None:
    from compressor.targets import trt

    engine = built("trt", bert.shrunk, tmp_path, "fp16")
    feeds = random_feeds(load(bert.shrunk), 2, 9)
    np.testing.assert_array_equal(trt.load(engine.path).run(feeds)["logits"], engine.run(feeds)["logits"])
    with pytest.raises(InputError, match="and the engine takes"):
        engine.run(random_feeds(load(bert.shrunk), 9, 9))
    engine.path.write_bytes(engine.path.read_bytes()[:-1])
    with pytest.raises(InputError, match="is damaged"):
        trt.load(engine.path)


def test_the_same_inputs_and_timings_give_the_same_engine(bert: Pruned, tmp_path: Path) -> None:
    tuning = Tuning(batch=(1, 4, 8), seq=(1, 16, 32), timing_cache=tmp_path / "timings")
    layers = []
    for _ in range(3):  # the first fills the cache
        engine = built("trt", bert.shrunk, tmp_path, "fp16", tuning)
        assert engine.built is not None
        layers.append([(layer.name, layer.tactic) for layer in engine.built.layers])
    assert layers[1] == layers[2]
    (tmp_path / "timings").write_bytes(b"torn")
    assert "was damaged" in built("trt", bert.shrunk, tmp_path, "fp16", tuning).optimization
