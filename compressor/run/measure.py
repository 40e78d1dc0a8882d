"""Times, sizes and memory of the engines of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from compressor.config.run import Recipe
from compressor.engines.build import Variant
from compressor.measure import facts as facts_of
from compressor.measure import interleave, median_times
from compressor.measure.throughput import affordable_callers, row_rates
from compressor.progress import RunLog
from compressor.results import EngineFacts, Note, NoteCode, Size, Speed, Throughput, VariantName, size_label
from compressor.run import run_notes
from compressor.targets.base import Feeds

_THROUGHPUT_SECONDS = 0.5
"""Maximum duration of one measurement of throughput."""


@dataclass(frozen=True)
class Measurements:
    """The measurements of both engines.

    Attributes:
        speeds: times at each size.
        facts: sizes, memory and operators of each engine.
        speeds_over_rewritten: times of the rewritten dense engine and the compressed one; empty where they are equal.
        throughputs: rows per second at each size; empty where several callers are impossible.
    """

    speeds: tuple[Speed, ...]
    facts: Mapping[VariantName, EngineFacts]
    speeds_over_rewritten: tuple[Speed, ...] = ()
    throughputs: tuple[Throughput, ...] = ()


def measure_variants(
    variants: Iterable[Variant], inputs: Mapping[Size, Feeds], recipe: Recipe, log: RunLog
) -> Measurements:
    """Times of each variant and the compressed one at every size, then memory at the first size, then throughput.

    Args:
        variants: the compressed variant and those to compare it with. Without any it is timed alone, for a note.
        inputs: inputs by batch size and length.
        recipe: time to spend, and the seed of the bootstrap.
        log: receives stages, and notes on speeds that are uncertain and memory that is unknown.
    """
    by_name = {variant.name: variant for variant in variants}
    compressed = by_name["compressed"]
    references = [variant for name, variant in by_name.items() if name != "compressed"]
    speeds: dict[VariantName, list[Speed]] = {variant.name: [] for variant in references}
    for (batch, seq, _), feeds in inputs.items():
        for variant in references:
            speeds[variant.name].append(_time(variant, compressed, feeds, (batch, seq), recipe, log))
    log.add_notes(
        run_notes.speed_notes(speeds.get("dense", ())) if references else _times_alone(compressed, inputs, recipe, log)
    )
    with log.stage("measuring memory"):
        first_batch, lengths = next(iter(inputs))[0], list(dict.fromkeys(size.seq or 1 for size in inputs))
        kept = [variant for name, variant in by_name.items() if name != "rewritten"]
        facts = _facts(kept, batch=first_batch, lengths=lengths)
    log.add_notes(run_notes.unmeasured_memory_notes(facts))
    throughputs: tuple[Throughput, ...] = ()
    if "dense" in by_name:
        with log.stage("measuring throughput"):
            throughputs = _throughputs(by_name["dense"], compressed, facts, inputs, recipe.measure.seconds)
    return Measurements(tuple(speeds.get("dense", ())), facts, tuple(speeds.get("rewritten", ())), throughputs)


def _time(
    reference: Variant,
    compressed: Variant,
    feeds: Feeds,
    size: tuple[int, int | None],
    recipe: Recipe,
    log: RunLog,
) -> Speed:
    """Times of a variant and the compressed one on the same inputs, in turn."""
    batch, seq = size
    # The ratio to a rewritten engine is a by-product, and gets half of the time.
    seconds = recipe.measure.seconds / (1 if reference.name == "dense" else 2)
    with log.stage(f"timing {reference.name} and compressed, {size_label(batch, seq)}") as on_progress:
        return interleave(
            reference.engine,
            compressed.engine,
            feeds,
            batch=batch,
            seq=seq,
            seconds=seconds,
            seed=recipe.selection.seed,
            on_progress=on_progress,
        )


def _times_alone(compressed: Variant, inputs: Mapping[Size, Feeds], recipe: Recipe, log: RunLog) -> list[Note]:
    """A note on the median times of the compressed engine, which there is nothing to compare with."""
    medians = []
    for (batch, seq, _), feeds in inputs.items():
        with log.stage(f"timing compressed, {size_label(batch, seq)}"):
            (seconds,) = median_times([compressed.engine], feeds, recipe.measure.seconds)
        medians.append(f"{1e3 * seconds:.3g} ms at {size_label(batch, seq)}")
    text = f"the engine was timed alone, with no dense engine to compare it with: median {', '.join(medians)}"
    return [Note(code=NoteCode.TIMED_ALONE, text=text)]


def _throughputs(
    dense: Variant,
    compressed: Variant,
    facts: Mapping[VariantName, EngineFacts],
    inputs: Mapping[Size, Feeds],
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
    batches = [(batch, feeds) for (batch, _, _), feeds in inputs.items()]
    seconds = min(seconds, _THROUGHPUT_SECONDS)
    rates = [row_rates(variant.engine, batches, callers, seconds) for variant in variants]
    return tuple(
        Throughput(batch=batch, seq=seq, callers=callers, dense=before, compressed=after)
        for (batch, seq, _), before, after in zip(inputs, *rates, strict=True)
    )


def _facts(variants: Sequence[Variant], *, batch: int, lengths: Sequence[int]) -> dict[VariantName, EngineFacts]:
    """Sizes, memory and operators of each engine; memory is measured on inputs of the first length.

    Only the compressed engine's file is named, since only that one is in the output folder.
    """
    return {
        variant.name: facts_of(
            variant.engine,
            variant.graph.path,
            batch=batch,
            lengths=lengths,
            file=variant.engine.path.name if variant.name == "compressed" else None,
        )
        for variant in variants
    }
