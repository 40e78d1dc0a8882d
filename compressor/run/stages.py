"""The last stages, which a run, each of its rungs and `compress build` share: build, prove, score, measure.

They read graphs, inputs and rows, and no weights of a model, so that they work without PyTorch where there are no rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from compressor import report as reports
from compressor.config.run import Recipe
from compressor.config.sections import AUTO, EngineConfig
from compressor.engines.build import ShrunkGraph, Variant, build_engine, build_variant
from compressor.engines.matmul_times import ACTIVATIONS, matmul_graph
from compressor.engines.prove import Case, Inputs, case_name, proven_shapes
from compressor.environment import machine
from compressor.errors import CompressorError
from compressor.measure import facts as facts_of
from compressor.measure import interleave, median_times
from compressor.measure.throughput import affordable_callers, row_rates
from compressor.progress import RunLog
from compressor.results import (
    AnsweredRow,
    DropStatus,
    EmbeddingAgreement,
    EngineFacts,
    Note,
    NoteCode,
    Score,
    Size,
    Speed,
    Throughput,
    VariantName,
    keeps_metric,
    size_label,
)
from compressor.run import run_notes
from compressor.targets import BuildOptions, Feeds, span

if TYPE_CHECKING:
    from compressor.engines.score import EvaluationScorer, ScoredAnswers
    from compressor.tasks import Data

_NORM_SECONDS = 1.0
"""Maximum time spent on choosing the form of normalizations."""
_SIDE = 2048
"""Rows and columns of both factors: large enough that a runtime reaches its highest rate."""
_SECONDS = 1.0
"""Time spent on timing the product."""
_LEAST_SECONDS = 1.0
"""Time for each pair of engines below which the limit is not measured either."""
_THROUGHPUT_SECONDS = 0.5
"""Maximum duration of one measurement of throughput."""


@dataclass(frozen=True)
class Results:
    """What was measured of engines, by the names of the fields of a report.

    Attributes:
        scores: the metric of both engines on test rows, and on evaluation rows where the recipe bounds its loss; empty
            without rows.
        embeddings: how far their embeddings agree; None for other tasks.
        answers: a few rows with the answers of both.
        speeds: times at each size.
        speeds_over_rewritten: times of the rewritten dense engine and the compressed one; empty where they are equal.
        throughputs: rows per second at each size; empty where several callers are impossible.
        facts: sizes, memory and operators of each engine.
    """

    scores: tuple[Score, ...] = ()
    embeddings: EmbeddingAgreement | None = None
    answers: tuple[AnsweredRow, ...] = ()
    speeds: tuple[Speed, ...] = ()
    speeds_over_rewritten: tuple[Speed, ...] = ()
    throughputs: tuple[Throughput, ...] = ()
    facts: Mapping[VariantName, EngineFacts] = field(default_factory=dict)

    def fields(self, compressed: Variant, max_drop: float | None, **decided: Any) -> dict[str, Any]:
        """The fields of a report that state what was measured on this machine, and the verdict.

        Args:
            max_drop: the loss of the metric that the run allows; None: any.
            decided: further fields that the verdict depends on, such as `plan` and `proofs`.
        """
        facts = {"dense": self.facts["dense"], "compressed": self.facts["compressed"]}
        fields = {**{name: value for name, value in vars(self).items() if name != "facts"}, **facts, **decided}
        session = {"session": dict(compressed.engine.session), "machine": machine()}
        return {**fields, **session, "verdict": reports.verdict(**fields, max_drop=max_drop)}


@dataclass(frozen=True)
class Stages:
    """What the last stages read.

    Attributes:
        recipe: sizes and time to measure, the loss that is allowed, and settings of the metric.
        data: the rows; None: there are none.
        cases: inputs of the proofs.
        options: sizes and settings of the engines.
        inputs: inputs to time, by batch size and length.
        scratch: folder for engines that are not kept.
        log: receives stages and notes.
    """

    recipe: Recipe
    data: Data | None
    cases: Sequence[Case]
    options: BuildOptions
    inputs: Mapping[Size, Feeds]
    scratch: Path
    log: RunLog

    def build(
        self,
        graph: ShrunkGraph,
        config: EngineConfig,
        *,
        quantized: Path | None = None,
        folder: Path | None = None,
        options: BuildOptions | None = None,
    ) -> Variant:
        """Build and prove the engine of one variant; see `build_variant`. Without `options` they are those of all."""
        with self.log.stage(f"{graph.name}: building the engine"):
            settings = options or self.options
            return build_variant(graph, config, settings, self.cases, quantized=quantized, folder=folder)

    def scorer(self, dense: Variant) -> EvaluationScorer:
        """Scores engines in comparison with the dense one."""
        from compressor.engines.score import EvaluationScorer  # needs the packages that read rows

        selection, data = self.recipe.selection, self.data
        data = None if data is None else data.with_task(data.eval_task)
        return EvaluationScorer(
            dense, data, self.log, selection.seed, selection.batch_size, max_drop=selection.max_drop
        )

    def finish(
        self,
        variants: Mapping[VariantName, Variant],
        configs: Mapping[VariantName, EngineConfig],
        compared: tuple[Variant, Variant] | None = None,
        scorer: EvaluationScorer | None = None,
        scored: ScoredAnswers | None = None,
    ) -> Results:
        """Score and measure engines.

        Where the time allowed suffices, the limit of the machine is measured too.

        Args:
            variants: the compressed variant and those to compare it with; without the dense one nothing is scored.
            compared: the dense and the compressed variant to score; None: those of `variants`.
            scorer: has scored engines on the evaluation rows; None: none were.
            scored: the answers of the compressed engine to these rows; None: they are not known.
        """
        recipe, results = self.recipe, Results()
        if self.data is not None and "dense" in variants:
            from compressor.run.evaluate import evaluate

            dense, compressed = compared or (variants["dense"], variants["compressed"])
            results = Results(*evaluate((dense, compressed), self.data, recipe, self.log))
            if recipe.selection.max_drop is not None:
                further = (scorer or self.scorer(dense)).scores(compressed, scored)
                results = replace(results, scores=(*results.scores, *further))
        results = measure_variants(variants, self.inputs, recipe, self.log, results)
        if recipe.measure.seconds < _LEAST_SECONDS:
            return results
        with self.log.stage("measuring the machine's limit"):
            known = {name: config for name, config in configs.items() if name in results.facts}
            return replace(results, facts=with_limits(results.facts, known, self.scratch))


def build_options(
    recipe: Recipe, lengths: Sequence[int | None], proven: Sequence[Feeds], data: Data | None = None
) -> BuildOptions:
    """Sizes and settings of the engines, which are optimized for the timed sizes and take every size that occurs.

    Args:
        recipe: batch sizes to time, and settings of the build.
        data: the rows, whose evaluation and test rows are scored; None: no rows are scored.

    Returns:
        The options; `workspace` in bytes.
    """
    shapes = [array.shape for feeds in proven for array in feeds.values() if array.ndim == 2]
    memories = [array.shape[1] for feeds in proven for name, array in feeds.items() if name.startswith("memory_")]
    batches, seqs = [1, *(shape[0] for shape in shapes)], [1, *(shape[1] for shape in shapes)]
    if data is not None:
        from compressor.tasks.scoring import BATCH_SIZE  # needs the packages that read rows

        limits = [data.task.size_limits(rows) for rows in (data.test, data.eval)]
        rows = max(BATCH_SIZE, recipe.selection.batch_size) * max(count for count, _ in limits)
        batches.append(rows * data.task.beams)
        seqs.append(max(1, data.task.max_new_tokens, *(length for _, length in limits)))
    engine = recipe.engine
    # Who chooses no runtime gets the fastest form of each at the sizes that are timed, where a graph can have them.
    timed = proven_shapes(recipe.measure.batch, lengths) if engine.target == AUTO else ()
    return BuildOptions(
        batch=span(recipe.measure.batch, batches),
        seq=span([seq for seq in lengths if seq is not None] or [1], seqs),
        memory=(0, max(memories, default=0), max(memories, default=0)),
        workspace=None if engine.workspace is None else engine.workspace << 20,
        timing_cache=engine.timing_cache,
        hardware_compatible=engine.hardware_compatible,
        version_compatible=engine.version_compatible,
        kernel=engine.kernel,
        norm_seconds=min(_NORM_SECONDS, recipe.measure.seconds),
        shapes=engine.parsed_shapes or tuple(timed),
        requires_shapes=bool(engine.parsed_shapes),
    )


def row_cases(data: Data, inputs: Inputs, *, longest: int | None = None) -> tuple[Case, ...]:
    """A row of median length alone, and the shortest with the longest, of at most `longest` tokens.

    Rows are test rows, or else evaluation or training rows; they may lack inputs of the graph, such as those of a
    decoder, which are made up. A graph of another batch size has no such cases.
    """
    rows = next((rows for rows in (data.test, data.eval, data.train) if len(rows)), None)
    if rows is None:
        return ()
    lengths = np.asarray(rows["length"][:])
    order = [int(row) for row in np.argsort(lengths, kind="stable") if longest is None or lengths[row] <= longest]
    batches = [order[len(order) // 2 :][:1], list(dict.fromkeys((*order[:1], *order[-1:])))]
    cases = []
    for batch in (batch for batch in batches if batch):
        encoded = data.task.model_inputs(data.task.collate([rows[row] for row in batch]))
        first = next(iter(encoded.values()))
        generated = {name: np.asarray(value) for name, value in inputs(len(first), first.shape[-1], 0).items()}
        if any(name in encoded and len(encoded[name]) != len(value) for name, value in generated.items()):
            continue  # a graph of another batch size
        feeds = {name: np.asarray(encoded.get(name, value)) for name, value in generated.items()}
        cases.append(Case(feeds, f"rows: {case_name(feeds)}"))
    return tuple(cases)


def drop_status(max_drop: float | None, scores: Sequence[Score]) -> DropStatus:
    """Whether the metric of test rows fell by no more than `max_drop`, in its own unit; None: it is not checked."""
    if max_drop is None:
        return DropStatus.NOT_CHECKED
    return DropStatus.PASSED if keeps_metric(scores, max_drop) else DropStatus.FAILED


def measure_variants(
    variants: Mapping[VariantName, Variant],
    inputs: Mapping[Size, Feeds],
    recipe: Recipe,
    log: RunLog,
    results: Results,
) -> Results:
    """Times of each variant and the compressed one at every size, then memory at the first size, then throughput.

    They are added to what was measured before. Without other variants, the compressed one is timed alone, for a note.
    """
    compressed, allowed = variants["compressed"], recipe.measure.seconds
    references = [variant for name, variant in variants.items() if name != "compressed"]
    speeds: dict[VariantName, list[Speed]] = {variant.name: [] for variant in references}
    for (batch, seq, _), feeds in inputs.items():
        for variant in references:
            with log.stage(f"timing {variant.name} and compressed, {size_label(batch, seq)}") as on_progress:
                # The ratio to a rewritten engine is a by-product, and gets half of the time.
                seconds, seed = allowed / (1 if variant.name == "dense" else 2), recipe.selection.seed
                settings: dict[str, Any] = {"seconds": seconds, "seed": seed, "on_progress": on_progress}
                speed = interleave(variant.engine, compressed.engine, feeds, batch=batch, seq=seq, **settings)
                speeds[variant.name].append(speed)
    dense, over_rewritten = (tuple(speeds.get(name, ())) for name in ("dense", "rewritten"))
    if references:
        log.add_notes(run_notes.speed_notes(dense, over_rewritten))
    else:
        log.add_notes(_times_alone(compressed, inputs, allowed, log))
    with log.stage("measuring memory"):
        batch, lengths = next(iter(inputs))[0], list(dict.fromkeys(size.seq or 1 for size in inputs))
        facts: dict[VariantName, EngineFacts] = {}
        for name, variant in variants.items():
            if name != "rewritten":
                # Only the file of the compressed engine is in the output folder.
                file, path = variant.engine.path.name if name == "compressed" else None, variant.graph.path
                facts[name] = facts_of(variant.engine, path, batch=batch, lengths=lengths, file=file)
    log.add_notes(run_notes.unmeasured_memory_notes(facts))
    throughputs: tuple[Throughput, ...] = ()
    if "dense" in variants:
        with log.stage("measuring throughput"):
            throughputs = _throughputs((variants["dense"], compressed), facts, inputs, allowed)
    return replace(results, speeds=dense, speeds_over_rewritten=over_rewritten, throughputs=throughputs, facts=facts)


def machine_limit(config: EngineConfig, folder: Path) -> float | None:
    """Operations per second of a matrix product of 2048 x 2048 x 2048, in the precision of an engine.

    The limit is `2 * 2048^3 / seconds of the fastest call`, with the threads of the engine.

    Returns:
        The limit; None where the target cannot build such an engine.
    """
    path, rng = folder / "product.onnx", np.random.default_rng(0)
    onnx.save(matmul_graph((_SIDE, _SIDE), rng, is_quantized=config.precision == "int8", rows=_SIDE), path)
    try:
        engine = build_engine(path, folder, config, BuildOptions())
    except CompressorError:
        return None
    feeds = {ACTIVATIONS: rng.standard_normal((_SIDE, _SIDE), dtype=np.float32)}
    engine.run(feeds)
    times: list[float] = []
    while sum(times) < _SECONDS:
        start = time.perf_counter()
        engine.run(feeds)
        times.append(time.perf_counter() - start)
    return 2 * _SIDE**3 / min(times)


def with_limits(
    facts: Mapping[VariantName, EngineFacts], configs: Mapping[VariantName, EngineConfig], scratch: Path
) -> dict[VariantName, EngineFacts]:
    """Facts about engines with the limit of the machine for each."""
    limits: dict[EngineConfig, float | None] = {}
    result: dict[VariantName, EngineFacts] = {}
    for name, config in configs.items():
        if config not in limits:
            folder = scratch / f"limit-{name}"
            folder.mkdir(exist_ok=True)
            limits[config] = machine_limit(config, folder)
        result[name] = facts[name].model_copy(update={"machine_limit": limits[config]})
    return result


def _times_alone(compressed: Variant, inputs: Mapping[Size, Feeds], allowed: float, log: RunLog) -> list[Note]:
    """A note on the median times of the compressed engine, which there is nothing to compare with."""
    medians = []
    for (batch, seq, _), feeds in inputs.items():
        with log.stage(f"timing compressed, {size_label(batch, seq)}"):
            (seconds,) = median_times([compressed.engine], feeds, allowed)
        medians.append(f"{1e3 * seconds:.3g} ms at {size_label(batch, seq)}")
    text = f"the engine was timed alone, with no dense engine to compare it with: median {', '.join(medians)}"
    return [Note(code=NoteCode.TIMED_ALONE, text=text)]


def _throughputs(
    variants: Sequence[Variant],
    facts: Mapping[VariantName, EngineFacts],
    inputs: Mapping[Size, Feeds],
    allowed: float,
) -> tuple[Throughput, ...]:
    """Rows a second of both engines, with one caller and with one per core; empty where several callers are impossible.

    Their peak memory limits the number of callers. A measurement is shorter than timing a latency.
    """
    callers = affordable_callers((variant.engine, facts[variant.name].peak_memory_bytes) for variant in variants)
    if callers == 1:
        return ()
    batches = [(batch, feeds) for (batch, _, _), feeds in inputs.items()]
    seconds = min(allowed, _THROUGHPUT_SECONDS)
    rates = [row_rates(variant.engine, batches, callers, seconds) for variant in variants]
    return tuple(
        Throughput(batch=batch, seq=seq, callers=callers, dense=before, compressed=after)
        for (batch, seq, _), before, after in zip(inputs, *rates, strict=True)
    )
