"""The engine of a finished run and engines that are built from its graphs, for several runtimes, timed in turn."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.measure.bench import random_inputs_notes, require_run, sized_feeds
from compressor.measure.throughput import rows_per_second
from compressor.measure.timing import wait_until_idle
from compressor.measure.turns import median_times
from compressor.progress import Listener, NullListener
from compressor.results import Report
from compressor.results.times import size_label
from compressor.targets import BuildOptions, Engine, Feeds, Precision, Provider, target
from compressor.targets.base import span
from compressor.targets.trial_inputs import has_lengths
from graph_passes import load

GRAPH = "model.onnx"
"""The float graph of a run."""
_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
"""Precisions that are timed on every target that has them."""


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
        delivered: whether it is the engine that the run, or its last build, delivered, rather than built to be timed.
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
    delivered: bool = False

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
    is_delivered: bool


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
    report: Report | None = None,
    listener: Listener | None = None,
) -> list[FolderRow]:
    """Load the engine of a run, build its graphs for several runtimes, in fp32, bf16 and int8, and time all in turn.

    Args:
        out: the folder of the run.
        targets: names of the runtimes.
        batches: batch sizes to time, each with every length.
        seqs: lengths to time, in tokens.
        callers: callers at once whose throughput is measured too, with one thread each.
        threads: threads per call of the single caller; None: one per core.
        seconds: approximate duration for each engine and size.
        seed: of the inputs.
        report: the report of the run, whose engine is loaded rather than built; None: all are built.
        listener: receives the progress.

    Returns:
        A row for each engine and size, and one for each engine that cannot be built.

    Raises:
        InputError: the folder has no graph, or no engine can be built.
        UsageError: a target does not exist.
    """
    listener = listener or NullListener()
    if not (out / GRAPH).is_file():
        raise InputError(
            f"{out}: no {GRAPH} here; give the output folder of a run, or two ONNX files",
            code=ErrorCode.FILE_MISSING,
            path=out,
        )
    with tempfile.TemporaryDirectory() as folder:
        options = BuildOptions(batch=span(batches), seq=span(seqs))
        graph = out / GRAPH
        model = load(graph)
        for note in random_inputs_notes(model, graph):
            listener.note(note)
        sizes = itertools.product(batches, seqs if has_lengths(model) else (0,))
        inputs = {(batch, seq): sized_feeds(model, graph, batch, seq, seed) for batch, seq in sizes}

        def require_sizes(engine: Engine) -> None:
            for (batch, seq), feeds in inputs.items():
                require_run(engine, graph, feeds, batch, seq)

        built, rows = _build_all(out, targets, report, Path(folder), threads, callers, options, require_sizes, listener)
        for (batch, seq), feeds in inputs.items():
            with listener.stage(f"time {size_label(batch, seq or None)}"):
                medians = median_times([each.engine for each in built], feeds, seconds * len(built))
                rows += _rows(built, medians, feeds, batch, seq, seconds)
    return rows


def _build_all(
    out: Path,
    targets: Sequence[str],
    report: Report | None,
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
    for name, precision in _engines(targets, report):
        sources = _sources(out, name, precision, report)
        if not sources or not _has(name, precision):
            continue
        failures: list[str] = []
        with listener.stage(f"build {name} {precision}"):
            for source in sources:
                scratch = folder / f"{name}-{precision}{len(failures)}"
                scratch.mkdir()
                try:
                    engine = _open(out / source, name, precision, scratch, threads, callers, options)
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


def _engines(targets: Sequence[str], report: Report | None) -> list[tuple[str, Precision]]:
    """Target and precision of the engines to time, that of the report among them."""
    delivered: list[tuple[str, Any]] = [] if report is None else [(report.target, report.precision)]
    return [
        (name, precision)
        for name in dict.fromkeys(targets)
        for precision in dict.fromkeys((*_PRECISIONS, *(precision for of, precision in delivered if of == name)))
    ]


def _sources(out: Path, name: str, precision: Precision, report: Report | None) -> list[str]:
    """Files that an engine is loaded or built from, in the order to try them; none for what is not to be timed.

    The engine that the report names comes first. Precisions in 8 bits are timed where the run quantized.
    """
    runtime = target(name)
    quantized = runtime.quantized_graph(precision)
    files = [file or GRAPH for file in runtime.sources(precision)]
    delivers = report is not None and (report.target, report.precision) == (name, precision)
    # A target that quantizes float graphs itself needs no quantized graph in the folder.
    is_requested = report is not None and precision in (report.precision, report.recipe.get("precision"))
    if quantized is not None and not (out / quantized).is_file() and not is_requested:
        files = []
    engine = [report.compressed.file] if report is not None and delivers and report.compressed.file else []
    return [file for file in (*engine, *files) if (out / file).is_file()]


def _open(
    source: Path,
    name: str,
    precision: Precision,
    scratch: Path,
    threads: int | None,
    callers: int,
    options: BuildOptions,
) -> _Built:
    """The engine of a run, or one that is built from a graph."""
    runtime = target(name)
    provider: Provider | None = "cpu" if "cpu" in runtime.providers else None
    path = source
    if is_delivered := source.name == runtime.engine_file:
        engine = runtime.load(path, provider=provider, threads=threads, cached=False)
    else:
        path = scratch / runtime.engine_file
        engine = runtime.build(source, path, precision=precision, provider=provider, threads=threads, options=options)
    loaded = [
        runtime.load(path, provider=provider, threads=1, cached=False) for _ in range(callers if callers > 1 else 0)
    ]
    return _Built(name, precision, engine, tuple(loaded), is_delivered)


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
            delivered=each.is_delivered,
        )
