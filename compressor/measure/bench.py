"""Build two ONNX files for one runtime, or the graphs of a run for several, and time the engines in turn."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.measure.engine_facts import facts
from compressor.measure.throughput import rows_per_second
from compressor.measure.timing import interleave, median_times, wait_until_idle
from compressor.progress import Listener, NullListener
from compressor.results import EngineFacts, Note, NoteCode, Report, Speed, size_label
from compressor.targets import DEFAULT_TARGET, BuildOptions, Engine, Feeds, Precision, Provider, Target, span, target
from compressor.targets.trial_inputs import draws_ids, has_integer_rows, has_lengths, trial_feeds
from graph_passes import load

_GRAPH = "model.onnx"
"""The float graph of a run."""
_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
"""Precisions that are timed on every target that has them."""


@dataclass(frozen=True)
class BenchResult:
    """The comparison of two graphs.

    Attributes:
        dense: facts about the first engine.
        compressed: facts about the second engine.
        speeds: one row per batch size and length.
        session: runtime, provider and options of both engines.
    """

    dense: EngineFacts
    compressed: EngineFacts
    speeds: tuple[Speed, ...]
    session: dict[str, Any]


def bench(
    dense: Path,
    compressed: Path,
    batches: Iterable[int],
    seqs: Iterable[int],
    *,
    runtime: str = DEFAULT_TARGET,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
    kernel: Path | None = None,
    seconds: float = 10.0,
    listener: Listener | None = None,
) -> BenchResult:
    """Build two graphs for a runtime and time them in turn, on the example rows of the first graph or random inputs.

    Args:
        compressed: the second ONNX file, with the same inputs.
        batches: batch sizes to time, each with every length.
        seqs: lengths to time, in tokens; a graph of images has none.
        provider: device to run on; None: a GPU where there is one.
        threads: threads per call; None: one per core.
        kernel: library of `compress kernel`.
        seconds: approximate duration of each row.

    Raises:
        GraphError: a file cannot be read.
        InputError: a graph cannot be run at a requested size, or the two graphs have different inputs.
        UsageError: the target does not exist, or options contradict it.
        TargetMissingError: the runtime or its device is missing.
    """
    chosen, listener, paths = target(runtime), listener or NullListener(), (dense, compressed)
    chosen.check(precision=precision, provider=provider, kernel=kernel)
    # Faults of both files and of the sizes are reported before anything is built.
    model, _ = map(load, paths)
    inputs = _inputs(model, dense, batches, seqs, listener)
    lengths = list(dict.fromkeys(seq or 1 for _, seq in inputs))
    options = BuildOptions(batch=span(batch for batch, _ in inputs), seq=span(lengths), kernel=kernel)
    build = functools.partial(chosen.build, precision=precision, provider=provider, threads=threads, options=options)
    with tempfile.TemporaryDirectory() as folder:
        engines: list[Engine] = []
        for number, path in enumerate(paths):
            with listener.stage(f"build {path.name}"):
                engines.append(build(path, Path(folder) / f"{number}{chosen.suffixes[0]}"))
        _require_same_inputs(engines, dense, compressed)
        for engine, path in zip(engines, paths, strict=True):
            for (batch, seq), feeds in inputs.items():
                require_run(engine, path, feeds, batch, seq or 1)
        speeds, time = [], functools.partial(interleave, engines[0], engines[1], seconds=seconds)
        for (batch, seq), feeds in inputs.items():
            with listener.stage(f"time {size_label(batch, seq)}") as on_progress:
                speeds.append(time(feeds, batch=batch, seq=seq, on_progress=on_progress))
        with listener.stage("measure memory"):
            first, second = (
                facts(engine, path, batch=next(iter(inputs))[0], lengths=lengths, file=str(path))
                for engine, path in zip(engines, paths, strict=True)
            )
    return BenchResult(first, second, tuple(speeds), dict(engines[0].session))


def _inputs(
    model: ir.Model, path: Path, batches: Iterable[int], seqs: Iterable[int], listener: Listener
) -> dict[tuple[int, int | None], Feeds]:
    """The inputs of each batch size and length, None where a graph has no lengths, with a note if they are random."""
    for note in random_inputs_notes(model, path):
        listener.note(note)
    lengths: tuple[int | None, ...] = tuple(dict.fromkeys(seqs)) if has_lengths(model) else (None,)
    sizes = itertools.product(batches, lengths)
    return {(batch, seq): sized_feeds(model, path, batch, seq or 1) for batch, seq in sizes}


def _require_same_inputs(engines: list[Engine], dense: Path, compressed: Path) -> None:
    """Raise InputError where the second graph has an input that the first one lacks."""
    first, second = (engine.inputs for engine in engines)
    if set(second) - set(first):
        raise InputError.of_file(
            compressed,
            f"its inputs are {', '.join(second)}, and those of {dense} are {', '.join(first)}; compare two graphs of"
            " the same model",
            ErrorCode.TENSOR_MISMATCH,
            tensors=tuple(sorted(set(second) - set(first))),
        )


def sized_feeds(model: ir.Model, path: Path, batch: int, seq: int) -> dict[str, np.ndarray]:
    """Inputs of a requested size, from the example rows of the graph where it has any, else random.

    Raises:
        InputError: the graph fixes another size.
    """
    for value in model.graph.inputs:
        length = value.shape[1] if value.shape is not None and has_integer_rows(value) else None
        if isinstance(length, int) and length != seq:
            text = (
                f"the graph fixes the length of {value.name} at {length}, and {seq} was requested (--seq); request"
                f" {length}, or export the graph with a free length"
            )
            raise InputError.of_file(
                path, text, ErrorCode.TENSOR_MISMATCH, field="seq", tensor=str(value.name), value=seq, expected=length
            )
    try:
        return trial_feeds(model, batch, seq)
    except InputError as error:
        raise InputError.of_file(path, f"{error} (--batch)", error.code, **error.details) from error


def random_inputs_notes(model: ir.Model, path: Path) -> list[Note]:
    """A note on a graph that is timed on random ids; empty for other graphs."""
    text = f"{path}: the graph has no example rows in its metadata, so it is timed on random ids"
    return [Note(code=NoteCode.RANDOM_INPUTS, text=text)] if draws_ids(model) else []


def require_run(engine: Engine, path: Path, feeds: Feeds, batch: int, seq: int) -> None:
    """Check that an engine can run on inputs of a size.

    Raises:
        InputError: the engine cannot run on them.
    """
    try:
        engine.run(feeds)
    except InputError as error:
        or_ids = " or take no random ids" if draws_ids(load(path)) else ""
        text = (
            f"cannot run at batch {batch}, length {seq}; the model may have fewer positions{or_ids}, request another"
            " size (--batch, --seq; --debug shows the runtime's message)"
        )
        raise InputError.of_file(path, text, ErrorCode.RUNTIME_FAILED, batch=batch, seq=seq) from error


@dataclass(frozen=True)
class FolderRow:
    """One engine at one size.

    Attributes:
        target: name of the target.
        precision: numeric precision of the engine.
        batch: rows of a call.
        seq: their length in tokens; 0 where the model has one size.
        p50: median milliseconds of a call, with all cores.
        throughput: rows per second with one caller on all cores.
        callers: number of callers at once, with one thread each.
        throughput_of_callers: rows per second of all callers; None with one caller.
        fused: number of attentions that the runtime fuses, and number of attentions of the graph.
        failure: why the engine cannot be built; empty where it can.
        delivered: whether the run, or its last build, delivered the engine; False: it was built to be timed.
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


def bench_folder(
    out: Path,
    targets: Sequence[str],
    batches: Sequence[int],
    seqs: Sequence[int],
    *,
    callers: int = 1,
    threads: int | None = None,
    seconds: float = 10.0,
    report: Report | None = None,
    listener: Listener | None = None,
) -> list[FolderRow]:
    """Time the engine of a run and engines of its graphs for several runtimes, in fp32, bf16 and int8, in turn.

    Args:
        batches: batch sizes to time, each with every length.
        seqs: lengths to time, in tokens.
        callers: callers at once whose throughput is measured too, with one thread each.
        threads: threads per call of the single caller; None: one per core.
        seconds: approximate duration for each engine and size.
        report: the report of the run, whose engine is loaded rather than built; None: all are built.

    Returns:
        A row for each engine and size, and one for each engine that cannot be built.

    Raises:
        InputError: the folder has no graph, or no engine can be built.
        UsageError: a target does not exist.
    """
    listener, graph = listener or NullListener(), out / _GRAPH
    if not graph.is_file():
        text = f"no {graph.name} here; give the output folder of a run, or two ONNX files"
        raise InputError.of_file(out, text, ErrorCode.FILE_MISSING)
    model = load(graph)
    inputs = _inputs(model, graph, batches, seqs, listener)
    options = BuildOptions(batch=span(batches), seq=span(seqs))

    def open_engine(source: Path, name: str, precision: Precision, path: Path) -> _Engines:
        """The engine of a run, or one that is built from a graph."""
        runtime = target(name)
        provider: Provider | None = "cpu" if "cpu" in runtime.providers else None
        delivered = source.name == runtime.engine_file
        if delivered:
            path, engine = source, runtime.load(source, provider=provider, threads=threads, cached=False)
        else:
            engine = runtime.build(
                source, path, precision=precision, provider=provider, threads=threads, options=options
            )
        count = callers if callers > 1 else 0
        loaded = [runtime.load(path, provider=provider, threads=1, cached=False) for _ in range(count)]
        for (batch, seq), feeds in inputs.items():
            require_run(engine, graph, feeds, batch, seq or 1)
        return engine, loaded, delivered

    with tempfile.TemporaryDirectory() as folder:
        built, rows = _build_all(out, _engines(out, targets, report), Path(folder), open_engine, listener)
        for size, feeds in inputs.items():
            with listener.stage(f"time {size_label(*size)}"):
                rows += _time(built, size, feeds, seconds)
    return rows


_Engines = tuple[Engine, list[Engine], bool]
"""The engine for all cores, an engine for each of several callers, and whether the run delivered it."""


def _time(
    built: dict[tuple[str, Precision], _Engines], size: tuple[int, int | None], feeds: Feeds, seconds: float
) -> Iterator[FolderRow]:
    """The times of all engines at a size, in turn, and then the throughput of the callers of each."""
    batch, seq = size
    medians = median_times([engine for engine, _, _ in built.values()], feeds, seconds * len(built))
    for ((name, precision), (engine, callers, delivered)), median in zip(built.items(), medians, strict=True):
        throughput = None
        if callers:
            wait_until_idle()
            throughput = rows_per_second(callers, feeds, batch=batch, seconds=seconds)
        yield FolderRow(
            target=name,
            precision=precision,
            batch=batch,
            seq=seq or 0,
            p50=1e3 * median,
            throughput=batch / median,
            callers=max(1, len(callers)),
            throughput_of_callers=throughput,
            fused=(engine.fused, engine.attentions),
            delivered=delivered,
        )


def _build_all(
    out: Path,
    engines: Iterable[tuple[str, Precision, list[str]]],
    folder: Path,
    open_engine: Callable[[Path, str, Precision, Path], _Engines],
    listener: Listener,
) -> tuple[dict[tuple[str, Precision], _Engines], list[FolderRow]]:
    """The engines that can be built and run, at least one, and a row with the reason for each engine that cannot."""
    built: dict[tuple[str, Precision], _Engines] = {}
    failed, errors = list[FolderRow](), list[CompressorError]()
    for name, precision, sources in engines:
        failures: list[str] = []
        with listener.stage(f"build {name} {precision}"):
            for source in sources:
                scratch = folder / f"{name}-{precision}{len(failures)}"
                scratch.mkdir()
                try:
                    path = scratch / target(name).engine_file
                    built[name, precision] = open_engine(out / source, name, precision, path)
                    break
                except CompressorError as error:
                    failures.append(f"{source}: {error}")
                    errors.append(error)
            else:
                failed.append(FolderRow(name, precision, failure="; ".join(failures)))
    if not built and len(errors) == 1:
        raise errors[0]
    if not built:
        text = f"no engine can be built: {'; '.join(f'{row.label}: {row.failure}' for row in failed)}"
        raise InputError.of_file(out, text, ErrorCode.RUNTIME_FAILED)
    return built, failed


def _engines(out: Path, targets: Sequence[str], report: Report | None) -> Iterator[tuple[str, Precision, list[str]]]:
    """Target and precision of each engine to time, and the files to load or build it from, in the order to try them.

    The engine that the report names comes first. bf16 is timed where this machine has it, precisions in 8 bits where
    the run quantized.
    """
    delivered: tuple[Any, ...] = () if report is None else (report.target, report.precision)
    requested = () if report is None else (report.precision, report.recipe.get("precision"))
    for name in dict.fromkeys(targets):
        runtime = target(name)
        for precision in dict.fromkeys((*_PRECISIONS, *(delivered[1:] if name in delivered[:1] else ()))):
            files = [file or _GRAPH for file in runtime.sources(precision)]
            quantized = runtime.quantized_graph(precision)
            # A target that quantizes float graphs itself needs no quantized graph in the folder.
            if quantized is not None and not (out / quantized).is_file() and precision not in requested:
                files = []
            if report is not None and delivered == (name, precision) and report.compressed.file:
                files = [report.compressed.file, *files]
            files = [file for file in files if (out / file).is_file()]
            if files and (precision != "bf16" or _computes_bfloat16(runtime)):
                yield name, precision, files


def _computes_bfloat16(runtime: Target) -> bool:
    """Whether a target has bf16 on this machine; precisions that every machine has are tried without a check."""
    with contextlib.suppress(CompressorError):
        if "bf16" in runtime.tried_precisions:
            runtime.check(precision="bf16")
            return True
    return False
