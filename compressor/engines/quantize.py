"""The quantized graphs of a run, one for each kind of engine in 8 bits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from compressor.environment import int8_instructions
from compressor.progress import ProgressCallback
from compressor.quantization import QuantizedGraph, quantize_graph, quantize_symmetric, quantize_without_ruined
from compressor.targets import Feeds
from compressor.workdir import FP8_GRAPH, QUANTIZED_GRAPH


def quantize_as(
    file: str, graph: Path, rows: Sequence[Feeds], on_progress: ProgressCallback | None = None
) -> QuantizedGraph:
    """Quantize a float graph into a file beside it.

    The portable graph keeps matmuls in floats if outliers of their activations leave int8 too few steps, and its
    weights use 7 of 8 bits where the processor has no instructions for sums of int8 products.

    Args:
        file: name of the quantized graph (`Target.quantized_graph`), which says its form.
        on_progress: called with (rows done, rows), if the quantizer reports progress.

    Raises:
        TargetMissingError: the quantizer is not installed.
        InputError: the graph cannot be quantized.
    """
    out = graph.with_name(file)
    if file == QUANTIZED_GRAPH:
        return quantize_portable(graph, rows, out)
    return quantize_symmetric(
        graph, rows, out, precision="fp8" if file == FP8_GRAPH else "int8", on_progress=on_progress
    )


def quantize_portable(
    graph: Path, rows: Sequence[Feeds], out: Path, *, keep_float: Collection[str] = ()
) -> QuantizedGraph:
    """Write the portable graph of a float graph, for this processor.

    Args:
        keep_float: names of matmuls that stay in floats; empty: those with outliers.

    Raises:
        TargetMissingError: NNCF is not installed.
        InputError: the graph cannot be quantized.
    """
    reduce_range = not int8_instructions()
    if keep_float:
        return quantize_graph(graph, rows, out, keep_float=keep_float, reduce_range=reduce_range)
    return quantize_without_ruined(graph, rows, out, reduce_range=reduce_range)


def remove_graph(path: Path) -> None:
    """Remove a graph that was not written whole, with its weights."""
    for file in (path, path.with_name(f"{path.name}.data")):
        file.unlink(missing_ok=True)
