"""Facts about an engine for reports: size, memory and operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from compressor.measure.macs import macs
from compressor.results import EngineFacts
from compressor.targets import Engine, target_of
from compressor.targets.trial_inputs import trial_feeds
from graph_passes import count_parameters, load
from graph_passes.passes import Normalize


def facts(engine: Engine, graph: Path, *, batch: int, lengths: Sequence[int], file: str | None) -> EngineFacts:
    """Facts about an engine for a report.

    Args:
        graph: the graph that it was built from, whose parameters and multiply-accumulates are counted.
        batch: rows of the inputs with which memory is measured.
        lengths: lengths in tokens at which multiply-accumulates are counted; the first is that of the inputs.
        file: name of the engine's file in the report; None: the file is not kept.
    """
    model = load(graph)
    feeds = trial_feeds(model, batch, lengths[0])
    Normalize()(model)
    counts = {length: macs(model, 1, length) for length in lengths}
    return EngineFacts(
        file=file,
        parameters=count_parameters(model),
        file_bytes=file_bytes(engine, graph),
        peak_memory_bytes=engine.memory(feeds),
        macs=counts[lengths[0]],
        macs_by_length={length: count for length, count in counts.items() if count is not None},
        attentions=engine.attentions,
        fused=engine.fused,
        optimization=engine.optimization,
        quantized=engine.quantized,
        products=dict(engine.products),
        built=engine.built,
    )


def file_bytes(engine: Engine, graph: Path) -> int:
    """Bytes of the graph that an engine was built from, or of the files of an int8 engine, with their weights."""
    file = graph if engine.quantized is None else engine.path
    if target_of(file).metadata_file is not None:
        weights = {path for path in [file.with_suffix(".bin")] if path.is_file()}
    else:
        tensors = (value.const_value for value in load(file).graph.initializers.values())
        weights = {Path(tensor.path) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    return sum(path.stat().st_size for path in {file, *weights})
