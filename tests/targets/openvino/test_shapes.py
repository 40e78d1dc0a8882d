"""Engines with fixed shapes pad batches that fit, run others at free axes, and compute the same either way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest

from compressor.errors import ErrorCode
from compressor.quantization import quantize_graph
from compressor.targets import TOLERANCE, BuildOptions, Engine, Feeds, target
from compressor.targets.base import Shape
from compressor.targets.openvino import session
from compressor.targets.openvino.batches import EngineRequest
from compressor.targets.relative_error import relative_error
from graph_passes import load, save
from graph_passes.block_sparse.masks import REACH
from graph_passes.passes import CleanUp, DropUnreadPositions
from tests.faults import fails_with
from tests.quantization.graphs import calibration_rows, needs_nncf, quantized, run
from tests.targets.cpu import needs_vnni
from tests.targets.graphs import parsed, pruned
from tests.targets.openvino.sizes import SHAPES, SIZES, feeds_of
from tests.targets.openvino.test_bfloat16 import served

POSITIONS = 70
"""Maximum length of the models of `tests.zoo`."""


def build(
    graph: Path, out: Path, shapes: Sequence[Shape] = (), *, is_int8: bool = False, free_axes: bool = True
) -> Engine:
    """An engine of OpenVINO on one thread."""
    precision: Any = "int8" if is_int8 else "fp32"
    options = BuildOptions(shapes=tuple(shapes), free_axes=free_axes)
    return target("openvino")(graph, out, precision=precision, threads=1, options=options)


@dataclass(frozen=True)
class Engines:
    """A graph, its engine with free axes only, and its engine with `SHAPES` too."""

    graph: Path
    free: Engine
    fixed: Engine

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.fixed.precision]


def thinned(out: Path) -> Path:
    """A quantized BERT whose last attention has one query."""
    model = load(pruned("bert").shrunk)
    assert DropUnreadPositions()(model).modified
    CleanUp()(model)
    save(model, out.with_name("thinned.onnx"))
    return quantize_graph(out.with_name("thinned.onnx"), calibration_rows(), out).path


@pytest.fixture(
    scope="module",
    params=[
        "fp32",
        pytest.param("int8", marks=[needs_nncf, needs_vnni]),
        pytest.param("int8 thinned", marks=[needs_nncf, needs_vnni]),
    ],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("engines")
    if request.param == "int8 thinned":
        graph = thinned(folder / "int8.onnx")
    else:
        graph = pruned("bert").shrunk if request.param == "fp32" else quantized().path
    is_int8 = request.param != "fp32"
    free, fixed = (
        build(graph, folder / f"{name}.xml", shapes, is_int8=is_int8)
        for name, shapes in (("free", ()), ("fixed", SHAPES))
    )
    return Engines(graph, free, fixed)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Receives the sizes of all batches that OpenVINO runs."""
    sizes: list[Shape] = []
    run = EngineRequest.run

    def recorded(request: EngineRequest, arrays: Sequence[np.ndarray], *parts: Any) -> tuple[np.ndarray, ...]:
        sizes.append((arrays[0].shape[0], arrays[0].shape[1]))
        return run(request, arrays, *parts)

    monkeypatch.setattr(EngineRequest, "run", recorded)
    return sizes


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_engine_computes_the_same_at_every_size(size: Shape, engines: Engines, requested: list[Shape]) -> None:
    feeds = feeds_of(*size)
    expected = run(engines.graph, feeds)
    free, fixed = engines.free.run(feeds), engines.fixed.run(feeds)
    assert requested == [size, SIZES[size] or size]
    assert fixed.keys() == free.keys() == expected.keys()
    for name, output in fixed.items():
        assert output.shape == free[name].shape
        assert relative_error(free[name], output, feeds) <= engines.tolerance
        assert relative_error(expected[name], output, feeds) <= engines.tolerance


def test_a_served_engine_computes_the_same(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in (".xml", ".bin"):
        shutil.copy(engines.fixed.path.with_suffix(suffix), tmp_path / f"engine{suffix}")
    session = served(monkeypatch).Session(tmp_path, {"parameters": {}, "instance_group": [{"count": 1}]}, {})
    for size in SIZES:
        feeds = feeds_of(*size)
        outputs = session.run(feeds)
        for name, output in engines.fixed.run(feeds).items():
            assert relative_error(output, outputs[name], feeds) <= engines.tolerance


def test_a_refused_batch_leaves_the_engine_as_it_was(engines: Engines) -> None:
    feeds, further = feeds_of(2, 8), feeds_of(3, 9)
    refused = {**further, "attention_mask": further["attention_mask"][None]}
    for engine in (engines.free, engines.fixed):
        expected = engine.run(feeds)
        with fails_with(ErrorCode.RUNTIME_FAILED):
            engine.run(refused)
        for name, output in engine.run(feeds).items():
            np.testing.assert_array_equal(output, expected[name])


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (2, 8, 1)], ids=str)
def test_inputs_of_another_shape_are_refused_at_a_fixed_shape(shape: tuple[int, ...]) -> None:
    x = openvino.opset8.parameter([2, 8], np.float32, name="x")
    model = openvino.Model([openvino.opset8.relu(x)], [x])
    request = EngineRequest(openvino.Core().compile_model(model, "CPU").create_infer_request())
    rows = np.full((2, 8), 3, np.float32)
    with pytest.raises(ValueError, match="shape"):
        request.run([np.zeros(shape, np.float32)])
    np.testing.assert_array_equal(request.run([rows])[0], rows)


def test_every_product_is_executed_at_a_fixed_shape(engines: Engines) -> None:
    assert engines.fixed.precision == engines.free.precision
    assert engines.fixed.quantized == engines.free.quantized
    if engines.fixed.quantized is not None:
        assert engines.fixed.quantized.executed == engines.fixed.quantized.requested


def test_shapes_are_reported(engines: Engines) -> None:
    assert engines.fixed.session["shapes"] == ["1x8", "4x16", "1x24"]
    assert "shapes" not in engines.free.session
    assert all(f"{batch}x{seq} (" in engines.fixed.optimization for batch, seq in SHAPES)
    assert engines.fixed.specs == engines.free.specs, "the engine takes any size"


def test_a_loaded_engine_has_its_shapes(engines: Engines, requested: list[Shape]) -> None:
    loaded = target("openvino").load(engines.fixed.path, threads=1)
    assert loaded.session == engines.fixed.session
    assert loaded.precision == engines.fixed.precision
    feeds = feeds_of(4, 13)
    np.testing.assert_array_equal(loaded.run(feeds)["logits"], engines.fixed.run(feeds)["logits"])
    assert requested == [(4, 16)] * 2


def test_inputs_and_outputs_are_the_callers_own(engines: Engines) -> None:
    feeds = feeds_of(4, 14)
    copies = {name: array.copy() for name, array in feeds.items()}
    first = engines.fixed.run(feeds)["logits"]
    copy = first.copy()
    engines.fixed.run(feeds_of(4, 15))
    np.testing.assert_array_equal(first, copy)
    for name, array in copies.items():
        np.testing.assert_array_equal(feeds[name], array)


def test_a_shorter_batch_after_a_longer_one_is_not_changed_by_it(engines: Engines) -> None:
    feeds = feeds_of(4, 13)
    first = engines.fixed.run(feeds)["logits"]
    engines.fixed.run(feeds_of(4, 16))
    np.testing.assert_array_equal(engines.fixed.run(feeds)["logits"], first)


def test_the_function_whose_memory_is_measured_pads_too(engines: Engines, requested: list[Shape]) -> None:
    feeds = feeds_of(4, 14)
    outputs = session.runner(engines.fixed.path, engines.fixed.session)(feeds)
    assert requested == [(4, 16)]
    assert relative_error(engines.free.run(feeds)["logits"], outputs["logits"], feeds) <= engines.tolerance


@pytest.mark.parametrize("shapes", [SHAPES, ()], ids=["shapes", "none"])
def test_free_axes_are_compiled_when_a_batch_needs_them(
    shapes: Sequence[Shape], engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []
    compile_model = session.compile_model

    def record(*args: Any) -> Any:
        compiled.append(args[1])
        return compile_model(*args)

    monkeypatch.setattr(session, "compile_model", record)
    is_int8 = engines.fixed.precision == "int8"
    engine = build(engines.graph, tmp_path / "engine.xml", shapes, is_int8=is_int8, free_axes=False)
    assert engine.quantized == engines.fixed.quantized
    assert engine.specs == engines.fixed.specs
    for size, compilations in (((4, 13), 0), ((5, 30), 1), ((5, 31), 1)):
        feeds = feeds_of(*size)
        np.testing.assert_array_equal(
            engine.run(feeds)["logits"], (engines.fixed if shapes else engines.free).run(feeds)["logits"]
        )
        assert len(compiled) == (len(shapes) + compilations if shapes else 1)


def test_a_missing_input_is_named(engines: Engines) -> None:
    with fails_with(ErrorCode.TENSOR_MISMATCH, tensor="attention_mask"):
        engines.fixed.run(feeds_of(1, 5, ("input_ids",)))


def test_other_feeds_are_ignored(engines: Engines) -> None:
    feeds = feeds_of(1, 5)
    more = {**feeds, "labels": np.zeros(9)}
    np.testing.assert_array_equal(engines.fixed.run(more)["logits"], engines.fixed.run(feeds)["logits"])


def test_a_shape_may_have_every_position_of_the_model(tmp_path: Path) -> None:
    graph = pruned("bert").shrunk
    engine = build(graph, tmp_path / "engine.xml", [(1, POSITIONS)])
    feeds = feeds_of(1, POSITIONS - 9)
    assert relative_error(run(graph, feeds)["logits"], engine.run(feeds)["logits"], feeds) <= TOLERANCE["fp32"]


@pytest.mark.parametrize("family", ["bert", "gpt2", pytest.param("marian", marks=pytest.mark.zoo)])
def test_rows_longer_than_the_model_do_not_get_other_outputs(family: str, tmp_path: Path) -> None:
    """Neither those of the rows before, where shapes do not agree, nor those of positions of zeros."""
    graph = pruned(family).shrunk
    engine = target("openvino").build(graph, tmp_path / "engine.xml", threads=1)

    def feeds(batch: int, seq: int) -> Feeds:
        return dict.fromkeys(engine.inputs, np.ones((batch, seq), np.int64))

    for batch in (1, 1, 2):
        with fails_with(ErrorCode.RUNTIME_FAILED):
            engine.run(feeds(batch, 2 * POSITIONS))
        assert len(engine.run(feeds(batch, 8))["logits"]) == batch


@pytest.mark.parametrize("shapes", [(), [(2, 8)]], ids=["free", "fixed"])
@pytest.mark.parametrize("long", [0, 1])
def test_one_row_with_more_tokens_than_positions_is_refused(shapes: Sequence[Shape], long: int, tmp_path: Path) -> None:
    """Positions count the tokens of each row, as in RoBERTa, so that the shape of a batch does not show them."""
    body = (
        "i = Cast<to=7>(attention_mask) n = CumSum(i, one) d = Gather(table, n) e = Gather(words, input_ids)"
        " s = Add(d, e) y = Softmax(s)"
    )
    inputs = "int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask"
    weights = "float[6, 4] table, float[9, 4] words, int64 one = {1}"
    save(parsed(body, inputs, "float[batch, sequence, 4] y", weights), tmp_path / "graph.onnx")
    engine = build(tmp_path / "graph.onnx", tmp_path / "engine.xml", shapes)
    feeds = {"input_ids": np.ones((2, 7), np.int64), "attention_mask": np.ones((2, 7), np.int64)}
    feeds["attention_mask"][:, 5:] = 0
    assert relative_error(run(tmp_path / "graph.onnx", feeds)["y"], engine.run(feeds)["y"], feeds) <= TOLERANCE["fp32"]
    feeds["attention_mask"][long] = 1
    with fails_with(ErrorCode.RUNTIME_FAILED):
        engine.run(feeds)


@pytest.mark.parametrize(
    "shape", [(1, POSITIONS + 1), pytest.param((4, 2 * POSITIONS), marks=pytest.mark.zoo)], ids=str
)
def test_a_shape_of_more_positions_than_the_model_has_is_refused(shape: Shape, tmp_path: Path) -> None:
    out = tmp_path / "engine.xml"
    with fails_with(ErrorCode.OUT_OF_RANGE, path=out, shape=shape) as caught:
        build(pruned("bert").shrunk, out, [(1, 8), shape])
    assert f"{shape[0]}x{shape[1]}" in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "outputs", "axis"),
    [
        ("float[batch, memory, 4] x", "float[batch, memory, 5] y", "memory"),
        ("float[batch, sequence, 4] x", "float[batch, N, 5] y", "N"),
        ("float[N, sequence, 4] x", "float[N, sequence, 5] y", "N"),
        ("float[batch, ?, 4] x", "float[batch, ?, 5] y", ""),
    ],
    ids=["memory", "output", "batch of another name", "nameless"],
)
def test_a_graph_with_another_free_axis_is_refused(inputs: str, outputs: str, axis: str, tmp_path: Path) -> None:
    graph, out = tmp_path / "model.onnx", tmp_path / "engine.xml"
    save(parsed("y = MatMul(x, w)", inputs, outputs, "float[4, 5] w"), graph)
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, path=graph) as caught:
        build(graph, out, [(1, 8)])
    assert axis in str(caught.value)
    assert not out.exists()
    wanted = BuildOptions(shapes=((1, 8),), requires_shapes=False)
    engine = target("openvino").build(graph, out, threads=1, options=wanted)
    assert "shapes" not in engine.session
    assert engine.run({"x": np.ones((2, 3, 4), np.float32)})["y"].shape == (2, 3, 5)


def hand_made(body: str, inputs: str, outputs: str, folder: Path) -> tuple[Path, Engine]:
    """A graph and its engine for the shape 2x6 too."""
    graph = folder / "model.onnx"
    save(parsed(body, inputs, outputs, "float[4, 5] w, int64[1] axis = {1}, int64[1] last = {2}"), graph)
    return graph, build(graph, folder / "engine.xml", [(2, 6)])


@pytest.mark.parametrize("size", [(2, 6), (2, 5), (1, 6), (3, 6)], ids=str)
def test_a_graph_without_a_mask_is_not_padded(size: Shape, tmp_path: Path, requested: list[Shape]) -> None:
    body = "m = ReduceMean <keepdims = 0> (x, axis)  y = MatMul(m, w)"
    graph, engine = hand_made(body, "float[batch, sequence, 4] x", "float[batch, 5] y", tmp_path)
    feeds = {"x": np.random.default_rng(0).normal(size=(*size, 4)).astype(np.float32)}
    output = engine.run(feeds)["y"]
    assert requested == [size]
    np.testing.assert_allclose(output, run(graph, feeds)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(2, 6), (2, 5), (1, 6), (1, 1), (3, 7)], ids=str)
def test_outputs_of_each_position_are_cut(size: Shape, tmp_path: Path, requested: list[Shape]) -> None:
    body = "f = Cast <to = 1> (attention_mask)  u = Unsqueeze(f, last)  m = Mul(x, u)  y = MatMul(m, w)"
    inputs = "float[batch, sequence, 4] x, int64[batch, sequence] attention_mask"
    graph, engine = hand_made(body, inputs, "float[batch, sequence, 5] y", tmp_path)
    feeds = feeds_of(*size) | {"x": np.random.default_rng(0).normal(size=(*size, 4)).astype(np.float32)}
    output = engine.run(feeds)["y"]
    assert requested == [(2, 6) if size in ((2, 6), (2, 5)) else size]
    assert output.shape == (*size, 5)
    np.testing.assert_allclose(output, run(graph, feeds)["y"], rtol=1e-4, atol=1e-5)


def test_a_fixed_batch_size_stays(tmp_path: Path) -> None:
    graph, engine = hand_made("y = MatMul(x, w)", "float[2, sequence, 4] x", "float[2, sequence, 5] y", tmp_path)
    for length in (6, 3, 9):
        feeds = {"x": np.random.default_rng(0).normal(size=(2, length, 4)).astype(np.float32)}
        np.testing.assert_allclose(engine.run(feeds)["y"], run(graph, feeds)["y"], rtol=1e-4, atol=1e-5)
    assert [spec.dims for spec in engine.specs] == [(2, -1, 4)]


def test_a_batch_that_a_shape_holds_may_be_longer_than_the_block_masks(tmp_path: Path) -> None:
    model = parsed("y = MatMul(x, w)", "float[batch, sequence, 4] x", "float[batch, sequence, 5] y", "float[4, 5] w")
    model.metadata_props[REACH] = json.dumps({"x": 4})
    save(model, tmp_path / "model.onnx")
    engine = build(tmp_path / "model.onnx", tmp_path / "engine.xml", [(2, 6)])
    with fails_with(ErrorCode.OUT_OF_RANGE, value=6, maximum=4):
        engine.run({"x": np.ones((2, 6, 4), np.float32)})
