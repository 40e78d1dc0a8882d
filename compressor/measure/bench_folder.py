"""Build the graph of a finished run for several runtimes, and time all engines in turn."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.measure.bench import random_inputs_notes, require_run, sized_feeds
from compressor.measure.throughput import rows_per_second
from compressor.measure.timing import wait_until_idle
from compressor.measure.turns import median_times
from compressor.progress import Listener, NullListener
from compressor.results.times import size_label
from compressor.targets import BuildOptions, Engine, Feeds, Precision, Provider, target
from compressor.targets.options import span
from compressor.targets.random_inputs import has_lengths
from compressor.workdir import QUANTIZED_GRAPH
from graph_passes import load

GRAPHS: dict[Precision, str] = {"fp32": "model.onnx", "bf16": "model.onnx", "int8": QUANTIZED_GRAPH}
"""Graphs of a run by the precision of the engines that are built from them."""


@dataclass(frozen=True)
class FolderRow:
    """One engine at one size.

    Attributes:
        target: name of the target.
        precision: numeric precision of the engine.
        batch: rows of a call.
        seq: their length in tokens; 0 where the model has one size.
        p50: median milliseconds of a call, with all cores.
        throughput: rows a second, with one caller on all cores.
        callers: number of callers at once, with one thread each.
        throughput_of_callers: rows a second of all callers; None with one caller.
        fused: attentions that the runtime fuses, and attentions of the graph.
        failure: why there is no such engine; empty where there is.
    """

    target: str
    precision: Precision
    batch: int = 0
    seq: int = 0
    p50: float = 0.0
    throughput: float = 0.0
    callers: int = 1
    throughput_of_callers: float | None = None
    fused: tuple[int, int] = (0, 0)
    failure: str = ""

    @property
    def label(self) -> str:
        """The settings of the engine, e.g. `openvino int8`."""
        return f"{self.target} {self.precision}"


@dataclass(frozen=True)
class _Built:
    """The engines of one target and precision: one for all cores, and one for each caller."""

    target: str
    precision: Precision
    engine: Engine
    callers: tuple[Engine, ...]


def bench_folder(
    out: Path,
    targets: Sequence[str],
    batches: Sequence[int],
    seqs: Sequence[int],
    *,
    callers: int = 1,
    threads: int | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    listener: Listener | None = None,
) -> list[FolderRow]:
    """Build the graphs of a run for several runtimes, in fp32, bf16 and int8 where they can, and time all in turn.

    Args:
        out: the folder of the run.
        targets: names of the runtimes.
        batches: batch sizes to time, each with every length.
        seqs: lengths to time, in tokens.
        callers: callers at once whose throughput is measured too, with one thread each.
        threads: threads per call of the single caller; None: one per core.
        seconds: approximate duration for each engine and size.
        seed: of the inputs.
        listener: receives the progress.

    Returns:
        A row for each engine and size, and one for each engine that cannot be built.

    Raises:
        InputError: the folder has no graph, or no engine can be built.
        UsageError: a target does not exist.
    """
    listener = listener or NullListener()
    if not (out / GRAPHS["fp32"]).is_file():
        raise InputError(
            f"{out}: no {GRAPHS['fp32']} here; give the output folder of a run, or two ONNX files",
            code=ErrorCode.FILE_MISSING,
            path=out,
        )
    with tempfile.TemporaryDirectory() as folder:
        options = BuildOptions(batch=span(batches), seq=span(seqs))
        graph = out / GRAPHS["fp32"]
        model = load(graph)
        for note in random_inputs_notes(model, graph):
            listener.note(note)
        sizes = itertools.product(batches, seqs if has_lengths(model) else (0,))
        inputs = {(batch, seq): sized_feeds(model, graph, batch, seq, seed) for batch, seq in sizes}

        def require_sizes(engine: Engine) -> None:
            for (batch, seq), feeds in inputs.items():
                require_run(engine, graph, feeds, batch, seq)

        built, rows = _build_all(out, targets, Path(folder), threads, callers, options, require_sizes, listener)
        for (batch, seq), feeds in inputs.items():
            with listener.stage(f"time {size_label(batch, seq or None)}"):
                medians = median_times([each.engine for each in built], feeds, seconds * len(built))
                rows += _rows(built, medians, feeds, batch, seq, seconds)
    return rows


def _build_all(
    out: Path,
    targets: Sequence[str],
    folder: Path,
    threads: int | None,
    callers: int,
    options: BuildOptions,
    require_sizes: Callable[[Engine], None],
    listener: Listener,
) -> tuple[list[_Built], list[FolderRow]]:
    """The engines that can be built and run at all sizes, and rows with the reasons for those that cannot.

    Raises:
        InputError: no engine can be built.
    """
    built: list[_Built] = []
    failed: list[FolderRow] = []
    reasons: list[CompressorError] = []
    for name, (precision, file) in itertools.product(dict.fromkeys(targets), GRAPHS.items()):
        if not _has(name, precision) or not (out / (target(name).quantized_graph(precision) or file)).is_file():
            continue
        failures: list[str] = []
        with listener.stage(f"build {name} {precision}"):
            for source in _sources(out, name, precision):
                scratch = folder / f"{name}-{precision}{len(failures)}"
                scratch.mkdir()
                try:
                    engine = _build(out / source, name, precision, scratch, threads, callers, options)
                    require_sizes(engine.engine)
                except CompressorError as error:
                    failures.append(f"{source}: {error}")
                    reasons.append(error)
                    continue
                built.append(engine)
                break
            else:
                failed.append(FolderRow(name, precision, failure="; ".join(failures)))
    if not built:
        if len(reasons) == 1:
            raise reasons[0]
        raise InputError(
            f"{out}: no engine can be built: {'; '.join(f'{row.label}: {row.failure}' for row in failed)}",
            code=ErrorCode.RUNTIME_FAILED,
            path=out,
        )
    return built, failed


def _has(name: str, precision: Precision) -> bool:
    """Whether engines of a target can have a precision; what every machine has is tried in any case."""
    if precision != "bf16":
        return True
    if precision not in target(name).tried_precisions:
        return False
    try:
        target(name).check(precision=precision)
    except CompressorError:
        return False
    return True


def _sources(out: Path, name: str, precision: Precision) -> list[str]:
    """Files of the graphs that an engine can be built from, in the order to try them."""
    files = [file or GRAPHS["fp32"] for file in target(name).sources(precision)]
    return [file for file in files if (out / file).is_file()]


def _build(
    graph: Path,
    name: str,
    precision: Precision,
    scratch: Path,
    threads: int | None,
    callers: int,
    options: BuildOptions,
) -> _Built:
    runtime = target(name)
    path = scratch / runtime.engine_file
    provider: Provider | None = "cpu" if "cpu" in runtime.providers else None
    engine = runtime.build(graph, path, precision=precision, provider=provider, threads=threads, options=options)
    loaded = [
        runtime.load(path, provider=provider, threads=1, cached=False) for _ in range(callers if callers > 1 else 0)
    ]
    return _Built(name, precision, engine, tuple(loaded))


def _rows(
    built: Sequence[_Built], medians: Sequence[float], feeds: Feeds, batch: int, seq: int, seconds: float
) -> Iterator[FolderRow]:
    for each, median in zip(built, medians, strict=True):
        throughput = None
        if each.callers:
            wait_until_idle()
            throughput = rows_per_second(each.callers, feeds, batch=batch, seconds=seconds)
        yield FolderRow(
            target=each.target,
            precision=each.precision,
            batch=batch,
            seq=seq,
            p50=1e3 * median,
            throughput=batch / median,
            callers=max(1, len(each.callers)),
            throughput_of_callers=throughput,
            fused=(each.engine.fused, each.engine.attentions),
        )
