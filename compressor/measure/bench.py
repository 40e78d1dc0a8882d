"""Build two ONNX files for one runtime and time them in turn."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError
from compressor.measure.engine_facts import facts
from compressor.measure.timing import interleave
from compressor.progress import Listener, NullListener
from compressor.results import EngineFacts, Note, NoteCode, Speed, size_label
from compressor.targets import DEFAULT_TARGET, BuildOptions, Engine, Feeds, Precision, Provider, span, target
from compressor.targets.trial_inputs import draws_ids, has_integer_rows, has_lengths, trial_feeds
from graph_passes import load


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
    seed: int = 0,
    listener: Listener | None = None,
) -> BenchResult:
    """Build two graphs for a runtime and time them in turn, on example rows that the first carries or random inputs.

    Args:
        dense: the first ONNX file.
        compressed: the second ONNX file, with the same inputs.
        batches: batch sizes to time, each with every length.
        seqs: lengths to time, in tokens; a graph of images has none.
        runtime: name of the target.
        precision: numeric precision of the engines.
        provider: device to run on; None: a GPU where there is one.
        threads: threads per call; None: one per core.
        kernel: library of `compress kernel`.
        seconds: approximate duration of each row.
        seed: of the inputs and of the bootstrap.
        listener: receives the progress.

    Raises:
        GraphError: a file cannot be read.
        InputError: a graph cannot be run at a requested size, or the two graphs have different inputs.
        UsageError: the target does not exist, or options contradict it.
        TargetMissingError: the runtime or its device is missing.
    """
    chosen, listener = target(runtime), listener or NullListener()
    chosen.check(precision=precision, provider=provider, kernel=kernel)
    # Both files are read, and inputs drawn, before anything is built.
    graphs = {path: load(path) for path in (dense, compressed)}
    for note in random_inputs_notes(graphs[dense], dense):
        listener.note(note)
    lengths: tuple[int | None, ...] = tuple(dict.fromkeys(seqs)) if has_lengths(graphs[dense]) else (None,)
    sizes = list(itertools.product(batches, lengths))
    inputs = {(batch, seq): sized_feeds(graphs[dense], dense, batch, seq or 1, seed) for batch, seq in sizes}
    options = BuildOptions(
        batch=span(batch for batch, _ in sizes), seq=span(seq or 1 for seq in lengths), kernel=kernel
    )
    with tempfile.TemporaryDirectory() as folder:
        engines: list[Engine] = []
        for number, path in enumerate((dense, compressed)):
            with listener.stage(f"build {path.name}"):
                engines.append(
                    chosen.build(
                        path,
                        Path(folder) / f"{number}{chosen.suffixes[0]}",
                        precision=precision,
                        provider=provider,
                        threads=threads,
                        options=options,
                    )
                )
        _require_same_inputs(engines, dense, compressed)
        for engine, path in zip(engines, (dense, compressed), strict=True):
            for (batch, seq), feeds in inputs.items():
                require_run(engine, path, feeds, batch, seq or 1)
        speeds = tuple(_speeds(engines, inputs, seconds, seed, listener))
        with listener.stage("measure memory"):
            counted = [seq or 1 for seq in lengths]
            first, second = (
                facts(engine, path, batch=sizes[0][0], lengths=counted, file=str(path))
                for engine, path in zip(engines, (dense, compressed), strict=True)
            )
    return BenchResult(first, second, speeds, dict(engines[0].session))


def _speeds(
    engines: list[Engine], inputs: Mapping[tuple[int, int | None], Feeds], seconds: float, seed: int, listener: Listener
) -> Iterator[Speed]:
    """Time two engines on each of `inputs`, which are feeds by batch size and length, None for graphs without one."""
    for (batch, seq), feeds in inputs.items():
        with listener.stage(f"time {size_label(batch, seq)}") as on_progress:
            yield interleave(
                engines[0], engines[1], feeds, batch=batch, seq=seq, seconds=seconds, seed=seed, on_progress=on_progress
            )


def _require_same_inputs(engines: list[Engine], dense: Path, compressed: Path) -> None:
    """Raise InputError where the second graph has an input that the first one lacks."""
    first, second = (engine.inputs for engine in engines)
    if set(second) - set(first):
        raise InputError(
            f"{compressed}: its inputs are {', '.join(second)}, and those of {dense} are {', '.join(first)}; compare"
            " two graphs of the same model",
            code=ErrorCode.TENSOR_MISMATCH,
            path=compressed,
            tensors=tuple(sorted(set(second) - set(first))),
        )


def sized_feeds(model: ir.Model, path: Path, batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
    """Inputs of a requested size, from the example rows of the graph where it has any, else random.

    Args:
        model: the graph.
        path: its file, for the error message.
        batch: number of rows.
        seq: their length in tokens.
        seed: seed of the random numbers.

    Raises:
        InputError: the graph fixes another size.
    """
    fixed = [(name, value) for name, value in _fixed_lengths(model) if value != seq]
    if fixed:
        name, length = fixed[0]
        raise InputError(
            f"{path}: the graph fixes the length of {name} at {length}, and {seq} was requested (--seq); request"
            f" {length}, or export the graph with a free length",
            code=ErrorCode.TENSOR_MISMATCH,
            path=path,
            field="seq",
            tensor=name,
            value=seq,
            expected=length,
        )
    try:
        return trial_feeds(model, batch, seq, seed=seed)
    except InputError as error:
        raise InputError(f"{path}: {error} (--batch)", code=error.code, path=path, **error.details) from error


def random_inputs_notes(model: ir.Model, path: Path) -> list[Note]:
    """A note on a graph that is timed on random ids, if it is."""
    text = f"{path}: the graph carries no example rows, as those of compress do; it is timed on random ids"
    return [Note(code=NoteCode.RANDOM_INPUTS, text=text)] if draws_ids(model) else []


def _fixed_lengths(model: ir.Model) -> Iterator[tuple[str, int]]:
    """Inputs of token rows whose length the graph fixes, with that length."""
    for value in model.graph.inputs:
        length = value.shape[1] if value.shape is not None and has_integer_rows(value) else None
        if isinstance(length, int):
            yield str(value.name), length


def require_run(engine: Engine, path: Path, feeds: Feeds, batch: int, seq: int) -> None:
    """Check that an engine can run on inputs of a size.

    Args:
        engine: the engine.
        path: its graph, for the error message.
        feeds: inputs of that size.
        batch: their number of rows.
        seq: their length in tokens.

    Raises:
        InputError: the engine cannot run on them.
    """
    try:
        engine.run(feeds)
    except InputError as error:
        or_ids = " or take no random ids" if draws_ids(load(path)) else ""
        raise InputError(
            f"{path}: cannot run at batch {batch}, length {seq}; the model may have fewer positions{or_ids}, request"
            " another size (--batch, --seq; --debug shows the runtime's message)",
            code=ErrorCode.RUNTIME_FAILED,
            path=path,
            batch=batch,
            seq=seq,
        ) from error
