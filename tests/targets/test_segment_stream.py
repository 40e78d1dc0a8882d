"""Reading texts through an engine segment by segment equals PyTorch, and invalid input changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.errors import ErrorCode, InputError
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH
from compressor.targets.segment_stream import Stream, limits
from compressor.units import gated, keep_all
from graph_passes import save
from tests.targets.graphs import parsed
from tests.targets.segment_models import (
    FAMILIES,
    TOLERANCE,
    SegmentGraph,
    build,
    exported_model,
    plan_of,
    stream_error,
    token_ids,
)

HIDDEN = 24


@pytest.fixture(
    scope="module",
    params=[FAMILIES[0], *(pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES[1:])],
)
def exported(request: pytest.FixtureRequest) -> SegmentGraph:
    return exported_model(request.param)


@pytest.fixture(scope="module")
def built(exported: SegmentGraph, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return Stream(*build(exported.shrunk(keep_all(exported.sites)), tmp_path_factory.mktemp("stream")))


@pytest.fixture
def stream(built: Stream) -> Stream:
    """A stream before its first segment."""
    built.memories = ()
    return built


@pytest.mark.parametrize("kept", ["dense", pytest.param("pruned", marks=pytest.mark.zoo)])
def test_ten_segments_equal_pytorch(exported: SegmentGraph, stream: Stream, kept: str, tmp_path: Path) -> None:
    plan = keep_all(exported.sites)
    if kept == "pruned":
        plan = plan_of(exported.sites, [(1, 3), ()], np.random.default_rng(1))
        stream = Stream(*build(exported.shrunk(plan), tmp_path))
    with gated(exported.model, plan):
        assert stream_error(stream, exported.model, [4, 1, 7, 2, 4, 30, 4, 4, 3, 5]) <= TOLERANCE


def test_limits_match_the_model(exported: SegmentGraph) -> None:
    assert limits(exported.reference) == exported.model.config.limits


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5"])
def test_a_limit_that_is_no_number_is_unknown(text: str, tmp_path: Path) -> None:
    model = parsed("y = Neg(memory_0)", "float[N, M, 4] memory_0", "float[N, M, 4] y")
    model.metadata_props.update({MEMORY_LENGTH: text, MAX_POSITIONS: "16"})
    save(model, tmp_path / "model.onnx")
    read = limits(tmp_path / "model.onnx")
    assert read is not None
    assert (read.memory_length, read.max_positions) == (None, 16)


def test_memories_may_be_one_array(stream: Stream) -> None:
    stream.read(token_ids(2, 3).numpy())
    before: list[np.ndarray] = list(stream.memories)
    expected = stream.read(token_ids(2, 4).numpy())
    stream.memories = np.stack(before)
    np.testing.assert_array_equal(stream.read(token_ids(2, 4).numpy()), expected)


@pytest.mark.parametrize(
    ("memories", "segment", "code", "details"),
    [
        ([(2, 3, HIDDEN)] * 3, (2, 4), ErrorCode.TENSOR_MISMATCH, {"memories": 3, "layers": 2}),
        (
            [(2, 3, HIDDEN), (2, 2, HIDDEN)],
            (2, 4),
            ErrorCode.TENSOR_MISMATCH,
            {"tensor": "memory_1", "shape": (2, 2, HIDDEN), "expected": (2, 3, HIDDEN)},
        ),
        ([(2, 7, HIDDEN)] * 2, (2, 4), ErrorCode.OUT_OF_RANGE, {"field": "memory_length", "value": 7, "maximum": 6}),
        (
            [(1, 3, HIDDEN)] * 2,
            (2, 4),
            ErrorCode.TENSOR_MISMATCH,
            {"tensor": "memory_0", "shape": (1, 3, HIDDEN), "expected": (2, 3, HIDDEN)},
        ),
        ([], (2, 41), ErrorCode.OUT_OF_RANGE, {"field": "max_positions", "value": 41, "maximum": 40}),
        (
            [(2, 6, HIDDEN)] * 2,
            (2, 35),
            ErrorCode.OUT_OF_RANGE,
            {"field": "max_positions", "value": 41, "maximum": 40},
        ),
        ([], (2, 0), ErrorCode.TENSOR_MISMATCH, {"tensor": "input_ids", "shape": (2, 0)}),
        ([], (4,), ErrorCode.TENSOR_MISMATCH, {"tensor": "input_ids", "shape": (4,)}),
    ],
)
def test_invalid_input_is_refused_and_memories_are_unchanged(
    stream: Stream,
    memories: list[tuple[int, ...]],
    segment: tuple[int, ...],
    code: ErrorCode,
    details: dict[str, object],
) -> None:
    arrays = [np.zeros(shape, np.float32) for shape in memories]
    stream.memories = arrays
    with pytest.raises(InputError) as error:
        stream.read(np.ones(segment, np.int64))
    assert (error.value.code, error.value.details) == (code, details)
    assert "\n" not in str(error.value)
    assert stream.memories is arrays


def test_tokens_outside_of_the_vocabulary_are_refused_and_memories_are_unchanged(stream: Stream) -> None:
    stream.read(np.ones((1, 3), np.int32))
    before = stream.memories
    with pytest.raises(InputError) as error:
        stream.read(np.full((1, 3), 29))
    assert error.value.code is ErrorCode.RUNTIME_FAILED
    assert stream.memories is before


def test_a_graph_without_memory_is_refused(stream: Stream, tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    save(parsed("y = Neg(ids)", "int64[N, T] ids", "int64[N, T] y"), graph)
    assert limits(graph) is None
    with pytest.raises(InputError) as error:
        Stream(stream.engine, graph)
    assert (error.value.code, error.value.details["tensor"]) == (ErrorCode.TENSOR_MISMATCH, "memory_0")


def test_memories_without_a_fixed_width_are_refused(stream: Stream, tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    save(parsed("y = Neg(memory_0)", "float[N, S, W] memory_0", "float[N, S, W] y"), graph)
    with pytest.raises(InputError) as error:
        Stream(stream.engine, graph)
    assert error.value.code is ErrorCode.TENSOR_MISMATCH
    assert error.value.details == {"path": graph, "tensor": "memory_0", "shape": ("N", "S", "W")}
