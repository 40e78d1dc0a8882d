"""The benchmark on a GPU: its graphs without weights, its stored rows, and its goals."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from benchmarks.gpu import BATCHES, SEQS, Benchmark
from benchmarks.gpu_goals import Goals, missed_goals, saved_share
from benchmarks.gpu_graphs import DENSE, KEPT, draw_weights, remove_weights
from compressor.errors import InputError
from compressor.results import Speed
from compressor.targets import span
from graph_passes import load, save
from tests.report.reports import speed
from tests.targets.engines import FakeEngine
from tests.targets.graphs import parsed, pruned

ROWS = 3 * len(BATCHES) * len(SEQS)
WITHOUT_TORCH = "import sys; sys.modules.update(torch=None, transformers=None); import benchmarks.gpu"


def test_the_gpu_benchmark_runs_without_torch() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_removed_weights_are_drawn_again_with_equal_values(tmp_path: Path) -> None:
    graphs = []
    for name in ("whole", "here", "there"):
        (folder := tmp_path / name).mkdir()
        graphs.append(folder / "graph.onnx")
        model = load(pruned("bert").shrunk)
        # A constant that is not a weight but is large enough for the data file.
        model.graph.initializers["val_5"].const_value = ir.tensor(np.arange(500), name="val_5")
        save(model, graphs[-1])
    before = load(graphs[0]).graph.initializers
    for graph in graphs[1:]:
        remove_weights(graph)
        assert not graph.with_name("graph.onnx.data").exists()
        draw_weights(graph)
        after = load(graph).graph.initializers
        assert list(after) == list(before)
        for name, value in after.items():
            original = before[name].const_value
            assert value.const_value is not None
            assert original is not None
            content = value.const_value.numpy()
            if isinstance(original, ir.ExternalTensor) and original.dtype == ir.DataType.FLOAT:
                assert 0.01 < content.std() < 0.03, name
            else:
                np.testing.assert_array_equal(content, original.numpy(), name)
    files = [graph.with_name("graph.onnx.data").read_bytes() for graph in graphs]
    assert files[1] == files[2] != files[0]
    draw_weights(graphs[0])
    assert graphs[0].with_name("graph.onnx.data").read_bytes() == files[0], "existing weights stay"


class FakeBenchmark(Benchmark):
    """The benchmark with engines that are not built, and times that are not measured.

    Args:
        folder: folder of the rows.
        options: `seconds` and `seed`; with a seed one engine does not build.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        defaults = {"seconds": 1.0, "seed": 0, "precision": "fp16", "runtime": "ort"}
        graph = folder / "graph.onnx"
        save(parsed("y = MatMul(x, w)", "float[B, S, 4] x", "float[B, S, 4] y", "float[4, 4] w"), graph)
        graphs = dict.fromkeys((DENSE, *KEPT), graph)
        super().__init__(argparse.Namespace(**{**defaults, **options}), graphs, folder)
        self.timed: list[tuple[int, int]] = []

    def build(self, graph: Path, folder: Path) -> FakeEngine:
        if self.options.seed and folder.name == str(KEPT[0]):
            raise InputError("no room")
        engine = FakeEngine(attentions=2, fused=2, session={"runtime": "fake 1", "provider": "none"})
        engine.path = graph
        return engine

    def error(self, engine: Any, graph: Path) -> float:
        return 0.0

    def time(self, pair: Any, feeds: Any, batch: int, seq: int) -> Speed:
        self.timed.append((batch, seq))
        return speed(batch, seq, 1.0, 1.0)


def test_rows_are_timed_once_for_the_same_graphs_and_settings(tmp_path: Path) -> None:
    def rows_timed(**options: Any) -> int:
        benchmark = FakeBenchmark(tmp_path, **options)
        assert any("% faster" in missed for missed in benchmark.run().missed)
        return len(benchmark.timed)

    assert rows_timed() == ROWS
    assert rows_timed() == 0
    next(tmp_path.glob("*.json")).write_text('{"of": ')
    assert rows_timed() == 1, "one row was damaged"
    assert rows_timed(seconds=2.0) == ROWS


def test_an_engine_that_does_not_build_misses_its_goal_and_the_others_are_timed(tmp_path: Path) -> None:
    benchmark = FakeBenchmark(tmp_path, seed=1)
    assert any("no room" in missed for missed in benchmark.run().missed)
    assert len(benchmark.timed) == ROWS * 2 // 3


def test_the_inputs_of_the_comparison_are_within_the_profile() -> None:
    smallest, _, largest = span(SEQS)
    assert smallest <= SEQS[0] <= largest


@pytest.mark.parametrize(
    ("heads", "row", "share", "missed"),
    [
        (72, (8, 128, 2.0, 1.0), None, 0),
        (DENSE, (8, 128, 1.0, 1.0), None, 0),
        (72, (8, 128, 2.0, 1.0), 0.9, 0),
        (72, (8, 128, 1.05, 1.0), 0.79, 2),
        (72, (1, 128, 1.0, 1.0), None, 0),
    ],
    ids=["an unknown share", "dense against itself", "reached", "slow, and a small share", "a batch below 8"],
)
def test_goals(heads: int, row: tuple[Any, ...], share: float | None, missed: int) -> None:
    assert len(missed_goals(heads, speed(*row), share)) == missed


def test_messages() -> None:
    """The text that is printed for the goals."""
    assert str(Goals()) == "every goal reached"
    assert str(Goals(["a", "b"], ["c"])) == "missed: a; b\nunknown: c"
    row = speed(8, 128, 1.0, 1.0).model_copy(update={"ratio": 1.1})
    assert missed_goals(72, row, 0.79) == ["share 0.79", "10.0% faster"]


def test_share_of_time_saved_over_share_of_arithmetic_removed() -> None:
    faster = speed(1, 128, 10.0, 8.0).model_copy(update={"ratio": 1.25})
    assert saved_share(faster, 100, 80) == pytest.approx(1.0)
    assert saved_share(faster, 100, 60) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="none were removed"):
        saved_share(faster, 100, 100)
