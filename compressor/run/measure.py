"""Times, sizes and memory of the engines of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compressor.config.run import Recipe
from compressor.measure import facts as facts_of
from compressor.measure import interleave
from compressor.measure.throughput import affordable_callers, row_rates
from compressor.progress import ProgressCallback
from compressor.results import EngineFacts, Speed, Throughput, VariantName, size_label
from compressor.run.products import Variant
from compressor.targets.base import Feeds

_THROUGHPUT_SECONDS = 0.5
"""Maximum duration of one measurement of throughput."""


def time_variants(
    dense: Variant,
    compressed: Variant,
    feeds: Feeds,
    recipe: Recipe,
    *,
    batch: int,
    seq: int | None,
    on_progress: ProgressCallback,
) -> Speed:
    """Time both engines in turn on the same inputs.

    Args:
        dense: the dense variant.
        compressed: the compressed variant.
        feeds: inputs by name.
        recipe: time to spend, and the seed of the bootstrap.
        batch: batch size of the inputs.
        seq: their length in tokens; None for a model of images or sound.
        on_progress: called with (rounds, total rounds).
    """
    return interleave(
        dense.engine,
        compressed.engine,
        feeds,
        batch=batch,
        seq=seq,
        seconds=recipe.measure.seconds,
        seed=recipe.selection.seed,
        on_progress=on_progress,
    )


def throughputs_of(
    dense: Variant,
    compressed: Variant,
    facts: Mapping[VariantName, EngineFacts],
    inputs: Mapping[tuple[int, int | None], Feeds],
    seconds: float,
) -> tuple[Throughput, ...]:
    """Rows a second of both engines, with one caller and with one per core; empty where several callers are impossible.

    Args:
        dense: the dense variant.
        compressed: the compressed variant.
        facts: facts of both, whose peak memory limits the number of callers.
        inputs: inputs by batch size and length.
        seconds: maximum duration of one measurement; it is shorter than timing a latency.
    """
    variants = (dense, compressed)
    callers = affordable_callers((variant.engine, facts[variant.name].peak_memory_bytes) for variant in variants)
    if callers == 1:
        return ()
    batches = [(batch, feeds) for (batch, _), feeds in inputs.items()]
    seconds = min(seconds, _THROUGHPUT_SECONDS)
    rates = [row_rates(variant.engine, batches, callers, seconds) for variant in variants]
    return tuple(
        Throughput(batch=batch, seq=seq, callers=callers, dense=before, compressed=after)
        for (batch, seq), before, after in zip(inputs, *rates, strict=True)
    )


def engine_facts(variants: Sequence[Variant], *, batch: int, seq: int) -> Mapping[VariantName, EngineFacts]:
    """Sizes, memory and operators of each engine; memory is measured on inputs of this size.

    Only the compressed engine's file is named, since only that one is in the output folder.
    """
    return {
        variant.name: facts_of(
            variant.engine,
            variant.graph.path,
            batch=batch,
            seq=seq,
            file=variant.engine.path.name if variant.name == "compressed" else None,
        )
        for variant in variants
    }


def timing_stage(batch: int, seq: int | None, variant: VariantName = "dense") -> str:
    """Name of the stage that times a variant and the compressed one at one size."""
    return f"timing {variant} and compressed, {size_label(batch, seq)}"
