"""What pruned heads are worth on an NVIDIA GPU, with TensorRT or ONNX Runtime's CUDA provider.

    python -m benchmarks.gpu                                     # TensorRT, fp16, batch 1, 8, 32, 128 and 384 tokens
    python -m benchmarks.gpu --runtime ort --precision fp16      # the same with ONNX Runtime on CUDA
    python -m benchmarks.gpu --export graphs                     # only the graphs, where PyTorch is; then, on the GPU's
    python -m benchmarks.gpu --from graphs                       # machine, which needs neither it nor transformers

BERT-base's shape with random weights, which do not change the time: `--export` leaves them out, so that the graphs are
small enough to send, and `--from` draws them. 72 and 12 of 144 heads, drawn over the whole model; dense and compressed
timed in turn, and dense beside itself, which shows what the machine can tell apart. Times are the clock's (`host`), and
the GPU's own where it tells them (`device`), transfers left out. Rows and timings of kernels stay in `--out`: a row of
the same graphs, runtime and settings is not timed again, and building is quicker.

The exit code is 1 where a goal is missed, or cannot be told to be reached: errors within the precision's tolerance; at
batch 8 and more, 80% of the arithmetic saved is time saved, and 17.5% (72 heads) and 33% (12 heads) more examples a
second; 23% smaller weights of the engine at 12 heads; attention fused in every layer that has any, on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from benchmarks.machine import machine
from compressor.errors import CompressorError, InputError
from compressor.measure import interleave, macs, saved_share
from compressor.report import Speed
from compressor.targets import ENGINE_FILES, TOLERANCE, BuildOptions, Engine, Feeds, check, span, target
from compressor.targets.cuda import driver
from compressor.targets.onnxruntime import ort_session
from compressor.targets.random_inputs import random_feeds
from compressor.targets.relative_error import relative_error
from compressor.targets.tensorrt import target as trt
from compressor.targets.tensorrt.graph import profile
from compressor.targets.tensorrt.metadata import digest, graph_digest
from graph_passes import find_attention, load, save, shrink
from graph_passes.files import beside
from graph_passes.passes import Normalize

DENSE, KEPT = 144, (72, 12)
BATCHES, SEQS = (1, 8, 32), (128, 384)
GOAL_SHARE, GOAL_WEIGHTS = 0.8, 0.23
_COLUMNS = (
    *("dense host p50/p90/p99, ms", "compressed", "dense device p50, ms", "compressed"),
    *("ratio of host p50 (95%)", "examples/s", "share of time saved over share of arithmetic"),
)
GOAL_FASTER = {72: 0.175, 12: 0.33}
"""Examples a second more than dense, of the papers: half the heads, and 12 of 144."""


@dataclass
class Goals:
    """Goals that were missed, and those of which it cannot be told."""

    missed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{name}: {'; '.join(found)}"
            for name, found in (("missed", self.missed), ("cannot be told", self.unknown))
            if found
        ]
        return "\n".join(lines) or "every goal reached"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("trt", "ort"), default="trt")
    parser.add_argument("--precision", choices=tuple(TOLERANCE), default="fp16")
    parser.add_argument("--seconds", type=float, default=10.0, help="a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="a folder for engines and rows")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write the graphs there, and no more")
    parser.add_argument("--from", dest="graphs", type=Path, metavar="FOLDER", help="take the graphs from there")
    asked = parser.parse_args(argv)
    if asked.export is not None:
        export(asked.export, asked.seed)
        for path in graphs_of(asked.export).values():
            leave_weights(path)
        return 0
    graphs = graphs_of(asked.graphs or asked.out / f"graphs-{asked.seed}")
    absent = [path for path in graphs.values() if not path.is_file()]
    if asked.graphs is not None and absent:
        parser.error(f"{absent[0]}: is missing; write it with --export {asked.graphs}")
    try:
        check(asked.runtime, asked.precision, "cuda")
    except CompressorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if absent:
        export(absent[0].parent, asked.seed)
    for path in graphs.values():
        draw_weights(path)
    place = asked.out / f"{asked.runtime}-{asked.precision}-{driver().device.name.replace(' ', '-')}"
    place.mkdir(parents=True, exist_ok=True)
    goals = run(asked, graphs, place)
    print(goals)
    return bool(goals.missed or goals.unknown)


def graphs_of(folder: Path) -> dict[int, Path]:
    """The graphs by how many heads they keep."""
    return {kept: folder / f"{kept}.onnx" for kept in (DENSE, *KEPT)}


def export(folder: Path, seed: int) -> None:
    """Write the graphs: dense, and with fewer heads."""
    from benchmarks.speed import plans
    from compressor.export import export_reference

    folder.mkdir(parents=True, exist_ok=True)
    model, inputs, wanted = plans("base", seed)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for kept, path in graphs_of(folder).items():
            export_reference(model, wanted[kept], inputs, Path(place) / "reference.onnx")
            save(shrink(load(Path(place) / "reference.onnx"), wanted[kept]).model, path)


def leave_weights(path: Path) -> None:
    """Remove the file of a graph's weights, whose places the graph still names; all else in it goes into the graph."""
    model = onnx.load(path, load_external_data=False)
    files = set()
    for tensor in outside(model):
        files.add(path.with_name(ExternalDataInfo(tensor).location))
        if tensor.data_type != onnx.TensorProto.FLOAT:
            load_external_data_for_tensor(tensor, str(path.parent))
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
    with beside(path) as place:
        onnx.save_model(model, place)
    for file in files:
        file.unlink()


def draw_weights(path: Path) -> None:
    """Draw the weights of a graph that has come without: those of a norm are one, vectors zero, as in a new BERT."""
    tensors = outside(onnx.load(path, load_external_data=False))
    for location in {ExternalDataInfo(tensor).location for tensor in tensors}:
        file = path.with_name(location)
        if file.is_file():
            continue
        with beside(file) as place, place.open("wb") as out:
            for tensor in tensors:
                draw = np.random.default_rng(zlib.crc32(tensor.name.encode()))
                scale = 0.02 if len(tensor.dims) > 1 else 0.0
                drawn = draw.standard_normal(tensor.dims, np.float32) * np.float32(scale)
                out.seek(ExternalDataInfo(tensor).offset or 0)
                out.write((drawn + np.float32(tensor.name.endswith("LayerNorm.weight"))).tobytes())


def outside(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The tensors whose content lies beside the graph."""
    return [held for held in model.graph.initializer if held.data_location == onnx.TensorProto.EXTERNAL]


def run(asked: argparse.Namespace, graphs: Mapping[int, Path], place: Path) -> Goals:
    """Build, compare with the graph, time and print."""
    goals = Goals()
    engines: dict[int, Engine] = {}
    for kept, graph in graphs.items():
        try:
            engine = build(graph, place / str(kept), asked, place / "timings")
            error_found = error_of(engine, graph)
        except CompressorError as error:
            goals.missed.append(f"{kept} heads: {error}")
            continue
        engines[kept] = engine
        print(f"{kept} heads: {engine.optimization}; {built(engine)}; error {error_found:.1e}", flush=True)
        if not error_found <= TOLERANCE[asked.precision]:
            goals.missed.append(f"{kept} heads: error {error_found:.1e}")
        if engine.fused < (attentions := attentions_of(graph)):
            where = goals.missed if engine.fused < engine.attentions else goals.unknown
            where.append(f"{kept} heads: {engine.fused} of {attentions} attentions are known to be fused")
    if DENSE not in engines:
        return goals
    used = engines[DENSE].session
    print(f"{used['runtime']} on {used['provider']}; {machine('polygraphy', 'onnxruntime-gpu')}")
    print("| heads | batch | tokens | " + " | ".join(_COLUMNS) + " |\n|" + "---|" * (3 + len(_COLUMNS)))
    for kept, batch, seq in itertools.product((DENSE, *KEPT), BATCHES, SEQS):
        if kept not in engines:
            continue
        feeds = random_feeds(load(graphs[DENSE]), batch, seq)
        of = {
            "graphs": [graph_digest(graphs[heads]) for heads in (DENSE, kept)],
            "engines": [digest(engines[heads].path) for heads in (DENSE, kept)],
            "session": json.loads(json.dumps(dict(engines[kept].session))),
            "batch": batch,
            "seq": seq,
            "seconds": asked.seconds,
            "seed": asked.seed,
        }
        try:
            speed = timed(asked, (engines[DENSE], engines[kept]), of, feeds, place / f"{kept}-{batch}-{seq}.json")
        except CompressorError as error:
            goals.missed.append(f"{kept} heads, batch {batch}, {seq} tokens: {error}")
            continue
        share = saved(speed, *(macs(load(graphs[heads]), batch, seq) for heads in (DENSE, kept)))
        print(line(kept, speed, share), flush=True)
        named = f"{kept} heads, batch {batch}, {seq} tokens"
        goals.missed += [f"{named}: {why}" for why in faults(kept, speed, share)]
        if share is None and kept != DENSE:
            goals.unknown.append(f"{named}: share of time saved")
    if min(KEPT) in engines:
        told, smaller = lighter(engines[DENSE], engines[min(KEPT)])
        print(f"{told}: {smaller:.1%} smaller")
        if smaller < GOAL_WEIGHTS:
            goals.missed.append(f"{told}: {smaller:.1%} smaller")
    return goals


def timed(
    asked: argparse.Namespace, pair: tuple[Engine, Engine], of: Mapping[str, Any], feeds: Feeds, path: Path
) -> Speed:
    """Dense beside another engine, or itself; kept as JSON with what it is of."""
    batch, seq = of["batch"], of["seq"]
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text())
        if kept["of"] == of:
            return Speed.model_validate(kept["speed"])
    found = interleave(*pair, feeds, batch=batch, seq=seq, seconds=asked.seconds, seed=asked.seed)
    with beside(path) as place:
        place.write_text(json.dumps({"of": of, "speed": found.model_dump(mode="json")}))
    return found


def faults(kept: int, speed: Speed, share: float | None) -> list[str]:
    """Goals that a row misses."""
    found = [] if speed.void is None else [speed.void]
    if kept == DENSE or speed.batch < 8:
        return found
    if share is not None and share < GOAL_SHARE:
        found.append(f"share {share:.2f}")
    if (faster := ratio(speed) - 1) < GOAL_FASTER[kept]:
        found.append(f"{faster:.1%} faster")
    return found


def attentions_of(graph: Path) -> int:
    """How many layers have attention."""
    model = load(graph)
    Normalize()(model)
    return len(find_attention(model))


def error_of(engine: Engine, graph: Path) -> float:
    """Largest relative error against the graph on the CPU, in fp32."""
    feeds = random_feeds(load(graph), 2, SEQS[0], padded=True)
    expected = ort_session.run(ort_session.open_session(graph, ort_session.describe("cpu", None)), feeds)
    got = engine.run(feeds)
    return max(relative_error(expected[name], got[name], feeds) for name in expected)


def build(graph: Path, place: Path, asked: argparse.Namespace, timings: Path) -> Engine:
    """The engine of a graph: TensorRT's is built once, and loaded where an earlier call has built it."""
    place.mkdir(exist_ok=True)
    tuning = BuildOptions(batch=span(BATCHES), seq=span(SEQS), timing_cache=timings)
    out = place / ENGINE_FILES[asked.runtime]
    if asked.runtime == "trt":
        with contextlib.suppress(InputError):  # there is none, or it is of another graph, GPU or TensorRT
            kept = trt.load(out)
            if (kept.metadata.model, kept.metadata.profiles) == (graph_digest(graph), profile(load(graph), tuning)):
                return kept
    return target(asked.runtime)(graph, out, precision=asked.precision, provider="cuda", tuning=tuning)


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
    """Share of time saved over share of multiply-accumulates removed; None where none were, or it is not known."""
    if dense is None or compressed is None or dense == compressed:
        return None
    return saved_share(speed.model_copy(update={"ratio": ratio(speed)}), dense, compressed)


def lighter(dense: Engine, compressed: Engine) -> tuple[str, float]:
    """What is compared, in words, and by what share the compressed engine has less of it: its weights on the device or,
    of a TensorRT that does not tell them, the file that holds them."""
    sizes = [weights(engine) for engine in (dense, compressed)]
    told = "weights of the engine"
    if None in sizes:
        told, sizes = "the engine's file", [engine.path.stat().st_size for engine in (dense, compressed)]
    before, after = (size or 0 for size in sizes)
    return f"{told}, {before / 1e6:.1f} to {after / 1e6:.1f} MB", 1 - after / before


def weights(engine: Engine) -> int | None:
    """Bytes of an engine's weights; None where the runtime does not tell."""
    if engine.built is not None:
        return engine.built.weight_bytes
    return sum(value.const_value.nbytes for value in load(engine.path).graph.initializers.values() if value.const_value)


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
