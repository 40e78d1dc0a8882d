"""Two graphs, or all engines of a run, timed in turn; and the throughput of several callers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.errors import ErrorCode, InputError
from compressor.measure import bench, bench_folder, macs
from compressor.measure.throughput import affordable_callers, row_rates, rows_per_second
from compressor.targets import Feeds, target
from compressor.targets.machine import usable_cores
from graph_passes import load, save
from tests.faults import fails_with
from tests.graph_passes.graphs import graph
from tests.quantization.graphs import needs_nncf, quantized
from tests.report import reports
from tests.targets.engines import FakeEngine
from tests.targets.graphs import Pruned, parsed, pruned

POSITIONS = "one = Constant <value_ints = [1]> () s = Shape (x) n = Slice (s, one, two) p = Expand (w, n)"
BODY = f"two = Constant <value_ints = [2]> () {POSITIONS} f = Cast <to = 1> (x) y = Add (f, p)"
"""A graph that has positions for six tokens."""


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


@pytest.mark.zoo
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


@pytest.mark.zoo
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


@pytest.mark.zoo
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


class CountingEngine(FakeEngine):
    """An engine that counts its calls and the threads that call it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Record the thread."""
        self.threads.append(threading.get_ident())
        return {}


def test_each_caller_has_an_engine_and_a_thread_of_its_own() -> None:
    engines = [CountingEngine(), CountingEngine()]
    rate = rows_per_second(engines, {}, batch=3, seconds=0.05)
    assert rate > 0
    callers = [set(engine.threads[2:]) for engine in engines]
    assert all(len(threads) == 1 for threads in callers)
    assert not callers[0] & callers[1]


def test_every_caller_calls_at_least_once() -> None:
    engines = [CountingEngine(), CountingEngine(), CountingEngine()]
    assert rows_per_second(engines, {}, batch=1, seconds=0) > 0
    assert all(len(engine.threads) >= 3 for engine in engines)


def test_a_caller_that_fails_ends_the_measurement() -> None:
    class Failing(CountingEngine):
        def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
            if len(self.threads) == 3:
                raise InputError("out of memory; use fewer callers", code=ErrorCode.RUNTIME_FAILED)
            return super().run(feeds)

    with fails_with(ErrorCode.RUNTIME_FAILED):
        rows_per_second([CountingEngine(), Failing()], {}, batch=1, seconds=0.05)


def test_callers_are_limited_by_memory_and_to_processors() -> None:
    on_cpu, on_gpu = (FakeEngine(session={"provider": f"{name}ExecutionProvider"}) for name in ("CPU", "CUDA"))
    assert affordable_callers([(on_cpu, 1), (on_cpu, None)]) == usable_cores()
    assert affordable_callers([(on_cpu, 2**60)]) == 1
    assert affordable_callers([(on_cpu, 1), (on_gpu, 1)]) == 1


@pytest.mark.parametrize("name", ["ort", pytest.param("openvino", marks=pytest.mark.zoo)])
def test_rates_are_of_one_caller_and_of_several(name: str, tmp_path: Path) -> None:
    if name == "openvino":
        pytest.importorskip("openvino")
    graphs, runtime = pruned("bert"), target(name)
    engine = runtime.build(graphs.shrunk, tmp_path / runtime.engine_file, threads=1)
    rates = row_rates(engine, [(2, graphs.inputs), (2, graphs.inputs)], callers=2, seconds=0.01)
    assert len(rates) == 2
    assert all(rate.one_caller > 0 and rate.all_callers > 0 for rate in rates)


def test_a_folder_is_timed_on_every_target(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    save(load(pruned("bert").shrunk), tmp_path / "model.onnx")
    rows = bench_folder(tmp_path, ["ort", "openvino"], [1, 2], [8], callers=2, seconds=0.02)
    in_floats = [(row.label, row.batch) for row in rows if row.label != "openvino bf16"]  # on processors that have it
    assert in_floats == [("ort fp32", 1), ("openvino fp32", 1), ("ort fp32", 2), ("openvino fp32", 2)]
    for row in rows:
        assert row.p50 > 0
        assert row.throughput == pytest.approx(row.batch / row.p50 * 1e3)
        assert row.throughput_of_callers is not None
        assert not row.failure


@pytest.mark.zoo
@needs_nncf
def test_int8_is_timed_in_any_way_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InputError("the quantizer lost an input", code=ErrorCode.RUNTIME_FAILED)

    save(load(pruned("bert").shrunk), tmp_path / "model.onnx")
    save(load(quantized().path), tmp_path / "model.int8.onnx")
    monkeypatch.setattr("compressor.targets.onnxruntime.engine.quantize_dynamically", fail)
    rows = bench_folder(tmp_path, ["ort"], [1], [8], seconds=0.01)
    assert [(row.label, row.failure) for row in rows] == [("ort fp32", ""), ("ort int8", "")]


@pytest.mark.zoo
def test_the_engine_of_the_report_is_loaded(tmp_path: Path) -> None:
    """An engine in dynamic int8 needs no quantized graph; without its file it is built from the float graph."""
    save(load(pruned("bert").shrunk), tmp_path / "model.onnx")
    target("ort").build(tmp_path / "model.onnx", tmp_path / "engine.onnx", precision="int8", threads=1)
    report = reports.report(target="ort", precision="int8")
    report = report.model_copy(update={"compressed": report.compressed.model_copy(update={"file": "engine.onnx"})})
    for delivered in (True, False):
        rows = bench_folder(tmp_path, ["ort"], [1], [8], seconds=0.01, callers=2, report=report)
        assert [(row.label, row.delivered, row.failure) for row in rows] == [
            ("ort fp32", False, ""),
            ("ort int8", delivered, ""),
        ]
        (tmp_path / "engine.onnx").unlink(missing_ok=True)
    in_floats = report.model_copy(update={"precision": "fp32"})
    assert [row.label for row in bench_folder(tmp_path, ["ort"], [1], [8], seconds=0.01, report=in_floats)] == [
        "ort fp32"
    ]


def test_a_target_that_is_missing_is_a_row_with_its_reason(tmp_path: Path) -> None:
    save(load(pruned("bert").shrunk), tmp_path / "model.onnx")
    rows = bench_folder(tmp_path, ["trt", "ort"], [1], [8], seconds=0.01)
    assert [(row.label, bool(row.failure)) for row in rows] == [("trt fp32", True), ("ort fp32", False)]


def test_a_folder_without_a_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        bench_folder(tmp_path, ["ort"], [1], [8])


def test_a_length_beyond_the_positions_is_refused_with_its_flags(tmp_path: Path) -> None:
    save(load(pruned("bert").shrunk), tmp_path / "model.onnx")
    with fails_with(ErrorCode.RUNTIME_FAILED, seq=1_000, path=tmp_path / "model.onnx"):
        bench_folder(tmp_path, ["ort"], [1], [1_000], seconds=0.01)


def test_a_target_that_is_named_twice_is_timed_once(tmp_path: Path) -> None:
    save(load(pruned("bert").shrunk), tmp_path / "model.onnx")
    assert len(bench_folder(tmp_path, ["ort", "ort"], [1], [8], seconds=0.01)) == 1


def test_images_have_no_length(tmp_path: Path) -> None:
    body, image = "y = Flatten (x)", "float[B, 3, 8, 8] x"
    save(graph(body, inputs=image, outputs="float[B, 192] y"), tmp_path / "model.onnx")
    assert [row.seq for row in bench_folder(tmp_path, ["ort"], [1], [32, 128], seconds=0.01)] == [0]
