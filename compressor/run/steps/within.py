"""Remove units and train what is left in attempts, and keep the fastest result that holds the metric."""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter

from compressor.config.steps import Step, Within
from compressor.errors import BudgetError, ErrorCode, UsageError
from compressor.measure.costs import CostTable
from compressor.pruning.bisect import (
    LEAST_SHARE,
    MARGIN,
    MARGIN_ABOVE_LEAST,
    LossEstimate,
    estimate_losses,
    require_informed,
    upper_losses,
)
from compressor.pruning.model import ResampledScore, TorchScorer
from compressor.results import MetricUnit, Note, NoteCode, is_within
from compressor.run.budget_rows import predicted_rows
from compressor.run.prune_units import time_tables
from compressor.run.run_context import RunInputs
from compressor.run.steps import distill, units
from compressor.run.steps.base import PLAN, STATISTICS, State, StepContext, StepFunctions, stored_state
from compressor.store import Store, versioned
from compressor.training.accelerator import on_accelerator
from compressor.workdir import ATTEMPTS
from graph_passes.files import write_text

_CLOSE = 1.05
"""Ratio of two speeds between which no further attempt is made."""
_SHORTEST = 1.5
"""Ratio of the time that is left to that of an attempt without its training, below which no attempt is begun."""


class _Score(BaseModel):
    """The fields of a `ResampledScore`."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    metric: float
    draws: tuple[float, ...]
    divergence: float


class _Attempt(BaseModel):
    """What is known of an attempt; stored, so that every process and an interrupted run go on alike.

    Attributes:
        speedup: the speed that its units are removed for.
        start: number of the attempt whose units and weights it goes on from; None: the model before the first.
        minutes: time that its training may take; None: as long as its training steps take.
        seconds: time that it took; None before it is finished.
        score: how the trained model scores.
        failure: why no plan has the speed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    speedup: float
    start: int | None = None
    minutes: float | None = None
    seconds: float | None = None
    score: _Score | None = None
    failure: str = ""

    @property
    def resampled(self) -> ResampledScore | None:
        """Its score, where it has a plan."""
        if self.score is None:
            return None
        return ResampledScore(self.score.metric, np.array(self.score.draws), self.score.divergence)


_ATTEMPTS = TypeAdapter(tuple[_Attempt, ...])


def _check_options(step: Within) -> None:
    units.FUNCTIONS.check_options(step.units)


def _check(step: Within, inputs: RunInputs, earlier: Sequence[Step]) -> None:
    units.FUNCTIONS.check(step.units, inputs, earlier)
    distill.FUNCTIONS.check(step.distill, inputs, (*earlier, step.units))


def _rehearse(step: Within, context: StepContext, earlier: Sequence[Step]) -> None:
    units.FUNCTIONS.rehearse(step.units, context, earlier)


@versioned(1)
def _run(step: Within, state: State, context: StepContext, store: Store) -> State:
    """The fastest attempt that holds the metric, whose weights the model has; else the state as it was.

    Every process of a distributed run calls this; the main process alone decides, and the others read its decisions.
    """
    run, network = context.run, context.run.model.folder.model
    weights = copy.deepcopy(network.state_dict())
    search = _Search.begin(step, state, context, store) if run.state.is_main_process else None
    base = state if search is None else search.base
    quiet = replace(context, run=run.without_notes())
    results: list[State | None] = []
    while True:
        if search is not None:
            search.plan(len(results))
        run.state.wait_for_everyone()
        if len(attempts := _stored(store)) == len(results):
            break
        attempt, start = attempts[len(results)], base
        network.load_state_dict(weights)
        if attempt.start is not None:
            stored_state(_stores(step, store, attempt.start)[-1], network)
            start = results[attempt.start] or base
            start = replace(start, selected=replace(start.selected, notes=base.selected.notes))
        results.append(_carry_out(step, len(results), start, quiet, store, search))
    network.load_state_dict(weights)
    if search is None:
        return state
    shutil.rmtree(run.work.learning / STATISTICS, ignore_errors=True)
    return search.result(results)


def _stores(step: Within, store: Store, number: int) -> tuple[Store, Store]:
    """The stores of an attempt: of its units, which the main process alone removes, and of its training."""
    path, inputs = store.path / f"attempt-{number + 1}", {**store.inputs, "attempt": number}
    pruned = replace(store, path=path / step.units.name, inputs=inputs, processes=None)
    return pruned, replace(store, path=path / step.distill.name, inputs=inputs)


def _stored(store: Store) -> tuple[_Attempt, ...]:
    """The attempts so far."""
    file = store.path / ATTEMPTS
    return _ATTEMPTS.validate_json(file.read_bytes()) if file.is_file() else ()


def _scores(attempts: Sequence[_Attempt]) -> dict[int, ResampledScore]:
    """Number of each attempt that has a score -> the score."""
    return {number: score for number, attempt in enumerate(attempts) if (score := attempt.resampled)}


def _carry_out(
    step: Within, number: int, start: State, context: StepContext, store: Store, search: _Search | None
) -> State | None:
    """The state after an attempt, or None where no plan has its speed; the model has the weights of the attempt."""
    run, network = context.run, context.run.model.folder.model
    pruned, trained = _stores(step, store, number)
    attempt, state, began = _stored(store)[number], start, time.perf_counter()
    if attempt.failure:
        return None
    if not trained.has(PLAN):
        if search is not None:
            budget = step.units.model_copy(update={"speedup": attempt.speedup, "max_drop": None})
            try:  # the same engine has the same times
                state = units.remove_units(budget, start, context, pruned, times=search.store)
                search.allot(number, time.perf_counter() - began)
            except BudgetError as error:
                search.update(number, failure=str(error), seconds=time.perf_counter() - began)
        run.state.wait_for_everyone()
        attempt = _stored(store)[number]
        if attempt.failure:
            return None
        if search is None:
            state = stored_state(pruned, network)
        outputs = step.distill.teacher_outputs or store.path / "teacher"
        limits = {"minutes": step.distill.minutes if attempt.minutes is None else attempt.minutes}
        training = step.distill.model_copy(update={**limits, "teacher_outputs": outputs})
        try:
            state = distill.FUNCTIONS.run(training, state, context, trained)
        except UsageError as error:
            if step.minutes is None or error.details.get("field") != "minutes":
                raise
            text = f"--minutes {step.minutes:g} leaves too few for the training of attempt {number + 1}: {error}"
            raise UsageError(text, code=error.code, **{**error.details, "value": step.minutes}) from error
        run.state.wait_for_everyone()
        if search is not None:
            shutil.rmtree(pruned.path)  # the weights before the training are as large
    else:
        state = stored_state(trained, network)
    if search is None:
        return state
    if attempt.score is None:
        score = search.score(f"attempt {number + 1}")
        fields = {"metric": score.metric, "draws": tuple(score.draws.tolist()), "divergence": score.divergence}
        search.update(number, score=_Score(**fields), seconds=time.perf_counter() - began)
    return search.with_engine(state)


@dataclass
class _Search:
    """Decides on the attempts, in the main process.

    Attributes:
        step: the loss allowed, the number of attempts and their time.
        context: the run.
        store: holds the attempts.
        base: the state before the first attempt, with the engine that units are removed for.
        tables: times of units with that engine, by size.
        scorer: scores models on the evaluation rows.
        whole: the score of the model before the first attempt.
        deadline: when the last attempt has to end, by `time.perf_counter`; infinite without a limit.
    """

    step: Within
    context: StepContext
    store: Store
    base: State
    tables: Sequence[CostTable]
    scorer: TorchScorer
    whole: ResampledScore
    deadline: float
    _score_seconds: float
    _pruning_seconds: float = 0.0

    @classmethod
    def begin(cls, step: Within, state: State, context: StepContext, store: Store) -> _Search:
        """Choose the engine, measure the times of units, and score the model as it is.

        Raises:
            InputError: the model is no better than the same answer for every row, so that no loss would show.
        """
        run, began = context.run, time.perf_counter()
        store = replace(store, processes=None)
        scorer, engine = units.with_engine(step.units, state, context, store)
        # The last stages of the run export, choose and build once more, for a smaller model.
        last = time.perf_counter() - run.log.start
        deadline = math.inf
        if step.minutes is not None:
            spent = sum(attempt.seconds or 0.0 for attempt in _stored(store))
            deadline = run.log.start + 60 * step.minutes - last - spent
        tables = time_tables(units.budget_run(step.units, context, store, engine))
        model = run.model.folder.model
        began = time.perf_counter()
        with on_accelerator(model, copies=3):
            trials = TorchScorer(model, run.rows.eval_task, run.rows.eval, step.units.seed, run.log)
            whole = trials.score_whole()
        require_informed(whole, run.rows.eval_task)
        base = State(replace(state.selected, engine=engine.choice.label), engine, scorer)
        return cls(step, context, store, base, tables, trials, whole, deadline, time.perf_counter() - began)

    def plan(self, number: int) -> None:
        """Store the next attempt, unless it is stored or none is worth its time."""
        attempts = _stored(self.store)
        if len(attempts) == number and (attempt := self._next(attempts)) is not None:
            self._write((*attempts, attempt))

    def _next(self, attempts: Sequence[_Attempt]) -> _Attempt | None:
        """The attempt between the fastest that holds and the slowest above it that does not; None: there is none."""
        untrained = self._pruning_seconds + self._score_seconds
        is_late = bool(attempts) and self.deadline - time.perf_counter() < _SHORTEST * untrained
        if len(attempts) >= self.step.attempts or is_late:
            return None
        holding = self._holding(attempts)
        start = max(holding, key=lambda number: attempts[number].speedup, default=None)
        low = self._speed_of_whole if start is None else attempts[start].speedup
        failed = [attempt.speedup for number, attempt in enumerate(attempts) if number not in holding]
        high = min((speed for speed in failed if speed > low), default=self._highest_speed)
        return _Attempt(speedup=math.sqrt(low * high), start=start) if high > _CLOSE * low else None

    @property
    def _speed_of_whole(self) -> float:
        """How many times as fast as dense the engine is with every unit, at the size where that is least."""
        return min(table.dense / table.whole for table in self.tables)

    @property
    def _highest_speed(self) -> float:
        """The highest speed that is tried."""
        least = (table.dense / (MARGIN_ABOVE_LEAST * table.least) for table in self.tables if table.least > 0)
        return min([self._speed_of_whole / LEAST_SHARE, *least])

    def allot(self, number: int, seconds: float) -> None:
        """Store how long the training of an attempt may take, whose units took some seconds.

        Raises:
            UsageError: no time is left for the training of the first attempt.
        """
        self._pruning_seconds = seconds
        if self.step.minutes is None or _stored(self.store)[number].minutes is not None:
            return
        left, untrained = self.deadline - time.perf_counter() - self._score_seconds, seconds + self._score_seconds
        # A training shorter than the pruning before it is wasted: there are as many attempts as leave it that long.
        shares = ((left - later * untrained) / (later + 1) for later in range(self.step.attempts - number - 1, 0, -1))
        if left > 0:
            self.update(number, minutes=next((share for share in shares if share >= seconds), left) / 60)
        elif number:
            self.update(number, failure="no time is left for its training", seconds=seconds)
        else:
            passed = (time.perf_counter() - self.context.run.log.start) / 60
            needed = math.ceil(self.step.minutes - left / 60) + 1
            raise UsageError(
                f"--minutes {self.step.minutes:g}: {passed:.1f} minutes have passed before the first training, and the"
                f" last stages of the run take time too; allow at least {needed} minutes",
                code=ErrorCode.OUT_OF_RANGE,
                field="minutes",
                value=self.step.minutes,
            )

    def score(self, label: str) -> ResampledScore:
        """The score of the model as it is."""
        with on_accelerator(self.context.run.model.folder.model, copies=3):
            return self.scorer.score(label)

    def with_engine(self, state: State) -> State:
        """The state of an attempt with the engine that its units were removed for, which an interrupted run stored."""
        if state.engine is not None or self.base.engine is None:
            return state
        candidates = (self.base.engine, self.base.engine.runner_up)
        label = state.selected.engine
        engine = next((chosen for chosen in candidates if chosen and chosen.choice.label == label), self.base.engine)
        return State(state.selected, replace(engine, runner_up=None), self.base.scorer)

    def result(self, results: Sequence[State | None]) -> State:
        """The state of the fastest attempt that holds, with its weights; that before the first where none does."""
        run, attempts = self.context.run, _stored(self.store)
        losses = self._losses(attempts)
        holding = self._holding(attempts)
        best = max(holding, key=lambda number: attempts[number].speedup, default=None)
        state = self.base if best is None else results[best]
        assert state is not None
        if best is None:
            return replace(state, selected=replace(state.selected, notes=(self._nothing_holds(losses),)))
        stored_state(_stores(self.step, self.store, best)[-1], run.model.folder.model)
        unit, loss = run.rows.eval_task.metric_unit, losses[best]
        numbers = [f"{unit.scale * value:.2g}" for value in loss]
        text = (
            f"of {len(attempts)} attempts, the fastest that is expected to keep the metric within a loss of"
            f" {self.step.max_drop:g}, with a margin, was to be {attempts[best].speedup:.3g} times as fast as the whole"
            f" model; expected loss of {run.rows.eval_task.metric} after its training: {numbers[0]}"
            f"{' points' if unit is MetricUnit.POINTS else ''}, standard error {numbers[1]}"
        )
        selected = state.selected
        rows = predicted_rows(self.tables, selected.plan.counts)
        notes = (Note(code=NoteCode.BUDGET_MET, text=text), *selected.notes)
        return replace(state, selected=replace(selected, budget=rows, notes=notes))

    def _nothing_holds(self, losses: Mapping[int, LossEstimate]) -> Note:
        """That no attempt holds the metric, and which came closest."""
        attempts, metric = _stored(self.store), self.context.run.rows.eval_task.metric
        text = f"no unit is removed: none of {len(attempts)} attempts is expected to keep the metric within"
        text += f" a loss of {self.step.max_drop:g}, with a margin"
        advice = "allow more loss (--max-drop)"
        if losses:
            closest = min(losses, key=lambda number: losses[number].loss)
            loss, error = losses[closest]
            text += (
                f"; the closest, {attempts[closest].speedup:.3g} times as fast as the whole model, loses about"
                f" {loss:.2g} of {metric}, standard error {error:.2g}"
            )
            if loss < self._allowed and math.isfinite(error):
                rows = len(self.context.run.rows.eval) * (MARGIN * error / (self._allowed - loss)) ** 2
                advice = f"about {rows:,.0f} evaluation rows would be needed to tell (--eval-data)"
        return Note(code=NoteCode.NOTHING_HOLDS, text=f"{text}; {advice}")

    def _losses(self, attempts: Sequence[_Attempt]) -> dict[int, LossEstimate]:
        """Number of each attempt that has a score -> its expected loss."""
        scores = _scores(attempts)
        higher = self.context.run.rows.eval_task.higher_is_better
        estimates = estimate_losses(self.whole, list(scores.values()), higher_is_better=higher)
        return dict(zip(scores, estimates, strict=True))

    def _holding(self, attempts: Sequence[_Attempt]) -> list[int]:
        """Numbers of the attempts that hold, with a margin for the choice of the rows."""
        task = self.context.run.rows.eval_task
        scores = _scores(attempts)
        upper = upper_losses(self.whole, list(scores.values()), higher_is_better=task.higher_is_better)
        return [number for number, loss in zip(scores, upper, strict=True) if is_within(loss, self._allowed)]

    @property
    def _allowed(self) -> float:
        """What the model may lose, beside what the precision of the engine costs."""
        lost = 0.0 if self.base.engine is None else self.base.engine.lost(self.context.run.rows.eval_task)
        return self.step.max_drop - max(0.0, lost)

    def update(self, number: int, **fields: Any) -> None:
        """Store what is known of an attempt."""
        attempts = list(_stored(self.store))
        attempts[number] = attempts[number].model_copy(update=fields)
        self._write(attempts)

    def _write(self, attempts: Sequence[_Attempt]) -> None:
        write_text(self.store.path / ATTEMPTS, _ATTEMPTS.dump_json(tuple(attempts)).decode())


FUNCTIONS = StepFunctions(_run, _check_options, _check, _rehearse)
