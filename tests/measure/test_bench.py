"""The comparison of two ONNX files, and files and sizes that cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compressor.errors import ErrorCode, InputError
from compressor.measure import bench, macs
from graph_passes import load, save
from tests.targets.graphs import Pruned, parsed, pruned

POSITIONS = "one = Constant <value_ints = [1]> () s = Shape (x) n = Slice (s, one, two) p = Expand (w, n)"
BODY = f"two = Constant <value_ints = [2]> () {POSITIONS} f = Cast <to = 1> (x) y = Add (f, p)"
"""A graph that has positions for six tokens."""


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


def test_two_files_are_compared(bert: Pruned) -> None:
    result = bench(bert.reference, bert.shrunk, [1, 2], [8], provider="cpu", threads=1, seconds=0.1)
    assert [(speed.batch, speed.seq, speed.void) for speed in result.speeds] == [(1, 8, None), (2, 8, None)]
    assert (result.dense.attentions, result.compressed.attentions) == (3, bert.attentions)
    assert (result.dense.fused, result.compressed.fused) == (3, bert.attentions)
    assert result.compressed.parameters < result.dense.parameters
    assert result.compressed.file_bytes < result.dense.file_bytes
    assert result.compressed.macs == macs(load(bert.shrunk), 1, 8)
    assert result.dense.peak_memory_bytes
    assert result.compressed.file == str(bert.shrunk)
    assert result.session["intra_op_threads"] == 1


def test_graphs_of_images_have_one_size(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    save(parsed("y = Flatten (x)", "float[B, 3, 8, 8] x", "float[B, 192] y"), path)
    result = bench(path, path, [1, 2], [32, 128], provider="cpu", threads=1, seconds=0.01)
    assert [(speed.batch, speed.seq) for speed in result.speeds] == [(1, None), (2, None)]


@pytest.mark.parametrize(
    ("shape", "batch", "seq", "code", "details"),
    [
        ("2, 16", 2, 8, ErrorCode.TENSOR_MISMATCH, {"field": "seq", "tensor": "x", "value": 8, "expected": 16}),
        ("2, 16", 1, 16, ErrorCode.TENSOR_MISMATCH, {"field": "batch", "tensor": "x", "value": 1, "expected": 2}),
        ("B, S", 1, 8, ErrorCode.RUNTIME_FAILED, {"batch": 1, "seq": 8}),
    ],
)
def test_a_size_that_a_graph_does_not_take_is_named_with_the_graph(
    shape: str, batch: int, seq: int, code: ErrorCode, details: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "graph.onnx"
    save(parsed(BODY, f"int64[{shape}] x", f"float[{shape}] y", "float[6] w"), path)
    with pytest.raises(InputError) as error:
        bench(path, path, [batch], [seq], provider="cpu", threads=1, seconds=0.01)
    assert error.value.code is code
    assert error.value.details == {"path": path, **details}


def test_graphs_with_different_inputs_are_not_compared(bert: Pruned, tmp_path: Path) -> None:
    relu = tmp_path / "relu.onnx"
    save(parsed("y = Relu(x)", "float[B, S] x", "float[B, S] y"), relu)
    with pytest.raises(InputError) as error:
        bench(bert.shrunk, relu, [1], [8], provider="cpu", threads=1)
    assert error.value.code is ErrorCode.TENSOR_MISMATCH
    assert error.value.details == {"path": relu, "tensors": ("x",)}


def test_messages(tmp_path: Path) -> None:
    """The message about a graph with a fixed length."""
    path = tmp_path / "graph.onnx"
    save(parsed(BODY, "int64[2, 16] x", "float[2, 16] y", "float[6] w"), path)
    with pytest.raises(InputError) as error:
        bench(path, path, [2], [8], provider="cpu", threads=1)
    assert str(error.value) == (
        f"{path}: the graph fixes the length of x at 16, and 8 was requested (--seq); request 16, or export the graph"
        " with a free length"
    )
