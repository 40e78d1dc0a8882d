"""Deliver the fastest engine that a recipe allows and that keeps the metric."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import graph_passes
from compressor.config.sections import AUTO, EngineConfig
from compressor.config.steps import Units
from compressor.environment import int8_instructions
from compressor.errors import CompressorError, ErrorCode, TargetMissingError
from compressor.quantization import QuantizedGraph
from compressor.results import Candidate, MetricUnit, Note, NoteCode, labels_by_failure, loss_of
from compressor.run.engine_choice.engine_trials import EngineTrials, Trial
from compressor.run.engine_choice.evaluation_scorer import agreement
from compressor.run.engine_choice.trial_times import share_left, time_pruned, time_whole
from compressor.run.products import DYNAMIC, PORTABLE, SYMMETRIC, Choice, ChosenEngine, Variant
from compressor.run.variant import build_variant
from compressor.targets import QUANTIZED, TARGETS, Engine, Precision, target
from graph_passes import GraphPassError

_NEAR = 1.1
"""Ratio of speeds up to which two engines are built and timed once more when the plan is known."""
_FEW_ROWS = 100
"""Calibration rows below which ranges are uncertain."""


def choices(config: EngineConfig, *, has_rows: bool = True) -> list[Choice]:
    """Every engine that a configuration allows, in the order in which they are tried.

    Args:
        config: target and precision, which may be left to the choice.
        has_rows: whether there are rows to calibrate engines in 8 bits on; without them these are left out.
    """
    names = tuple(TARGETS) if config.target == AUTO else (config.target,)
    allowed = []
    for name, precision in _precisions(names, config):
        engine = config.model_copy(update={"target": name, "precision": precision})
        if precision not in QUANTIZED:
            allowed.append(Choice(engine))
            continue
        if not has_rows:
            continue
        mixes = config.precision == AUTO and precision == "int8" and "float_widths" in target(name).options
        allowed.append(Choice(engine, SYMMETRIC if target(name).symmetric else PORTABLE, mixes=mixes))
        if target(name).quantizes and precision == "int8":
            allowed.append(Choice(engine, DYNAMIC, mixes=mixes))
    return allowed


def _precisions(names: Sequence[str], config: EngineConfig) -> Iterator[tuple[str, Precision]]:
    """Each target with each precision that is tried there."""
    for name in names:
        precisions = target(name).tried_precisions if config.precision == AUTO else (config.definite_precision,)
        yield from ((name, precision) for precision in precisions)


def choose_engine(
    trials: EngineTrials,
    allowed: Sequence[Choice] | None = None,
    pruning: tuple[Units, Callable[[Trial, float], Engine]] | None = None,
    decided: Sequence[str] = (),
    otherwise: Sequence[Choice] = (),
) -> ChosenEngine:
    """Try every engine that a recipe allows on the evaluation rows, and build the fastest that keeps the metric.

    An engine that cannot be quantized, built or proven is a row with its reason, and the next is tried.

    Where int8 loses too much, a further candidate returns as few products to floats as keep the metric. Where units are
    removed afterwards, engines are compared with about as many units as the budget leaves.

    Args:
        trials: what candidates are built, scored and timed with.
        allowed: the engines to try, which are timed only to choose between several; None: all that the recipe allows.
        pruning: the budgets, and what builds the engine of a candidate with a share of the units of every group; None:
            no units are removed.
        decided: labels of the engine that was chosen before, which is chosen again if it can be built, and of its
            runner-up; empty: none was.
        otherwise: the engines to try where none of `allowed` can be built.

    Raises:
        CompressorError: no engine could be built; see `fastest`.
    """
    # An engine that was chosen before units were removed loses by their removal too.
    is_bounded = trials.recipe.selection.max_drop is not None or allowed is not None
    graph, data, sizes, log = trials.graph, trials.data, trials.sizes, trials.log
    every = choices(trials.recipe.engine, has_rows=trials.has_rows) if allowed is None else allowed
    quantized = trials.quantize(every)
    built = _built(trials, every, quantized)
    if otherwise and all(trial.variant is None for trial in built):
        quantized |= trials.quantize(otherwise)
        built += _built(trials, otherwise, quantized)
    if not is_bounded:
        built = _with_equal_answers(trials, built)
    if allowed is None or sum(trial.candidate.holds for trial in built) > 1:
        built = time_whole(trials, built)
    if allowed is None:
        built = trials.measure_memory(built)
    higher_is_better = data is None or data.task.higher_is_better
    best, *others = [
        next((trial for trial in built if trial.choice.label == label and trial.variant is not None), None)
        for label in decided or ("",)
    ]
    is_new = best is None
    if best is None:
        if pruning is not None:
            step, build_pruned = pruning
            built = time_pruned(trials, built, share_left(step, built), build_pruned)
        best = fastest(built, higher_is_better)
    while True:
        source = _written_source(best, quantized)
        before = set(graph.path.parent.iterdir())
        try:
            with log.stage(f"compressed: building the engine ({best.choice.label})"):
                options = best.options or sizes.build
                variant = build_variant(graph, best.choice.config, options, sizes.cases, quantized=source)
            break
        except (CompressorError, GraphPassError) as error:
            for path in set(graph.path.parent.iterdir()) - before:
                path.unlink()
            built = [trial.failed(error) if trial is best else trial for trial in built]
            best = fastest(built, higher_is_better)
    log.add_notes(_notes(_table(built, best), tuple(quantized.values()), is_bounded=is_bounded))
    if is_new:
        others = [trial for trial in ranked(built) if trial is not best and _speed(trial) >= _speed(best) / _NEAR]
    near = (_chosen(built, trial, trial.variant, trial.source) for trial in others if trial is not None)
    runner_up = next(near, None)
    return replace(_chosen(built, best, variant, source), runner_up=runner_up)


def _chosen(built: Sequence[Trial], best: Trial, variant: Variant | None, source: Path | None) -> ChosenEngine:
    """One of the candidates as the chosen one."""
    assert variant is not None
    return ChosenEngine(variant, best.choice, _table(built, best), source, best.scored)


def _table(built: Sequence[Trial], best: Trial) -> tuple[Candidate, ...]:
    return tuple(trial.candidate.model_copy(update={"chosen": trial is best}) for trial in built)


def _built(
    trials: EngineTrials, every: Collection[Choice], quantized: Mapping[str | None, QuantizedGraph]
) -> list[Trial]:
    """The candidates, built and scored; and further ones.

    Where an engine computes products in floats because they alone are faster there, the engine with all of them in int8
    is tried too. Where int8 loses too much, products return to floats.
    """
    built: list[Trial] = []
    for choice in every:
        built.append(trials.score(trials.build(choice, quantized.get(choice.quantized_graph))))
        options = built[-1].options
        if choice.mixes and options is not None and options.float_widths:
            whole = replace(choice, mixes=False)
            built.append(trials.score(trials.build(whole, quantized.get(choice.quantized_graph))))
    return built + [
        trials.return_products(trial, quantized[trial.choice.quantized_graph])
        for trial in built
        if replace(trial.choice, in_float=()) in every and _loses_too_much(trial)
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


def _loses_too_much(trial: Trial) -> bool:
    return trial.variant is not None and trial.source is not None and not trial.candidate.holds


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
    eligible = ranked(built)
    if not eligible:
        differences = [trial.candidate.difference or 0.0 for trial in built]
        losses = [loss_of(difference, higher_is_better=higher_is_better) for difference in differences]
        return built[losses.index(min(losses))]
    return eligible[0]


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The candidates that keep the metric, fastest first: those that were timed with fewer units before others."""
    eligible = [trial for trial in trials if trial.variant is not None and trial.candidate.holds]
    pruned = [trial for trial in eligible if trial.candidate.speed_pruned is not None]
    return sorted(pruned or eligible, key=lambda trial: -_speed(trial))


def _speed(trial: Trial) -> float:
    """The speed by which a candidate is chosen; zero where it was not timed."""
    return trial.candidate.speed_pruned or trial.candidate.speed or 0.0


def _notes(table: Sequence[Candidate], graphs: Sequence[QuantizedGraph], *, is_bounded: bool) -> Iterator[Note]:
    """What a reader must know about the choice; `is_bounded`: the recipe bounds the loss of the metric."""
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
            f"the ranges of quantized activations were measured on {rows} rows; with fewer than {_FEW_ROWS} they"
            " are uncertain (--data with more rows, --calibration-rows)"
        )
        yield Note(code=NoteCode.FEW_CALIBRATION_ROWS, text=text)
    for quantized in graphs:
        if quantized.ruined:
            text = (
                f"{quantized.path.name}: {len(quantized.ruined)} matrix products are computed in fp32, because outliers"
                f" of their activations leave int8 too few steps for the other values: {', '.join(quantized.ruined)}"
            )
            yield Note(code=NoteCode.OUTLIER_RANGES, text=text)
        if quantized.in_float:
            names = ", ".join(quantized.in_float)
            text = f"{quantized.path.name}: {len(quantized.in_float)} products are in floats: {names}"
            yield Note(code=NoteCode.PRODUCTS_IN_FLOAT, text=text)
    best = next(row for row in table if row.chosen)
    if best.quantized is not None and best.difference is not None and not is_bounded:
        unit = " points" if best.unit is MetricUnit.POINTS else ""
        text = (
            f"{best.label}: nothing bounds what this engine loses (--max-drop would); on the evaluation rows the metric"
            f" changes by {best.unit.scale * best.difference:+.2f}{unit}"
        )
        yield Note(code=NoteCode.LOSS_UNBOUNDED, text=text)
    if best.in_float:
        text = (
            f"{len(best.in_float)} products were returned to floats, because a proof or the metric does not hold with"
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
            f"{best.label}: {100 * (1 - (best.agreement or 0.0)):.2g}% of its answers to the evaluation rows are not"
            " those in fp32; bound what that may cost with --max-drop, or use --precision fp32"
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
