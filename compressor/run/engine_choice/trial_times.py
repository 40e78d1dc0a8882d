"""Times of the candidates: of the whole model, and with about as many units as a budget leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from compressor.config.steps import Units
from compressor.errors import CompressorError
from compressor.measure import median_times
from compressor.model_folder import example_feeds
from compressor.results import Note, NoteCode, size_label
from compressor.run.engine_choice.engine_trials import EngineTrials, Trial
from compressor.targets import Engine
from compressor.targets.base import parse_shape
from graph_passes import GraphPassError

_TIMED_SECONDS = 3.0
"""Maximum time spent on timing one candidate at one size."""
_UNKNOWN_SHARE = 0.5
"""Share of the units with which engines are timed where the metric decides how many are left."""
_MAX_TIMES_SLOWER = 2.0
"""Ratio of times up to which an engine of the whole model may overtake the fastest when units are removed."""


def time_whole(trials: EngineTrials, built: Sequence[Trial]) -> list[Trial]:
    """The candidates with their times by size, and their speed: the time of the dense engine over theirs.

    Args:
        trials: the dense engine, the sizes and the inputs.
        built: the candidates, those that could not be built included.
    """
    engines = [trial.variant.engine for trial in built if trial.variant is not None]
    reference, *rows = _times(trials, engines, "timing all engines")
    remaining = iter(rows)
    return [trial if trial.variant is None else _timed(trial, next(remaining), reference) for trial in built]


def share_left(step: Units, built: Sequence[Trial]) -> float:
    """About the share of the units that meets a budget: that of the work, or of the time of the fastest candidate.

    Args:
        step: the budgets.
        built: the candidates with their times.
    """
    if step.is_unbounded or step.keep is not None:  # as much as the metric allows
        return _UNKNOWN_SHARE
    shares = [share for share in (step.macs, step.parameters) if share is not None]
    holding = [trial.candidate for trial in built if trial.candidate.holds and trial.candidate.speed]
    if holding:
        best = max(holding, key=lambda candidate: candidate.speed or 0.0)
        if step.speedup is not None:
            shares.append((best.speed or 0.0) / step.speedup)
        if step.milliseconds is not None:
            labels = {size_label(*parse_shape(shape)) for shape in step.budget_at}
            times = {label: time for label, time in best.milliseconds.items() if label in labels} or best.milliseconds
            shares.append(step.milliseconds / max(times.values()))
    return min(1.0, *shares)


def time_pruned(
    trials: EngineTrials, built: Sequence[Trial], share: float, build: Callable[[Trial, float], Engine]
) -> list[Trial]:
    """The candidates, and of those that may be the fastest the speed with a share of the units.

    How much faster an engine gets when units are removed differs between runtimes and precisions. An engine that takes
    more than `_MAX_TIMES_SLOWER` times as long as the fastest is not built again, and neither is the only one left. One
    that cannot be built becomes a row with the reason; where none can, all candidates are returned as they are, with a
    note.

    Args:
        trials: the dense engine, the sizes and the inputs.
        built: the candidates with their speeds.
        share: the share of the units.
        build: builds the engine of a candidate with a share of the units.
    """
    speeds = {index: trial.candidate.speed or 0.0 for index, trial in enumerate(built) if trial.candidate.holds}
    least = max(speeds.values(), default=0.0) / _MAX_TIMES_SLOWER
    near = [index for index, speed in speeds.items() if speed >= least]
    if len(near) < 2 or share >= 1:
        return list(built)
    pruned: dict[int, Engine] = {}
    failures: dict[int, Exception] = {}
    with trials.log.stage(f"building engines with {100 * share:.2g}% of the units") as on_progress:
        for number, index in enumerate(near, start=1):
            try:
                pruned[index] = build(built[index], share)
            except (CompressorError, GraphPassError) as error:
                failures[index] = error
            on_progress(number, len(near))
    if not pruned:
        text = f"engines are compared by the whole model, since none has {100 * share:.2g}% of the units"
        trials.log.add_notes([Note(code=NoteCode.ENGINES_COMPARED_WHOLE, text=f"{text} ({failures[near[0]]})")])
        return list(built)
    reference, *rows = _times(trials, list(pruned.values()), f"timing engines with {100 * share:.2g}% of the units")
    timed = [trial.failed(failures[index]) if index in failures else trial for index, trial in enumerate(built)]
    for index, row in zip(pruned, rows, strict=True):
        update = {"speed_pruned": _speed(row, reference), "share": share}
        timed[index] = replace(built[index], candidate=built[index].candidate.model_copy(update=update))
    return timed


def fastest_of(trials: EngineTrials, engines: Sequence[Engine], stage: str) -> int:
    """The index of the fastest of some engines, by the geometric mean over sizes.

    Args:
        trials: the sizes and the inputs.
        engines: the engines.
        stage: what their timing is called.
    """
    reference, *rows = _times(trials, engines, stage)
    return int(np.argmax([_speed(row, reference) for row in rows]))


def _times(trials: EngineTrials, engines: Sequence[Engine], stage: str) -> list[dict[str, float]]:
    """Milliseconds of a call by size, of the dense engine and of these, which take turns."""
    times: list[dict[str, float]] = [{} for _ in (trials.dense, *engines)]
    measure = trials.recipe.measure
    for batch, seq in itertools.product(measure.batch, trials.sizes.lengths):
        label, feeds = size_label(batch, seq), example_feeds(trials.folder, batch, seq)
        with trials.log.stage(f"{stage}, {label}"):
            seconds = min(_TIMED_SECONDS, measure.seconds) * len(times)
            medians = median_times([trials.dense.engine, *engines], feeds, seconds)
        for row, median in zip(times, medians, strict=True):
            row[label] = 1e3 * median
    return times


def _timed(trial: Trial, milliseconds: dict[str, float], reference: Mapping[str, float]) -> Trial:
    """A candidate with its times by size, and its speed."""
    update = {"milliseconds": milliseconds, "speed": _speed(milliseconds, reference)}
    return replace(trial, candidate=trial.candidate.model_copy(update=update))


def _speed(milliseconds: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """The geometric mean over sizes of the time of the dense engine over that of another engine."""
    return float(np.exp(np.mean([np.log(reference[label] / milliseconds[label]) for label in milliseconds])))
