"""The last stages, which a run, each of its rungs and `compress build` share: build, prove, score, measure.

They read graphs, inputs and rows, and no weights of a model, so that they work without PyTorch where there are no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compressor.config.run import Recipe
from compressor.config.sections import AUTO, EngineConfig
from compressor.engines.build import ShrunkGraph, Variant, build_variant
from compressor.engines.prove import Case, Inputs, case_name, proven_shapes
from compressor.progress import RunLog
from compressor.results import Size, VariantName
from compressor.run.measure import LEAST_SECONDS, Results, measure_variants, with_limits
from compressor.targets import BuildOptions, Feeds, span

if TYPE_CHECKING:
    from compressor.engines.score import EvaluationScorer, ScoredAnswers
    from compressor.tasks import Data

_NORM_SECONDS = 1.0
"""Maximum time spent on choosing the form of normalizations."""


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
        from compressor.engines.score import EvaluationScorer  # needs PyTorch, as rows do

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
            results = evaluate((dense, compressed), self.data, recipe, self.log)
            if recipe.selection.max_drop is not None:
                further = (scorer or self.scorer(dense)).scores(compressed, scored)
                results = replace(results, scores=(*results.scores, *further))
        results = measure_variants(variants, self.inputs, recipe, self.log, results)
        if recipe.measure.seconds < LEAST_SECONDS:
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
        from compressor.tasks.scoring import BATCH_SIZE  # needs PyTorch, as rows do

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
