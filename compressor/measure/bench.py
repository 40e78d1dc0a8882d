"""Two ONNX files, whoever made them: built alike, timed in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError
from compressor.measure.macs import macs
from compressor.measure.timing import interleave
from compressor.progress import Listener, NullListener
from compressor.results import EngineFacts, Speed
from compressor.targets import BuildOptions, Engine, Feeds, Precision, Provider, check, span, target
from compressor.targets.random_inputs import random_feeds
from graph_passes import count_parameters, load
from graph_passes.passes import Normalize


@dataclass(frozen=True)
class Bench:
    """What a comparison of two graphs found.

    Attributes:
        dense, compressed: facts about either engine.
        speeds: one row a batch size and length.
        session: runtime, provider and options of both.
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
    runtime: str = "ort",
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
    kernel: Path | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    listener: Listener | None = None,
) -> Bench:
    """Build two graphs for a runtime and time them against each other on random inputs.

    Args:
        dense, compressed: ONNX files with the same inputs.
        batches, seqs: sizes to time; each of the one with each of the other.
        runtime: name of the target.
        precision, provider, threads: see `Build`.
        kernel: see `BuildOptions`.
        seconds: about how long to measure each row.
        seed: of the inputs and the bootstrap.
        listener: hears of the stages.

    Raises:
        GraphError: a file cannot be read.
        InputError: a graph cannot be run, or not at a size asked for, or the two have different inputs.
        TargetMissingError: the runtime or the device is not there.
    """
    check(runtime, precision, provider, kernel)
    # What is wrong with a file is said before anything is built of either.
    graphs = {path: load(path) for path in (dense, compressed)}
    tried = {(batch, seq): _feeds(graphs[dense], dense, batch, seq, seed) for batch in batches for seq in seqs}
    sizes = list(tried)
    tuning = BuildOptions(batch=span(batch for batch, _ in sizes), seq=span(seq for _, seq in sizes), kernel=kernel)
    heard = listener or NullListener()
    with tempfile.TemporaryDirectory() as folder:
        engines: list[Engine] = []
        for path in (dense, compressed):
            with heard.stage(f"build {path.name}"):
                out = Path(folder) / f"{len(engines)}.onnx"
                make = target(runtime)
                engines.append(make(path, out, precision=precision, provider=provider, threads=threads, tuning=tuning))
        if set(engines[1].inputs) - set(engines[0].inputs):
            raise InputError(
                f"{compressed}: it wants {', '.join(engines[1].inputs)}, and {dense} has {', '.join(engines[0].inputs)}"
                "; compare two graphs of the same model"
            )
        for engine, path in zip(engines, (dense, compressed), strict=True):
            for (batch, seq), feeds in tried.items():
                require_run(engine, path, feeds, batch, seq)
        speeds = []
        for (batch, seq), feeds in tried.items():
            with heard.stage(f"time batch {batch}, length {seq}") as tell:
                speeds.append(
                    interleave(
                        engines[0], engines[1], feeds, batch=batch, seq=seq, seconds=seconds, seed=seed, tell=tell
                    )
                )
        with heard.stage("measure memory"):
            first, second = (
                facts(engine, path, batch=sizes[0][0], seq=sizes[0][1], file=str(path))
                for engine, path in zip(engines, (dense, compressed), strict=True)
            )
    return Bench(first, second, tuple(speeds), dict(engines[0].session))


def _feeds(model: ir.Model, path: Path, batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
    """Random inputs of the size asked for, if the graph does not fix another."""
    fixed = [(name, value) for name, value in _texts(model) if value != seq]
    if fixed:
        name, length = fixed[0]
        raise InputError(
            f"{path}: {name} has the length {length} in the graph, {seq} was asked for (--seq); ask for {length} or"
            " export the graph with a free length"
        )
    try:
        return random_feeds(model, batch, seq, seed=seed)
    except InputError as error:
        raise InputError(f"{path}: {error} (--batch)") from error


def _texts(model: ir.Model) -> Iterator[tuple[str, int]]:
    """Inputs of rows of tokens whose length the graph fixes, with that length."""
    for value in model.graph.inputs:
        length = value.shape[1] if value.shape is not None and len(value.shape) == 2 else None
        if isinstance(length, int) and value.dtype is not None and not value.dtype.is_floating_point():
            yield str(value.name), length


def require_run(engine: Engine, path: Path, feeds: Feeds, batch: int, seq: int) -> None:
    """Raise InputError unless an engine takes inputs of a size, which is said by its graph's path."""
    try:
        engine.run(feeds)
    except InputError as error:
        raise InputError(
            f"{path}: cannot run at batch {batch}, length {seq}, maybe more tokens than it has positions for; ask for"
            " another size (--batch, --seq; --debug shows what the runtime says)"
        ) from error


def facts(engine: Engine, graph: Path, *, batch: int, seq: int, file: str | None) -> EngineFacts:
    """Facts about an engine for the report.

    Args:
        engine: the engine.
        graph: the graph that it was built from; parameters and multiply-accumulates are counted there.
        batch, seq: size of the random inputs that memory is measured with.
        file: the name to report, or None where the file is not kept.
    """
    model = load(graph)
    feeds = random_feeds(model, batch, seq)
    Normalize()(model)
    return EngineFacts(
        file=file,
        parameters=count_parameters(model),
        file_bytes=sum(part.stat().st_size for part in _files(graph)),
        peak_memory_bytes=engine.memory(feeds),
        macs=macs(model, 1, seq),
        attentions=engine.attentions,
        fused=engine.fused,
        optimization=engine.optimization,
        built=engine.built,
    )


def _files(graph: Path) -> set[Path]:
    """The graph's file and those of its external data."""
    tensors = (value.const_value for value in load(graph).graph.initializers.values())
    return {graph, *(Path(tensor.path) for tensor in tensors if isinstance(tensor, ir.ExternalTensor))}
