"""The choice of the fastest engine that the settings allow and that keeps the metric."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import graph_passes
from compressor.engines.build import Variant, build_variant
from compressor.engines.choices import Choice, choices
from compressor.engines.score import ScoredAnswers, agreement
from compressor.engines.trials import EngineTrials, Trial, no_time
from compressor.environment import int8_instructions
from compressor.errors import CompressorError, ErrorCode, TargetMissingError
from compressor.measure import median_times
from compressor.progress import tracked
from compressor.quantization import QuantizedGraph
from compressor.results import Candidate, MetricUnit, Note, NoteCode, labels_by_failure, loss_of, size_label
from compressor.targets import Engine, target
from compressor.tasks import Task
from graph_passes import GraphPassError

_TIMED_SECONDS = 1.0
"""Maximum time spent on timing one candidate at one size."""
_MAX_TIMES_SLOWER = 2.0
"""Ratio of times up to which an engine of the whole model may overtake the fastest when units are removed."""
_NEAR = 1.1
"""Ratio of speeds up to which two engines are built and timed once more when the plan is known."""
_FEW_ROWS = 100
"""Calibration rows below which ranges are uncertain."""


@dataclass(frozen=True)
class ChosenEngine:
    """The engine to deliver, and the table that it was chosen from.

    Attributes:
        variant: the engine, in the output folder.
        choice: its settings.
        candidates: every engine that was tried; empty where the settings name one.
        source: the quantized graph that it was built from; None: a float graph, or the settings name the engine.
        scored: its answers to the evaluation rows; None: they have no labels, or the settings name the engine.
        runner_up: an engine that is nearly as fast; None: there is none.
    """

    variant: Variant
    choice: Choice
    candidates: tuple[Candidate, ...] = ()
    source: Path | None = None
    scored: ScoredAnswers | None = None
    runner_up: ChosenEngine | None = None

    def lost(self, task: Task) -> float:
        """What the engine loses of the metric on the evaluation rows, in the metric's unit; negative if it gains."""
        row = next((row for row in self.candidates if row.chosen), None)
        difference = 0.0 if row is None else row.difference or 0.0
        return loss_of(difference, higher_is_better=task.higher_is_better)


@dataclass(frozen=True)
class LaterPruning:
    """The pruning that follows the choice of an engine.

    Attributes:
        share_left: about the share of the units that is left, from the candidates with their times.
        build: builds the engine of a candidate with a share of the units of every group.
    """

    share_left: Callable[[Sequence[Candidate]], float]
    build: Callable[[Trial, float], Engine]


def choose_engine(
    trials: EngineTrials,
    allowed: Sequence[Choice] | None = None,
    pruning: LaterPruning | None = None,
    decided: Sequence[str] = (),
    otherwise: Sequence[Choice] = (),
) -> ChosenEngine:
    """Try every engine that the settings allow on the evaluation rows, and build the fastest that keeps the metric.

    An engine that cannot be quantized, built or proven is a row with its reason, and the next is tried.

    Where int8 loses too much, a further candidate returns as few matmuls to floats as keep the metric. Where units are
    removed afterwards, engines are compared with about as many units as the budget leaves.

    Args:
        allowed: the engines to try, which are timed only to choose between several; None: all that the settings allow.
        pruning: the pruning that follows for the chosen engine; None: no units are removed afterwards.
        decided: labels of the engine that was chosen before, which is chosen again if it can be built, and of its
            runner-up; empty: none was.
        otherwise: the engines to try where none of `allowed` can be built.

    Raises:
        CompressorError: no engine could be built; see `fastest`.
    """
    # An engine that was chosen before units were removed loses by their removal too.
    is_bounded = trials.scorer.max_drop is not None or allowed is not None
    every = choices(trials.config, has_rows=trials.has_rows) if allowed is None else allowed
    built, quantized = _candidates(trials, every, otherwise, has_equal_answers=not is_bounded)
    if allowed is None or sum(trial.candidate.holds for trial in built) > 1:
        built = time_whole(trials, built)
    if allowed is None and not trials.is_late:
        built = trials.measure_memory(built)
    best, *near = [
        next((trial for trial in built if trial.choice.label == label and trial.variant is not None), None)
        for label in decided or ("",)
    ]
    is_new = best is None
    if is_new and pruning is not None and not trials.is_late:
        share = pruning.share_left([trial.candidate for trial in built])
        built = time_pruned(trials, built, share, pruning.build)
    chosen, best, built = _deliver(trials, built, best, quantized)
    trials.log.add_notes(_notes(chosen.candidates, tuple(quantized.values()), is_bounded=is_bounded))
    if is_new:
        near = [trial for trial in ranked(built) if trial is not best and _speed(trial) >= _speed(best) / _NEAR]
    runners_up = (_chosen(built, trial, trial.variant, trial.source) for trial in near if trial is not None)
    return replace(chosen, runner_up=next(runners_up, None))


def _deliver(
    trials: EngineTrials, built: list[Trial], best: Trial | None, quantized: Mapping[str | None, QuantizedGraph]
) -> tuple[ChosenEngine, Trial, list[Trial]]:
    """Build an engine in the output folder: the best one, or the next where that fails.

    Returns the engine, its candidate, and all candidates, with those that failed.
    """
    graph = trials.graph
    while True:
        best = best or fastest(built, trials.scorer.data is None or trials.scorer.data.task.higher_is_better)
        source = _written_source(best, quantized)
        before = set(graph.path.parent.iterdir())
        try:
            with trials.log.stage(f"compressed: building the engine ({best.choice.label})"):
                options = best.options or trials.options
                variant = build_variant(graph, best.choice.config, options, trials.cases, quantized=source)
            return _chosen(built, best, variant, source), best, built
        except (CompressorError, GraphPassError) as error:
            for path in set(graph.path.parent.iterdir()) - before:
                path.unlink()
            built = [trial.failed(error) if trial is best else trial for trial in built]
            best = None


def _chosen(built: Sequence[Trial], best: Trial, variant: Variant | None, source: Path | None) -> ChosenEngine:
    assert variant is not None
    table = tuple(trial.candidate.model_copy(update={"chosen": trial is best}) for trial in built)
    return ChosenEngine(variant, best.choice, table, source, best.scored)


def _candidates(
    trials: EngineTrials, every: Sequence[Choice], otherwise: Sequence[Choice], *, has_equal_answers: bool
) -> tuple[list[Trial], dict[str | None, QuantizedGraph]]:
    """The candidates, built and scored, and the quantized graphs that they are built from.

    `has_equal_answers`: whether engines in bf16 hold by their answers.
    """
    quantized = trials.quantize(every)
    built = _built(trials, every, quantized)
    if otherwise and all(trial.variant is None for trial in built):
        quantized |= trials.quantize(otherwise)
        built += _built(trials, otherwise, quantized)
    return (_with_equal_answers(trials, built) if has_equal_answers else built), quantized


def _built(
    trials: EngineTrials, every: Collection[Choice], quantized: Mapping[str | None, QuantizedGraph]
) -> list[Trial]:
    """The candidates, built and scored; and further ones.

    Where an engine computes matmuls in floats because they alone are faster there, the engine with all of them in int8
    is tried too. Where int8 loses too much, products return to floats.
    """
    built: list[Trial] = []
    for choice in every:
        is_enough = trials.is_late and any(trial.candidate.holds for trial in built)
        if is_enough and target(choice.config.target).missing() is None:  # more time adds no runtime
            built.append(Trial(choice, choice.row).failed(no_time()))
            continue
        built.append(trials.score(trials.build(choice, quantized.get(choice.quantized_graph))))
        options = built[-1].options
        if choice.mixes and options is not None and options.float_widths and not trials.is_late:
            whole = replace(choice, mixes=False)
            built.append(trials.score(trials.build(whole, quantized.get(choice.quantized_graph))))
    return built + [
        trials.return_products(trial, quantized[trial.choice.quantized_graph])
        for trial in built
        if replace(trial.choice, in_float=()) in every
        if trial.variant is not None and trial.source is not None and not trial.candidate.holds
    ]


def _with_equal_answers(trials: EngineTrials, built: Iterable[Trial]) -> list[Trial]:
    """The candidates, of which those in bf16 hold if their answers are those of the same graph in fp32.

    Rounding needs no rows, so that users expect the same answers; a bounded loss of the metric replaces this rule.
    """
    trials_in_fp32 = (trial for trial in built if trial.choice.config.precision == "fp32" and trial.scored is not None)
    reference = next((trial.scored for trial in trials_in_fp32), None)
    if reference is None and not trials.graph.plan.drops_any:
        reference = trials.scorer.dense_answers
    held = []
    for trial in built:
        share = agreement(reference, trial.scored) if trial.choice.config.precision == "bf16" else None
        if share is not None and share < 1:
            trial = replace(trial, candidate=trial.candidate.model_copy(update={"holds": False, "agreement": share}))
        held.append(trial)
    return held


def _written_source(trial: Trial, quantized: Mapping[str | None, QuantizedGraph]) -> Path | None:
    """The quantized graph of a candidate, under its name in the output folder; None: it has none."""
    if trial.source is None:
        return None
    source = quantized[trial.choice.quantized_graph].path
    if trial.source != source:
        graph_passes.save(graph_passes.load(trial.source), source)
    return source


def fastest(trials: Sequence[Trial], higher_is_better: bool) -> Trial:
    """The fastest candidate that keeps the metric; the one that loses least where none does.

    Raises:
        TargetMissingError: no candidate could be built, because runtimes are missing.
        CompressorError: no candidate could be built; the error is of the kind of the first reason.
    """
    built = [trial for trial in trials if trial.variant is not None]
    if not built:
        text = f"no engine could be built: {_failures(trial.candidate for trial in trials)}"
        errors = [trial.error for trial in trials if isinstance(trial.error, CompressorError)]
        cause = next((error for error in errors if not isinstance(error, TargetMissingError)), None)
        if cause is None:
            raise TargetMissingError(text, code=ErrorCode.UNSUPPORTED)
        raise type(cause)(text, code=cause.code, **cause.details) from cause
    if eligible := ranked(built):
        return eligible[0]
    return min(built, key=lambda trial: loss_of(trial.candidate.difference or 0.0, higher_is_better=higher_is_better))


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The candidates that keep the metric, fastest first: those that were timed with fewer units before others."""
    eligible = [trial for trial in trials if trial.variant is not None and trial.candidate.holds]
    pruned = [trial for trial in eligible if trial.candidate.speed_pruned is not None]
    return sorted(pruned or eligible, key=lambda trial: -_speed(trial))


def _speed(trial: Trial) -> float:
    """The speed by which a candidate is chosen; zero where it was not timed."""
    return trial.candidate.speed_pruned or trial.candidate.speed or 0.0


def time_whole(trials: EngineTrials, built: Sequence[Trial]) -> list[Trial]:
    """The candidates with their times by size, and their speed: the time of the dense engine over theirs."""
    engines = [trial.variant.engine for trial in built if trial.variant is not None]
    reference, *rows = _times(trials, engines, "timing all engines")
    remaining = iter(rows)
    return [trial if trial.variant is None else _timed(trial, next(remaining), reference) for trial in built]


def time_pruned(
    trials: EngineTrials, built: Sequence[Trial], share: float, build: Callable[[Trial, float], Engine]
) -> list[Trial]:
    """The candidates, and of those that may be the fastest the speed with a share of the units.

    How much faster an engine gets when units are removed differs between runtimes and precisions. An engine that takes
    more than `_MAX_TIMES_SLOWER` times as long as the fastest is not built again, and neither is the only one left. One
    that cannot be built becomes a row with the reason; where none can, all candidates are returned as they are, with a
    note.
    """
    speeds = {index: trial.candidate.speed or 0.0 for index, trial in enumerate(built) if trial.candidate.holds}
    least = max(speeds.values(), default=0.0) / _MAX_TIMES_SLOWER
    near = [index for index, speed in speeds.items() if speed >= least]
    if len(near) < 2 or share >= 1:
        return list(built)
    pruned: dict[int, Engine] = {}
    failures: dict[int, Exception] = {}
    with trials.log.stage(f"building engines with {100 * share:.2g}% of the units") as on_progress:
        for index in tracked(near, on_progress):
            try:
                pruned[index] = build(built[index], share)
            except (CompressorError, GraphPassError) as error:
                failures[index] = error
    if not pruned:
        text = (
            f"engines are compared by the whole model, since none could be built with {100 * share:.2g}% of the units"
        )
        trials.log.add_notes([Note(code=NoteCode.ENGINES_COMPARED_WHOLE, text=f"{text} ({failures[near[0]]})")])
        return list(built)
    reference, *rows = _times(trials, list(pruned.values()), f"timing engines with {100 * share:.2g}% of the units")
    timed = [trial.failed(failures[index]) if index in failures else trial for index, trial in enumerate(built)]
    for index, row in zip(pruned, rows, strict=True):
        update = {"speed_pruned": _speed_over(row, reference), "share": share}
        timed[index] = replace(built[index], candidate=built[index].candidate.model_copy(update=update))
    return timed


def fastest_of(trials: EngineTrials, engines: Sequence[Engine], stage: str) -> int:
    """The index of the fastest of some engines, by the geometric mean over sizes."""
    reference, *rows = _times(trials, engines, stage)
    return int(np.argmax([_speed_over(row, reference) for row in rows]))


def _times(trials: EngineTrials, engines: Sequence[Engine], stage: str) -> list[dict[str, float]]:
    """Milliseconds of a call by size, of the dense engine and of these, which take turns."""
    times: list[dict[str, float]] = [{} for _ in (trials.scorer.dense, *engines)]
    for (batch, seq, _), feeds in trials.inputs.items():
        label = size_label(batch, seq)
        with trials.log.stage(f"{stage}, {label}"):
            seconds = min(_TIMED_SECONDS, trials.seconds) * len(times)
            medians = median_times([trials.scorer.dense.engine, *engines], feeds, seconds)
        for row, median in zip(times, medians, strict=True):
            row[label] = 1e3 * median
    return times


def _timed(trial: Trial, milliseconds: dict[str, float], reference: Mapping[str, float]) -> Trial:
    update = {"milliseconds": milliseconds, "speed": _speed_over(milliseconds, reference)}
    return replace(trial, candidate=trial.candidate.model_copy(update=update))


def _speed_over(milliseconds: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """The geometric mean over sizes of the time of the dense engine over that of another engine."""
    return float(np.exp(np.mean([np.log(reference[label] / milliseconds[label]) for label in milliseconds])))


def _notes(table: Sequence[Candidate], graphs: Sequence[QuantizedGraph], *, is_bounded: bool) -> Iterator[Note]:
    """What a reader must know about the choice; `is_bounded`: the loss is bounded of the metric."""
    on_processor = any(row.precision == "int8" and not target(row.target).needs_device for row in table)
    if on_processor and not int8_instructions():
        text = (
            "the processor that quantized the model has no instructions for sums of int8 products, and its sums can"
            " saturate: weights use 7 of 8 bits, which prevents that and costs accuracy; run on a machine like the one"
            " that will serve the engine"
        )
        yield Note(code=NoteCode.NO_INT8_INSTRUCTIONS, text=text)
    rows = min((quantized.rows for quantized in graphs), default=_FEW_ROWS)
    if rows < _FEW_ROWS:
        text = (
            f"the ranges of quantized activations were measured on {rows} rows, and are uncertain with fewer than "
            f"{_FEW_ROWS}; give more rows (--data, --calibration-rows)"
        )
        yield Note(code=NoteCode.FEW_CALIBRATION_ROWS, text=text)
    for quantized in graphs:
        if quantized.ruined:
            text = (
                f"{quantized.path.name}: {len(quantized.ruined)} matmuls are computed in fp32, because outliers"
                f" of their activations leave int8 too few steps for the other values: {', '.join(quantized.ruined)}"
            )
            yield Note(code=NoteCode.OUTLIER_RANGES, text=text)
        if quantized.in_float:
            names = ", ".join(quantized.in_float)
            text = f"{quantized.path.name}: {len(quantized.in_float)} matmuls are in floats: {names}"
            yield Note(code=NoteCode.PRODUCTS_IN_FLOAT, text=text)
    best = next(row for row in table if row.chosen)
    if best.quantized is not None and best.difference is not None and not is_bounded:
        unit = " points" if best.unit is MetricUnit.POINTS else ""
        text = (
            f"{best.label}: the loss of this engine has no bound (set one with --max-drop); on the evaluation rows the"
            f" metric changes by {best.unit.scale * best.difference:+.2f}{unit}"
        )
        yield Note(code=NoteCode.LOSS_UNBOUNDED, text=text)
    if best.in_float:
        text = (
            f"{len(best.in_float)} matmuls are computed in floats, because a proof or the metric does not hold with"
            f" them in int8: {', '.join(best.in_float)}"
        )
        yield Note(code=NoteCode.PRODUCTS_IN_FLOAT, text=text)
    if len(table) > 1 or not best.holds:
        yield Note(code=NoteCode.ENGINE_CHOSEN, text=_choice(table, best, is_bounded=is_bounded))


def _choice(table: Sequence[Candidate], best: Candidate, *, is_bounded: bool) -> str:
    """What was chosen, and why other engines are not delivered."""
    built = [row for row in table if not row.failure]
    kept = [row for row in built if row.holds]
    if not best.holds and not is_bounded:
        text = (
            f"{best.label}: {100 * (1 - (best.agreement or 0.0)):.2g}% of its answers to the evaluation rows differ"
            " from those in fp32; bound the loss with --max-drop, or use --precision fp32"
        )
    elif not best.holds:
        text = f"no engine keeps the metric within --max-drop; {best.label} loses least"
    else:
        pruned = f" {best.pruned_text}" if best.share else ""
        text = f"{best.label} is the fastest{pruned} of {len(kept)} engines that were built"
        if len(kept) < len(built):
            text += " and keep the metric within --max-drop" if is_bounded else " and have the answers of fp32"
    failures = _failures(table)
    return f"{text}; not delivered: {failures}" if failures else text


def _failures(candidates: Iterable[Candidate]) -> str:
    """Engines that cannot be delivered, each with the reason, which is named once; empty where there are none."""
    reasons = labels_by_failure(candidates)
    return "; ".join(f"{', '.join(labels)} ({reason})" for reason, labels in reasons.items())
