"""Two ONNX files, whoever made them: built alike, timed in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import InputError
from compressor.measure.macs import macs
from compressor.measure.timing import interleave
from compressor.progress import Listener, Silent
from compressor.report.schema import EngineFacts, Speed
from compressor.targets import Engine, Precision, Provider, target
from compressor.targets.feeds import random_feeds
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
        seconds: about how long to measure each row.
        seed: of the inputs and the bootstrap.
        listener: hears of the stages.

    Raises:
        InputError: a file cannot be read or run, or the two have different inputs.
        TargetMissingError: the runtime or the device is not there.
    """
    sizes = [(batch, seq) for batch in batches for seq in seqs]
    heard = listener or Silent()
    with tempfile.TemporaryDirectory() as folder:
        engines: list[Engine] = []
        for path in (dense, compressed):
            with heard.stage(f"build {path.name}"):
                out = Path(folder) / f"{len(engines)}.onnx"
                engines.append(
                    target(runtime)(Path(path), out, precision=precision, provider=provider, threads=threads)
                )
        if set(engines[1].inputs) - set(engines[0].inputs):
            raise InputError(
                f"{compressed}: it wants {', '.join(engines[1].inputs)}, and {dense} has {', '.join(engines[0].inputs)}"
                "; compare two graphs of the same model"
            )
        model = load(dense)
        speeds = []
        for batch, seq in sizes:
            feeds = random_feeds(model, batch, seq, seed=seed)
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
    )


def _files(graph: Path) -> set[Path]:
    """The graph's file and those of its external data."""
    import onnx_ir as ir

    tensors = (value.const_value for value in load(graph).graph.initializers.values())
    return {graph, *(Path(tensor.path) for tensor in tensors if isinstance(tensor, ir.ExternalTensor))}
