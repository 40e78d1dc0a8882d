"""Try every engine that a recipe allows, and deliver the fastest that keeps the metric."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.config.run import Recipe
from compressor.config.sections import AUTO, EngineConfig
from compressor.errors import CompressorError, ErrorCode, TargetMissingError
from compressor.measure import file_bytes, median_times
from compressor.model_folder import ModelFolder, example_inputs
from compressor.quantization import QuantizedGraph, quantize_graph
from compressor.results import Candidate, Note, NoteCode
from compressor.run.calibrate import calibration_rows
from compressor.run.evaluate import statistics_of
from compressor.run.measure import size_label
from compressor.run.products import DYNAMIC, PORTABLE, QUANTIZED_GRAPH, Choice, Chosen, RunSizes, ShrunkGraph, Variant
from compressor.run.run_log import RunLog
from compressor.run.variant import build_variant
from compressor.targets import TARGETS, target
from compressor.tasks import Data

_FEW_ROWS = 100
"""Calibration rows below which ranges are uncertain."""
_TIMED_SECONDS = 3.0
"""Maximum time spent on timing one candidate at one size."""
_SCORED_ROWS = 2000
"""Maximum number of evaluation rows that every candidate is scored on."""


@dataclass(frozen=True)
class _Trial:
    """A candidate, with its engine if it could be built."""

    choice: Choice
    candidate: Candidate
    variant: Variant | None = None


def choices(config: EngineConfig) -> list[Choice]:
    """Every engine that a configuration allows, in the order in which they are tried."""
    names = tuple(TARGETS) if config.target == AUTO else (config.target,)
    precisions = ("fp32", "int8") if config.precision == AUTO else (config.precision,)
    tried = []
    for name, precision in itertools.product(names, precisions):
        engine = config.model_copy(update={"target": name, "precision": precision})
        if precision != "int8":
            tried.append(Choice(engine))
            continue
        tried.append(Choice(engine, PORTABLE))
        if target(name).quantizes:
            tried.append(Choice(engine, DYNAMIC))
    return tried


def choose_engine(
    graph: ShrunkGraph,
    dense: Variant,
    data: Data | None,
    folder: ModelFolder,
    recipe: Recipe,
    sizes: RunSizes,
    scratch: Path,
    log: RunLog,
) -> Chosen:
    """Try every engine that a recipe allows on the evaluation rows, and build the fastest that keeps the metric.

    Args:
        graph: the graph of the compressed variant.
        dense: the dense variant, to compare with.
        data: the rows; None: every engine keeps the metric.
        folder: the model, for inputs to time.
        recipe: targets, precisions, the loss allowed, and the sizes to time.
        sizes: sizes and settings of the engines.
        scratch: folder for engines that are not delivered.
        log: receives stages and notes.

    Raises:
        TargetMissingError: no engine could be built, because runtimes are missing.
        MismatchError: no engine computes its graph.
    """
    tried = choices(recipe.engine)
    quantized = None
    if any(choice.form == PORTABLE for choice in tried) and data is not None:
        quantized = _quantize(graph, data, recipe, log)
    trials = [
        _build(choice, graph, quantized, sizes, scratch / f"candidate{number}", log)
        for number, choice in enumerate(tried)
    ]
    if data is not None and len(data.eval):
        trials = list(_score(trials, dense, data, recipe, log))
    trials = list(_time(trials, dense, folder, recipe, sizes, log))
    best = _fastest(trials, data is None or data.task.higher_is_better)
    table = tuple(trial.candidate.model_copy(update={"chosen": trial.choice == best.choice}) for trial in trials)
    log.add_notes(_notes(table, quantized))
    with log.stage(f"compressed: building the engine ({best.choice.label})"):
        variant = _build_variant(best.choice, graph, quantized, sizes, graph.path.parent)
    return Chosen(variant, best.choice, table)


def _quantize(graph: ShrunkGraph, data: Data, recipe: Recipe, log: RunLog) -> QuantizedGraph | None:
    """The portable quantized graph, beside the float graph; None where it cannot be made and others are tried."""
    with log.stage("compressed: quantizing the graph"):
        rows = calibration_rows(data, recipe.engine.calibration_rows, recipe.selection.seed)
        try:
            return quantize_graph(graph.path, rows, graph.path.with_name(QUANTIZED_GRAPH))
        except TargetMissingError as error:
            if recipe.engine.precision != AUTO:
                raise
            log.add_notes([Note(code=NoteCode.TARGET_MISSING, text=f"no portable int8 engine was tried: {error}")])
            return None


def _build(
    choice: Choice, graph: ShrunkGraph, quantized: QuantizedGraph | None, sizes: RunSizes, folder: Path, log: RunLog
) -> _Trial:
    """Build and prove one candidate; a failure is recorded in its row."""
    reason = target(choice.config.target).missing()
    if choice.form == PORTABLE and quantized is None:
        reason = reason or "there is no quantized graph"
    if reason is None:
        folder.mkdir()
        try:
            with log.stage(f"trying {choice.label}"):
                variant = _build_variant(choice, graph, quantized, sizes, folder)
            facts = {"file_bytes": file_bytes(variant.engine, graph.path), "quantized": variant.engine.quantized}
            return _Trial(choice, choice.row.model_copy(update=facts), variant)
        except CompressorError as error:
            reason = str(error)
    return _Trial(choice, choice.row.model_copy(update={"failure": reason, "holds": False}))


def _build_variant(
    choice: Choice, graph: ShrunkGraph, quantized: QuantizedGraph | None, sizes: RunSizes, folder: Path
) -> Variant:
    """Build the engine of a choice into a folder, and prove it."""
    source = quantized.path if choice.form == PORTABLE and quantized is not None else None
    return build_variant(graph, choice.config, sizes.build, sizes.cases, quantized=source, folder=folder)


def _score(trials: Sequence[_Trial], dense: Variant, data: Data, recipe: Recipe, log: RunLog) -> Iterator[_Trial]:
    """The candidates with the metric on the evaluation rows."""
    task, max_drop = data.task, recipe.selection.max_drop
    rows = data.eval.select(range(min(len(data.eval), _SCORED_ROWS)))

    def measure(variant: Variant, stage: str) -> tuple[float, list[np.ndarray]]:
        logits: list[np.ndarray] = []
        with log.stage(stage) as on_progress:
            statistics = statistics_of(
                variant, data, recipe.selection.batch_size, on_progress, rows=rows, on_logits=logits.append
            )
        return task.score(statistics), logits

    reference, answers = measure(dense, "dense: scoring on the evaluation rows")
    for trial in trials:
        if trial.variant is None:
            yield trial
            continue
        metric, logits = measure(trial.variant, f"{trial.choice.label}: scoring on the evaluation rows")
        drop = reference - metric if task.higher_is_better else metric - reference
        values = {
            "metric": metric,
            "difference": metric - reference,
            "agreement": _agreement(answers, logits),
            "holds": max_drop is None or drop <= max_drop,
        }
        yield dataclasses.replace(trial, candidate=trial.candidate.model_copy(update=values))


def _agreement(expected: Sequence[np.ndarray], logits: Sequence[np.ndarray]) -> float | None:
    """Share of the largest logits that are at the same position; None where there is one logit, or none."""
    pairs = list(zip(expected, logits, strict=False))
    if not pairs or len(expected) != len(logits) or any(a.shape != b.shape or a.shape[-1] < 2 for a, b in pairs):
        return None
    equal = [np.argmax(a, axis=-1) == np.argmax(b, axis=-1) for a, b in pairs]
    return float(np.concatenate([part.ravel() for part in equal]).mean())


def _time(
    trials: Sequence[_Trial], dense: Variant, folder: ModelFolder, recipe: Recipe, sizes: RunSizes, log: RunLog
) -> Iterator[_Trial]:
    """The candidates with their times, and their speed against the dense engine."""
    engines = [trial.variant.engine for trial in trials if trial.variant is not None]
    times: list[dict[str, float]] = [{} for _ in (dense, *engines)]
    for batch, seq in itertools.product(recipe.measure.batch, sizes.lengths):
        label = size_label(batch, seq)
        feeds = {name: tensor.numpy() for name, tensor in example_inputs(folder, batch, seq or 1).items()}
        with log.stage(f"timing all engines, {label}"):
            seconds = min(_TIMED_SECONDS, recipe.measure.seconds) * len(times)
            for row, median in zip(times, median_times([dense.engine, *engines], feeds, seconds), strict=True):
                row[label] = 1e3 * median
    reference, rest = times[0], iter(times[1:])
    for trial in trials:
        if trial.variant is None:
            yield trial
            continue
        row = next(rest)
        speed = float(np.exp(np.mean([np.log(reference[label] / row[label]) for label in row])))
        candidate = trial.candidate.model_copy(update={"milliseconds": row, "speed": speed})
        yield dataclasses.replace(trial, candidate=candidate)


def _fastest(trials: Sequence[_Trial], higher_is_better: bool) -> _Trial:
    """The fastest candidate that keeps the metric; the one that loses least where none does.

    Raises:
        TargetMissingError: no candidate could be built.
    """
    built = [trial for trial in trials if trial.variant is not None]
    if not built:
        failures = "; ".join(f"{trial.choice.label}: {trial.candidate.failure}" for trial in trials)
        raise TargetMissingError(f"no engine could be built: {failures}", code=ErrorCode.UNSUPPORTED)
    eligible = [trial for trial in built if trial.candidate.holds]
    if not eligible:
        return max(built, key=lambda trial: _kept(trial.candidate, higher_is_better))
    return max(eligible, key=lambda trial: trial.candidate.speed or 0.0)


def _kept(candidate: Candidate, higher_is_better: bool) -> float:
    """How much of the metric a candidate keeps; more is better."""
    difference = candidate.difference or 0.0
    return difference if higher_is_better else -difference


def _notes(table: Sequence[Candidate], quantized: QuantizedGraph | None) -> Iterator[Note]:
    """What a reader must know about the choice."""
    if quantized is not None and quantized.rows < _FEW_ROWS:
        text = (
            f"the ranges of int8 activations were measured on {quantized.rows} rows; with fewer than {_FEW_ROWS} they"
            " are uncertain (--data with more rows, --calibration-rows)"
        )
        yield Note(code=NoteCode.FEW_CALIBRATION_ROWS, text=text)
    if quantized is not None and quantized.in_float:
        text = f"NNCF left {len(quantized.in_float)} products in floats: {', '.join(quantized.in_float)}"
        yield Note(code=NoteCode.PRODUCTS_IN_FLOAT, text=text)
    best = next(row for row in table if row.chosen)
    others = [row for row in table if not row.chosen and not row.failure]
    failed = [row for row in table if row.failure]
    if not best.holds:
        text = f"no engine keeps the metric within --max-drop; {best.label} loses least"
    else:
        text = f"{best.label} is the fastest of {1 + len(others)} engines that were built"
        if any(not row.holds for row in others):
            text += " and keep the metric within --max-drop"
    if failed:
        text += f"; not delivered: {'; '.join(f'{row.label} ({row.failure})' for row in failed)}"
    yield Note(code=NoteCode.ENGINE_CHOSEN, text=text)
