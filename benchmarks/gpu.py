"""Time pruned models on an NVIDIA GPU, with TensorRT or ONNX Runtime's CUDA provider.

    python -m benchmarks.gpu                                     # TensorRT, fp16, batch 1, 8, 32, 128 and 384 tokens
    python -m benchmarks.gpu --runtime ort --precision fp16      # the same with ONNX Runtime on CUDA
    python -m benchmarks.gpu --export graphs                     # only write the graphs, on a machine with PyTorch
    python -m benchmarks.gpu --from graphs                       # use them on a machine with a GPU, without PyTorch

The graphs have BERT-base's shape and random weights, which do not change the time: `--export` omits the weights, so
that the graphs are small enough to send, and `--from` draws them. 72 and 12 of 144 heads are kept, drawn over the whole
model. Dense and compressed engines are timed in turn; dense against itself shows the resolution of the machine. Times
are host times and, where the runtime reports them, times by the GPU's clock without transfers (`device`). Engines, rows
and kernel timings stay in `--out`: a row of the same graphs, runtime and settings is not timed again.

The exit status is 1 where a goal is missed or cannot be measured. The goals are: errors within the tolerance of the
precision; at batch 8 and more, a share of time saved of at least 80% of the share of arithmetic saved, and 17.5% (72
heads) and 33% (12 heads) more examples per second; 23% smaller weights of the engine at 12 heads; and fused attention
in every layer that has attention, in every engine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_goals import LIGHTER, Goals, missed_goals, time_share, weight_change
from benchmarks.gpu_graphs import DENSE, KEPT, draw_weights, export, graph_paths, remove_weights
from benchmarks.machine import machine
from compressor.errors import CompressorError, InputError
from compressor.measure import interleave, macs
from compressor.results import Speed
from compressor.targets import TARGETS, TOLERANCE, BuildOptions, Engine, Feeds, span, target
from compressor.targets.cuda import driver
from compressor.targets.graph_facts import digest, fusible_attentions, graph_digest
from compressor.targets.onnxruntime import ort_session
from compressor.targets.relative_error import relative_error
from compressor.targets.tensorrt.engine import TrtEngine
from compressor.targets.tensorrt.graph import profile
from compressor.targets.trial_inputs import random_feeds
from graph_passes import load
from graph_passes.files import write_text

BATCHES, SEQS = (1, 8, 32), (128, 384)
_COLUMNS = (
    *("dense host p50/p90/p99, ms", "compressed", "dense device p50, ms", "compressed"),
    *("ratio of host p50 (95%)", "examples/s", "share of time saved over share of arithmetic"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=tuple(TARGETS), default="trt")
    parser.add_argument("--precision", choices=tuple(TOLERANCE), default="fp16")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of engines and rows")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="only write the graphs to this folder")
    parser.add_argument("--from", dest="graphs", type=Path, metavar="FOLDER", help="read the graphs from this folder")
    options = parser.parse_args(argv)
    if options.export is not None:
        export(options.export, options.seed)
        for path in graph_paths(options.export).values():
            remove_weights(path)
        return 0
    graphs = graph_paths(options.graphs or options.out / f"graphs-{options.seed}")
    missing = [path for path in graphs.values() if not path.is_file()]
    if options.graphs is not None and missing:
        parser.error(f"{missing[0]}: missing; write it with --export {options.graphs}")
    try:
        target(options.runtime).check(precision=options.precision, provider="cuda")
    except CompressorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if missing:
        export(missing[0].parent, options.seed)
    for path in graphs.values():
        draw_weights(path)
    device = driver().device.name.replace(" ", "-")
    folder = options.out / f"{options.runtime}-{options.precision}-{device}"
    folder.mkdir(parents=True, exist_ok=True)
    goals = Benchmark(options, graphs, folder).run()
    print(goals)
    return bool(goals.missed or goals.unknown)


class Benchmark:
    """Builds the engines of the graphs, compares them with the graphs, times them and prints the table.

    Args:
        options: options of the command line.
        graphs: number of heads -> file of the graph.
        folder: folder of engines and rows.
    """

    def __init__(self, options: argparse.Namespace, graphs: Mapping[int, Path], folder: Path) -> None:
        self.options, self.graphs, self.folder = options, graphs, folder
        self.runtime = target(options.runtime)

    def run(self) -> Goals:
        """Build, compare and time the engines, print the table, and return the goals that were missed."""
        goals = Goals()
        engines = self._engines(goals)
        if DENSE not in engines:
            return goals
        session = engines[DENSE].session
        print(f"{session['runtime']} on {session['provider']}; {machine('polygraphy', 'onnxruntime-gpu')}")
        print("| heads | batch | tokens | " + " | ".join(_COLUMNS) + " |\n|" + "---|" * (3 + len(_COLUMNS)))
        for heads, batch, seq in itertools.product((DENSE, *KEPT), BATCHES, SEQS):
            if heads in engines:
                self._row((engines[DENSE], engines[heads]), heads, batch, seq, goals)
        if min(KEPT) in engines:
            description, share = weight_change(engines[DENSE], engines[min(KEPT)])
            print(f"{description}: {share:.1%} smaller")
            if share < LIGHTER:
                goals.missed.append(f"{description}: {share:.1%} smaller")
        return goals

    def _engines(self, goals: Goals) -> dict[int, Engine]:
        """The engine of every graph that builds."""
        engines: dict[int, Engine] = {}
        for heads, graph in self.graphs.items():
            try:
                engine = self.build(graph, self.folder / str(heads))
                error = self.error(engine, graph)
            except CompressorError as failure:
                goals.missed.append(f"{heads} heads: {failure}")
                continue
            engines[heads] = engine
            print(f"{heads} heads: {engine.optimization}; {build_summary(engine)}; error {error:.1e}", flush=True)
            if not error <= TOLERANCE[self.options.precision]:
                goals.missed.append(f"{heads} heads: error {error:.1e}")
            if engine.fused < (attentions := len(fusible_attentions(load(graph)))):
                unfused = goals.missed if engine.fused < engine.attentions else goals.unknown
                unfused.append(f"{heads} heads: {engine.fused} of {attentions} attentions are known to be fused")
        return engines

    def _row(self, pair: tuple[Engine, Engine], heads: int, batch: int, seq: int, goals: Goals) -> None:
        """Time an engine against the dense one at one size, and print the row."""
        name, sides = f"{heads} heads, batch {batch}, length {seq}", (DENSE, heads)
        key = {
            "graphs": [graph_digest(self.graphs[side]) for side in sides],
            "engines": [digest(engine.path) for engine in pair],
            "session": json.loads(json.dumps(dict(pair[1].session))),
            "batch": batch,
            "seq": seq,
            "seconds": self.options.seconds,
            "seed": self.options.seed,
        }
        feeds = random_feeds(load(self.graphs[DENSE]), batch, seq)
        try:
            speed = self._timed(pair, key, feeds, self.folder / f"{heads}-{batch}-{seq}.json")
        except CompressorError as error:
            goals.missed.append(f"{name}: {error}")
            return
        share = time_share(speed, *(macs(load(self.graphs[side]), batch, seq) for side in sides))
        print(table_row(heads, speed, share), flush=True)
        goals.missed += [f"{name}: {reason}" for reason in missed_goals(heads, speed, share)]
        if share is None and heads != DENSE:
            goals.unknown.append(f"{name}: share of time saved")

    def _timed(self, pair: tuple[Engine, Engine], key: Mapping[str, Any], feeds: Feeds, path: Path) -> Speed:
        """The row of two engines, read from its file if the file has the same key, else timed and written."""
        with contextlib.suppress(OSError, ValueError):
            stored = json.loads(path.read_text())
            if stored["of"] == key:
                return Speed.model_validate(stored["speed"])
        speed = self.time(pair, feeds, key["batch"], key["seq"])
        write_text(path, json.dumps({"of": key, "speed": speed.model_dump(mode="json")}))
        return speed

    def time(self, pair: tuple[Engine, Engine], feeds: Feeds, batch: int, seq: int) -> Speed:
        """Time two engines in turn."""
        return interleave(*pair, feeds, batch=batch, seq=seq, seconds=self.options.seconds, seed=self.options.seed)

    def error(self, engine: Engine, graph: Path) -> float:
        """The largest relative error of an engine against its graph in ONNX Runtime on the CPU, in fp32."""
        feeds = random_feeds(load(graph), 2, SEQS[0], padded=True)
        session = ort_session.open_session(graph, ort_session.session_settings("cpu", None))
        expected, outputs = ort_session.run_session(session, feeds), engine.run(feeds)
        return max(relative_error(expected[name], outputs[name], feeds) for name in expected)

    def build(self, graph: Path, folder: Path) -> Engine:
        """The engine of a graph. A TensorRT engine that an earlier run of the benchmark has built is loaded."""
        folder.mkdir(exist_ok=True)
        options = BuildOptions(batch=span(BATCHES), seq=span(SEQS), timing_cache=self.folder / "timings")
        path = folder / self.runtime.engine_file
        if self.runtime.metadata_file is not None:
            with contextlib.suppress(InputError):  # it is missing, or of another GPU or version
                engine = self.runtime.load(path)
                metadata = engine.metadata if isinstance(engine, TrtEngine) else None
                built_for = metadata and (metadata.graph_hash, metadata.profiles)
                if built_for == (graph_digest(graph), profile(load(graph), options)):
                    return engine
        return self.runtime.build(graph, path, precision=self.options.precision, provider="cuda", options=options)


def build_summary(engine: Engine) -> str:
    """Duration and sizes of a build ahead of time."""
    facts = engine.built
    if facts is None:
        return "loaded by the runtime itself"
    sizes = f"{facts.engine_bytes / 1e6:.0f} MB, {facts.activation_bytes / 1e6:.0f} MB besides its weights"
    return f"built in {facts.seconds:.0f} s, {sizes}"


def table_row(heads: int, speed: Speed, share: float | None) -> str:
    """One row of the table."""
    latencies = (speed.dense, speed.compressed)
    host = [f"{latency.p50:.3f}/{latency.p90:.3f}/{latency.p99:.3f}" for latency in latencies]
    device = [f"{latency.device[0]:.3f}" if latency.device else "" for latency in latencies]
    cells = (f"{heads}/{DENSE}", speed.batch, speed.seq, *host, *device)
    ratio = f"{speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})"
    last = "" if share is None else f"{share:.2f}"
    return "| " + " | ".join(map(str, (*cells, ratio, f"{speed.compressed.throughput:.0f}", last))) + " |"


if __name__ == "__main__":
    sys.exit(main())
