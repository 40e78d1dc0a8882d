"""Numbers that stand: what is counted, how two engines are timed in turn, and how sure a difference is."""

from __future__ import annotations

import itertools
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import InputError
from compressor.measure import bench, interleave, macs, paired_interval, saved_share, timing
from compressor.measure.timing import incomparable_reason
from compressor.report import Speed
from compressor.segment_memory import MEMORY_LENGTH, MAX_POSITIONS
from graph_passes import BlockMask, load, save
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model
from tests.engines import Clock, FakeEngine, Pruned, parsed, pruned


@pytest.fixture(scope="module")
def bert() -> Pruned:
    return pruned("bert")


def timed(monkeypatch: pytest.MonkeyPatch, *engines: FakeEngine, **more: Any) -> tuple[Speed, Clock]:
    clock = Clock(*engines)
    monkeypatch.setattr(timing.time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(timing, "settle", lambda: None)
    first, second = engines if len(engines) == 2 else engines * 2
    return interleave(first, second, {}, batch=4, seq=8, **more), clock


def test_times_are_those_of_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, _ = timed(monkeypatch, FakeEngine(2.0), FakeEngine(1.0))
    assert speed.ratio == pytest.approx(2.0)
    assert (speed.low, speed.high) == pytest.approx((2.0, 2.0))
    assert (speed.dense.p50, speed.dense.p99, speed.compressed.p90) == pytest.approx((2.0, 2.0, 1.0))
    assert (speed.dense.throughput, speed.compressed.throughput) == pytest.approx((2000.0, 4000.0))
    assert speed.void is None
    assert (speed.batch, speed.seq) == (4, 8)


def test_engines_take_turns_and_the_order_turns_around(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, compressed = FakeEngine(30.0), FakeEngine(20.0)
    speed, clock = timed(monkeypatch, dense, compressed, seconds=2.0)
    warm_up = 2 * timing._WARM_UPS + 2 * (timing._TRIED + 1)  # the last ones tell how long a block takes
    turns = clock.calls[warm_up:]
    calls = len(speed.dense.samples) // (len(turns) // 2 - len(speed.dense.samples))
    block = calls + 1
    sides = [turns[start : start + block] for start in range(0, len(turns), block)]
    assert all(len(set(side)) == 1 and len(side) == block for side in sides)
    order = [side[0] for side in sides]
    assert order[:6] == [dense, compressed, compressed, dense, dense, compressed]
    assert order.count(dense) == order.count(compressed) >= timing._BLOCKS[0]
    assert len(speed.dense.samples) == len(speed.compressed.samples)
    assert clock.now < 2 * 2.0


@pytest.mark.parametrize("undecided", [False, True])
def test_where_it_is_undecided_as_much_is_timed_again_once(undecided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), []
    monkeypatch.setattr(timing.time, "perf_counter", clock.perf_counter)

    def again() -> bool:
        asked.append(len(found))
        return undecided

    def call() -> None:
        clock.now += 0.03

    found: list[np.ndarray] = []
    for pair in timing.alternate_calls(call, call, 5.0, rest=lambda: None, undecided=again):
        found.append(pair)
    assert len(asked) == 1
    assert len(found) == asked[0] * (1 + undecided)
    assert len({pair.shape for pair in found}) == 1


def test_a_machine_that_slows_down_does_not_time_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", clock.perf_counter)
    calls = itertools.count()

    def call() -> None:
        clock.now += 0.001 if next(calls) < 2000 else 0.01

    pairs = list(timing.alternate_calls(call, call, 5.0, rest=lambda: None))
    assert timing._BLOCKS[0] <= len(pairs) < 40, "fewer than were planned"
    assert clock.now < (timing._LONGEST + 0.5) * 5.0


def test_what_still_computes_is_waited_for() -> None:
    done = threading.Event()

    def spin() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        done.set()

    threading.Thread(target=spin).start()
    timing.wait_until_idle()
    assert done.is_set()


def test_an_engine_against_itself_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, _ = timed(monkeypatch, FakeEngine(5.0))
    assert speed.ratio == pytest.approx(1.0)
    assert speed.void is None


class Noisy(FakeEngine):
    """Calls whose times scatter, with a rare one that takes long."""

    def __init__(self, milliseconds: float, seed: int) -> None:
        super().__init__(milliseconds)
        self.mean, self.rng = milliseconds, np.random.default_rng(seed)

    def run(self, feeds: Any) -> dict[str, np.ndarray]:
        self.milliseconds = self.mean * self.rng.lognormal(0, 0.1) * (20 if self.rng.random() < 0.02 else 1)
        return super().run(feeds)


def test_the_interval_holds_the_true_ratio_and_shrinks_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    short, _ = timed(monkeypatch, Noisy(3.0, 1), Noisy(2.0, 2), seconds=1.0)
    long, _ = timed(monkeypatch, Noisy(3.0, 1), Noisy(2.0, 2), seconds=20.0)
    for speed in (short, long):
        assert speed.low <= speed.ratio <= speed.high
    assert long.low < 1.5 < long.high
    assert long.high - long.low < short.high - short.low
    again, _ = timed(monkeypatch, Noisy(3.0, 1), Noisy(2.0, 2), seconds=1.0)
    assert again == short, "same seed, same times: same row"


@pytest.mark.parametrize(
    ("dense", "compressed", "why"),
    [
        ({"attentions": 12, "fused": 12}, {"attentions": 5, "fused": 5}, None),
        ({"attentions": 12, "fused": 12}, {"attentions": 0, "fused": 0}, None),
        ({"attentions": 12, "fused": 0}, {"attentions": 5, "fused": 0}, None),
        ({"attentions": 12, "fused": 6}, {"attentions": 4, "fused": 2}, None),
        ({"attentions": 12, "fused": 12}, {"attentions": 5, "fused": 4}, "12 of 12 .* 4 of 5"),
        ({"attentions": 12, "fused": 0}, {"attentions": 5, "fused": 5}, "0 of 12 .* 5 of 5"),
        ({"session": {"threads": 1}}, {"session": {"threads": 2}}, "different settings"),
        ({"precision": "fp16"}, {"precision": "fp32"}, "different settings"),
    ],
)
def test_rows_that_compare_unlike_engines_are_void(
    dense: dict[str, Any], compressed: dict[str, Any], why: str | None
) -> None:
    found = incomparable_reason(FakeEngine(**dense), FakeEngine(**compressed))
    assert (found is None) == (why is None)
    if why is not None:
        with pytest.raises(ValueError, match=why):
            raise ValueError(found)


def test_share_of_time_saved_over_share_of_arithmetic_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, _ = timed(monkeypatch, FakeEngine(10.0), FakeEngine(8.0))
    assert saved_share(speed, 100, 80) == pytest.approx(1.0)
    assert saved_share(speed, 100, 60) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="none were removed"):
        saved_share(speed, 100, 100)


COUNTED = [
    ("y = MatMul(x, w)", "float[B, S, 3] x", "float[3, 5] w", 2 * 7 * 3 * 5),
    ("y = MatMul(x, z)", "float[B, 4, S, 3] x, float[B, 4, 3, S] z", "", 2 * 4 * 7 * 7 * 3),
    ("y = Gemm <transA = 1, transB = 1> (x, w)", "float[3, S] x", "float[5, 3] w", 7 * 3 * 5),
    ("y = Conv <group = 2> (x, w)", "float[B, 4, S] x", "float[6, 2, 3] w", 2 * 6 * 5 * 2 * 3),
    ('y = Einsum <equation = "bik, bjk -> bij"> (x, z)', "float[B, S, 3] x, float[B, S, 3] z", "", 2 * 7 * 7 * 3),
    ('y = Einsum <equation = "bij -> bji"> (x)', "float[B, S, 3] x", "", 0),
    ("y = Add(x, w)", "float[B, S, 3] x", "float[3] w", 0),
    (
        "y = com.microsoft.FusedMatMul <transB = 1> (x, z)",
        "float[B, S, 3] x, float[B, S, 3] z",
        "",
        2 * 7 * 7 * 3,
    ),
    (
        "y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, z, v)",
        "float[B, S, 8] x, float[B, 5, 8] z, float[B, 5, 6] v",
        "",
        2 * 7 * 5 * (8 + 6),
    ),
    (
        "y = com.microsoft.Attention <num_heads = 2> (x, w, b)",
        "float[B, S, 8] x",
        "float[8, 12] w, float[12] b",
        2 * 7 * 8 * 12 + 2 * 2 * 7 * 7 * 4,
    ),
    (
        "y = com.microsoft.Attention <num_heads = 2, qkv_hidden_sizes = [4, 4, 6]> (x, w, b)",
        "float[B, S, 8] x",
        "float[8, 14] w, float[14] b",
        2 * 7 * 8 * 14 + 2 * 7 * 7 * (4 + 6),
    ),
    (
        "y = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (x, k, v, , , l, t)",
        "float[B, S, 8] x, float[B, S, 4] k, float[B, S, 4] v, int32[B] l, int32 t",
        "",
        2 * 7 * 7 * (8 + 8),
    ),
]


@pytest.mark.parametrize(("body", "inputs", "weights", "count"), COUNTED)
def test_multiply_accumulates_of_an_operator(body: str, inputs: str, weights: str, count: int) -> None:
    model = parsed(body, inputs, "float y", weights)
    before = [str(value.shape) for value in model.graph.inputs]
    assert macs(model, 2, 7) == count
    assert [str(value.shape) for value in model.graph.inputs] == before


def test_attention_of_the_standard() -> None:
    model = parsed(
        "y = Attention(q, k, v)", "float[B, 4, S, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 6] v", "float y", opset=23
    )
    assert macs(model, 2, 7) == 2 * 4 * 7 * 7 * (8 + 6)


def test_a_causal_head_that_keeps_every_block_is_computed_whole() -> None:
    kept = np.stack([np.ones((2, 2), np.bool_), np.eye(2, dtype=np.bool_)])
    model = standalone_model(block_sparse_attention(BlockMask(kept, 8), 4, 6, scale=1.0, causal=True))
    *given, mask = model.graph.inputs
    for value, width in zip(given, (4, 4, 6), strict=True):
        value.shape = ir.Shape([1, "S", 2, width])
    mask.const_value = ir.tensor(kept)
    assert macs(model, 1, 16) == (16 * 16 + 2 * 8 * 8) * (4 + 6)


@pytest.mark.parametrize(("kept", "positions", "memory"), [("3", "99", 3), ("64", "9", 2), (None, None, 7)])
def test_a_memory_is_as_long_as_the_model_keeps_it(kept: str | None, positions: str | None, memory: int) -> None:
    """As where it is timed; as long as the text where the graph does not say. A cache is empty."""
    model = parsed(
        "a = Concat <axis = 1> (memory_0, x)  y = MatMul(a, w)  z = MatMul(cache, w)",
        "float[batch, memory, 8] memory_0, float[batch, sequence, 8] x, float[batch, past_length, 8] cache",
        "float y, float z",
        "float[8, 4] w",
    )
    if kept is not None and positions is not None:
        model.metadata_props.update({MEMORY_LENGTH: kept, MAX_POSITIONS: positions})
    assert macs(model, 2, 7) == 2 * (memory + 7) * 8 * 4


def test_shapes_that_cannot_be_told_give_no_count() -> None:
    model = parsed(
        "n = NonZero(x)  c = Cast <to = 1> (n)  t = Transpose(c)  y = MatMul(c, t)", "float[B, S] x", "float y"
    )
    assert macs(model, 2, 7) is None


def test_multiply_accumulates_of_a_model(bert: Pruned) -> None:
    """BERT: projections and attention of the heads kept, feed-forward of every layer, pooler and classifier."""
    config = bert.model.config
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.hidden_size // 4
    batch, seq = 3, 11

    def formula(heads: list[int]) -> int:
        rows = batch * seq
        layers = sum(rows * 4 * hidden * width * kept + 2 * rows * seq * width * kept for kept in heads)
        return layers + len(heads) * rows * 2 * hidden * inner + batch * hidden * (hidden + config.num_labels)

    assert macs(load(bert.shrunk), batch, seq) == formula([len(site.kept) for site in bert.plan.sites])
    # The gates of the reference multiply, but nothing is summed up: they do not count.
    assert macs(load(bert.reference), batch, seq) == formula([site.heads for site in bert.plan.sites])


def mean(statistics: np.ndarray) -> float:
    return float(statistics[:, 0].mean())


def test_paired_interval_is_narrow_where_the_models_agree() -> None:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(400, 1))
    compressed = dense - 0.1
    found = paired_interval(dense, compressed, mean, seed=0)
    assert found == pytest.approx((-0.1, -0.1, -0.1))
    shuffled = paired_interval(dense, rng.permutation(compressed), mean, seed=0)
    assert shuffled.difference == pytest.approx(-0.1)
    assert shuffled.low < -0.15 < -0.05 < shuffled.high


def test_paired_interval_has_the_width_of_its_formula() -> None:
    """The standard error of a paired mean, for differences of known spread."""
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(1000, 1))
    compressed = dense + rng.normal(0.05, 1.0, size=(1000, 1))
    found = paired_interval(dense, compressed, mean, seed=3)
    error = float((compressed - dense).std() / np.sqrt(1000))
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert found.low < found.difference < found.high
    assert paired_interval(dense, compressed, mean, seed=3) == found
    assert paired_interval(dense, compressed, mean, seed=4) != found


def test_draws_that_leave_the_metric_undefined_are_left_out() -> None:
    statistics = np.array([[1.0], [0.0], [0.0]])
    found = paired_interval(statistics, statistics, lambda rows: mean(rows) if rows.any() else float("nan"), seed=0)
    assert found == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("one", "other"), [(3, 4), (0, 0)])
def test_unlike_rows_are_not_paired(one: int, other: int) -> None:
    with pytest.raises(ValueError, match="both sides must have answered the same"):
        paired_interval(np.zeros((one, 2)), np.zeros((other, 2)), mean, seed=0)


def test_bench_compares_any_two_files(bert: Pruned) -> None:
    found = bench(bert.reference, bert.shrunk, [1, 2], [8], provider="cpu", threads=1, seconds=0.1)
    assert [(speed.batch, speed.seq, speed.void) for speed in found.speeds] == [(1, 8, None), (2, 8, None)]
    assert (found.dense.attentions, found.compressed.attentions) == (3, bert.attentions)
    assert (found.dense.fused, found.compressed.fused) == (3, bert.attentions)
    assert found.compressed.parameters < found.dense.parameters
    assert found.compressed.file_bytes < found.dense.file_bytes
    assert found.compressed.macs == macs(load(bert.shrunk), 1, 8)
    assert found.dense.peak_memory_bytes
    assert found.compressed.file == str(bert.shrunk)
    assert found.session["intra_op_threads"] == 1


@pytest.mark.parametrize(
    ("shape", "batch", "seq", "message"),
    [
        ("2, 16", 2, 8, "x has the length 16 in the graph, 8 was asked for (--seq); ask for 16 or export"),
        (
            "2, 16",
            1,
            16,
            "x: the graph fixes the batch at 2, 1 was asked for; ask for 2 or export the graph with a free",
        ),
        ("B, S", 1, 8, "cannot run at batch 1, length 8, maybe more tokens than it has positions for; ask for another"),
    ],
)
def test_bench_names_the_graph_and_the_size_that_it_cannot_run(
    shape: str, batch: int, seq: int, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "graph.onnx"
    positions = "one = Constant <value_ints = [1]> () s = Shape (x) n = Slice (s, one, two) p = Expand (w, n)"
    body = f"two = Constant <value_ints = [2]> () {positions} f = Cast <to = 1> (x) y = Add (f, p)"
    save(parsed(body, f"int64[{shape}] x", f"float[{shape}] y", "float[6] w"), path)
    with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
        bench(path, path, [batch], [seq], provider="cpu", threads=1, seconds=0.01)


def test_bench_refuses_graphs_with_other_inputs(bert: Pruned, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    save(parsed("y = Relu(x)", "float[B, S] x", "float[B, S] y"), other)
    with pytest.raises(InputError, match=r"it wants x, and .* has input_ids, attention_mask"):
        bench(bert.shrunk, other, [1], [8], provider="cpu", threads=1)
