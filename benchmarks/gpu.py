"""What pruned heads are worth on an NVIDIA GPU, with TensorRT or ONNX Runtime's CUDA provider.

    python -m benchmarks.gpu                                     # TensorRT, fp16, batch 1, 8, 32, 128 and 384 tokens
    python -m benchmarks.gpu --runtime ort --precision fp16      # the same with ONNX Runtime on CUDA

BERT-base's shape with random weights, which do not change the time; 72 and 12 of 144 heads, drawn over the whole model;
dense and compressed timed in turn. Times are the clock's (`host`), and the GPU's own where it tells them (`device`),
transfers left out. The exit code is 1 where a goal is missed: at batch 8 and more, 80% of the arithmetic saved is time
saved, and 17.5% (72 heads) and 33% (12 heads) more examples a second; 23% smaller weights at 12 heads; as many fused
attentions on both sides.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.speed import plans
from compressor.errors import CompressorError
from compressor.export import export_reference
from compressor.measure import interleave, macs
from compressor.report import Speed
from compressor.targets import ENGINE_FILES, TOLERANCE, Engine, Tuning, check, session, span, target
from compressor.targets.compare import relative_error
from compressor.targets.feeds import random_feeds
from graph_passes import load, save, shrink

BATCHES, SEQS = (1, 8, 32), (128, 384)
GOAL_SHARE, GOAL_WEIGHTS = 0.8, 0.23
_COLUMNS = (
    *("dense host p50/p90/p99, ms", "compressed", "dense device p50, ms", "compressed"),
    *("ratio of host p50 (95%)", "examples/s", "share of time saved over share of arithmetic"),
)
GOAL_FASTER = {72: 0.175, 12: 0.33}
"""Examples a second more than dense, of the papers: half the heads, and 12 of 144."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("trt", "ort"), default="trt")
    parser.add_argument("--precision", choices=tuple(TOLERANCE), default="fp16")
    parser.add_argument("--seconds", type=float, default=10.0, help="a row")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    try:
        check(asked.runtime, asked.precision, "cuda")
    except CompressorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    with tempfile.TemporaryDirectory() as folder:
        return run(asked, Path(folder))


def run(asked: argparse.Namespace, folder: Path) -> int:
    """Build, compare with the graph, time and print; 1 where a goal is missed."""
    model, inputs, wanted = plans("base", asked.seed)
    tuning = Tuning(batch=span(BATCHES), seq=span(SEQS))
    engines: dict[int, Engine] = {}
    graphs: dict[int, Path] = {}
    for kept, plan in wanted.items():
        reference, graphs[kept] = folder / "reference.onnx", folder / f"{kept}.onnx"
        export_reference(model, plan, inputs, reference)
        save(shrink(load(reference), plan).model, graphs[kept])
        place = folder / str(kept)
        place.mkdir()
        out = place / ENGINE_FILES[asked.runtime]
        build = target(asked.runtime)
        engines[kept] = build(graphs[kept], out, precision=asked.precision, provider="cuda", tuning=tuning)
        error = error_of(engines[kept], graphs[kept])
        print(f"{kept} heads: {engines[kept].optimization}; {built(engines[kept])}; error {error:.1e}")
    dense, *others = engines
    used = engines[dense].session
    print(f"{used['runtime']} on {used['provider']}; {machine('polygraphy', 'onnxruntime-gpu')}")
    print("| heads | batch | tokens | " + " | ".join(_COLUMNS) + " |")
    missed = []
    for kept in others:
        for batch in BATCHES:
            for seq in SEQS:
                feeds = random_feeds(load(graphs[dense]), batch, seq)
                speed = interleave(
                    engines[dense], engines[kept], feeds, batch=batch, seq=seq, seconds=asked.seconds, seed=asked.seed
                )
                counts = [macs(load(graphs[heads]), batch, seq) for heads in (dense, kept)]
                share = saved(speed, counts[0], counts[1])
                print(line(kept, speed, share))
                faster = ratio(speed) - 1
                if batch >= 8 and share is not None and share < GOAL_SHARE:
                    missed.append(f"{kept} heads, batch {batch}, {seq} tokens: share {share:.2f}")
                if batch >= 8 and faster < GOAL_FASTER[kept]:
                    missed.append(f"{kept} heads, batch {batch}, {seq} tokens: {faster:.1%} faster")
                if speed.void:
                    missed.append(f"{kept} heads: {speed.void}")
    before, after = (weights(graphs[heads]) for heads in (dense, min(others)))
    print(f"weights: {before / 1e6:.1f} MB to {after / 1e6:.1f} MB, {1 - after / before:.1%} smaller")
    if 1 - after / before < GOAL_WEIGHTS:
        missed.append(f"weights {1 - after / before:.1%} smaller")
    print("missed: " + "; ".join(missed) if missed else "every goal reached")
    return bool(missed)


def error_of(engine: Engine, graph: Path) -> float:
    """Largest relative error against the graph on the CPU, in fp32."""
    feeds = random_feeds(load(graph), 2, 40, padded=True)
    expected = session.run(session.open_session(graph, session.describe("cpu", None)), feeds)
    got = engine.run(feeds)
    return max(relative_error(expected[name], got[name], feeds) for name in expected)


def built(engine: Engine) -> str:
    """Sizes on the device and time to build, where the runtime builds ahead of time."""
    facts = engine.built
    if facts is None:
        return "loaded as it is"
    sizes = f"{facts.plan_bytes / 1e6:.0f} MB, {facts.activation_bytes / 1e6:.0f} MB beside its weights"
    return f"built in {facts.seconds:.0f} s, {sizes}"


def ratio(speed: Speed) -> float:
    """Dense over compressed p50, by the device's clock where it is known."""
    one, other = speed.dense.device, speed.compressed.device
    return speed.ratio if one is None or other is None else one[0] / other[0]


def saved(speed: Speed, dense: int | None, compressed: int | None) -> float | None:
    """Share of time saved over share of multiply-accumulates removed."""
    if dense is None or compressed is None:
        return None
    return (1 - 1 / ratio(speed)) / (1 - compressed / dense)


def weights(graph: Path) -> int:
    """Bytes of a graph's initializers."""
    return sum(value.const_value.nbytes for value in load(graph).graph.initializers.values() if value.const_value)


def line(kept: int, speed: Speed, share: float | None) -> str:
    """One row of the table."""
    sides: Any = (speed.dense, speed.compressed)
    host = [f"{side.p50:.3f}/{side.p90:.3f}/{side.p99:.3f}" for side in sides]
    device = [f"{side.device[0]:.3f}" if side.device else "" for side in sides]
    told = "" if share is None else f"{share:.2f}"
    cells = (f"{kept}/144", speed.batch, speed.seq, host[0], host[1], device[0], device[1])
    between = f"{speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})"
    return "| " + " | ".join(map(str, (*cells, between, f"{speed.compressed.throughput:.0f}", told))) + " |"


if __name__ == "__main__":
    sys.exit(main())
