"""Remove units in attempts, train what is left, and keep the fastest result that holds the metric."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset
from pydantic import BaseModel, ConfigDict, TypeAdapter

from compressor.config.steps import Step, Within
from compressor.engines.choose import ChosenEngine
from compressor.errors import BudgetError, CompressorError
from compressor.graph.signature import GeneratingForward
from compressor.model_folder.access import ModelAccess
from compressor.pruning.allocate import RANKING_STAGES, Budgets, plan_costs
from compressor.pruning.bisect import (
    MARGIN,
    LossEstimate,
    ResampledScore,
    estimate_losses,
    mean_table,
    next_speed,
    require_informed,
    rows_that_show,
    speed_bounds,
    speed_of,
    unseen_share,
    upper_losses,
)
from compressor.pruning.measure import KeptTimes
from compressor.results import CertificateScope, CertifiedLoss, MetricUnit, Note, NoteCode, is_within
from compressor.run.generation import EXPORT_STAGE, rounded_engine
from compressor.run.model_units import prunable_groups
from compressor.run.plan_source import PlanFiles
from compressor.run.run_context import RunContext, RunInputs
from compressor.run.scorer import Scorer, metric_sums
from compressor.run.steps import units
from compressor.run.steps.base import (
    PLAN,
    STATISTICS,
    Rungs,
    State,
    StepContext,
    StepFunctions,
    functions_of,
    stored_state,
)
from compressor.run.steps.units import fold_gates
from compressor.selection.certify import certify, record_certificate, split_rows
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Json, Store, versioned
from compressor.targets import Engine
from compressor.tasks import Task
from compressor.workdir import ATTEMPTS, write_json
from graph_passes import GraphPassError, Plan

T = TypeVar("T")
_CLOSE, _CLOSE_TRAINED = 1.01, 1.05
"""Ratio of two speeds between which no further attempt is made; a training costs more than it gains there."""
_FIRST_RATIO, _LATER_RATIO = 1.6, 1.4
"""Largest ratio of the speed of the first attempt that is trained to that of the whole model, and of a later one to the
fastest that holds. A training that goes on from weights that hold is not lost, and that of too fast a plan is."""
_ONLY_RATIO = 1.3
"""The same for the first attempt of a run in whose minutes nothing can be trained."""
_TRAINING_RATIO = 1.0
"""Least ratio of the time of a training to the rest of its attempt, by which there are fewer attempts."""
_PRUNED_SHARE, _PRUNED_SHARE_UNTRAINED = 0.12, 0.5
"""Share of the time that is left which choosing and refitting the units of an attempt may take, by fewer rows."""
_FORWARDS_OF_ROW = 30.0
"""Forwards that choosing and refitting units takes for each row: 28 for MiniLM on SST-2."""
_FEWEST_ROWS = 256
"""Rows by which units are chosen at least, as far as there are."""
_SHORTEST = 1.5
"""Ratio of the time that is left to that of an attempt without its training, below which no attempt is begun."""
_COSTS_SHARE, _RUNGS_SHARE = 0.25, 0.1
"""Share of the time that is left that the cost table may take, and of the run that is kept for slower engines."""
_TRAINED_SHARE, _MOST_UNTRAINED = 0.33, 2.25
"""Share of the run below which what is left for costs and attempts suffices for no training, and the ratio to the speed
of the whole model up to which attempts are made then: in a few of them a faster plan hardly keeps the metric."""


class _Attempt(BaseModel):
    """What is known of an attempt; stored, so that every process and an interrupted run go on alike.

    Attributes:
        speedup: the speed that its units are removed for.
        start: number of the attempt whose units and weights it goes on from; None: the model before the first.
        counts: name of the group -> number of units that its plan keeps.
        rows: maximum number of training rows by which its units are chosen; None: as many as the step says.
        minutes: time that its training may take; None: as long as its training steps take.
        untrained: whether it holds without its training, which is left out so that faster attempts have the time.
        seconds: time that it took; None before it is finished.
        score: how the model scores after it.
        failure: why it has no result.
        holds: whether it keeps the metric; known when the last attempt is finished.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    speedup: float
    start: int | None = None
    counts: dict[str, int] = {}
    rows: int | None = None
    minutes: float | None = None
    untrained: bool = False
    seconds: float | None = None
    score: ResampledScore | None = None
    failure: str = ""
    holds: bool = False


_ATTEMPTS = TypeAdapter(tuple[_Attempt, ...])


def _check_options(step: Within) -> None:
    for part in step.parts:
        functions_of(part).check_options(part)


def _check(step: Within, inputs: RunInputs, earlier: Sequence[Step]) -> None:
    units.FUNCTIONS.check(step.units, inputs, earlier)
    if step.distill is not None:
        functions_of(step.distill).check(step.distill, inputs, (*earlier, step.units))


def _rehearse(step: Within, context: StepContext, earlier: Sequence[Step]) -> None:
    units.FUNCTIONS.rehearse(step.units, context, earlier)


@versioned(9)
def _run(step: Within, state: State, context: StepContext, store: Store) -> State:
    """The fastest attempt that holds the metric, whose weights the model has; else the state as it was.

    Every process of a distributed run calls this; the main process alone decides, and the others read its decisions.
    """
    model, main_store, base = context.run.model.folder.access, replace(store, processes=None), state
    if context.run.state.is_main_process:
        began = time.perf_counter()
        scorer, engine = units.with_engine(step.units, state, context, main_store)
        deadline = _deadline(step, context.run, time.perf_counter() - began)
        engine = _without_lossier(engine, context.run.rows.eval_task)
        base = State(replace(state.selected, engine=engine.choice.label), engine, scorer)
    else:
        deadline = math.inf
    trains = step.trains and store.memo("trains", {}, lambda _: _has_time(step, deadline), Json(bool), by_main=True)
    attempts = _Attempts(step, base, context, store, deadline, trains=trains)
    selected = store.memo(PLAN, {}, lambda _: _attempt(attempts), PlanFiles(model))
    if base.engine is None:
        return stored_state(store, model)
    state = units.with_last_engine(State(selected, base.engine, base.scorer), context, main_store, deadline)
    return replace(state, rungs=_rungs(attempts))


def _without_lossier(engine: ChosenEngine, task: Task) -> ChosenEngine:
    """The engine, without its runner-up where that loses more or rounds otherwise than attempts are judged by."""
    near = engine.runner_up
    if near is None:
        return engine
    rounds_alike = near.choice.config.precision == engine.choice.config.precision
    return engine if rounds_alike and near.lost(task) <= engine.lost(task) else replace(engine, runner_up=None)


def _deadline(step: Within, run: RunContext, choosing: float) -> float:
    """When the last attempt has to end, by `time.perf_counter`; infinite without a limit.

    What follows takes about as long as what came before the choice of the engine, which took `choosing` seconds: the
    model is exported, built and proven once more. Then engines are timed, and some of slower plans are delivered.
    """
    if step.minutes is None:
        return math.inf
    kept = _RUNGS_SHARE * 60 * step.minutes
    before = min(kept, time.perf_counter() - run.log.start - choosing)  # earlier steps may have learned
    timing = 2 * run.built.measure.seconds * len(run.timed_inputs)
    return run.log.start + 60 * step.minutes - kept - before - timing


def _has_time(step: Within, deadline: float) -> bool:
    """Whether what is left until a deadline suffices for trainings."""
    return step.minutes is None or deadline - time.perf_counter() >= _TRAINED_SHARE * 60 * step.minutes


def _rungs(attempts: _Attempts) -> Rungs | None:
    """The attempts that hold the metric besides the fastest; None: there are none."""
    holding = sorted((each.speedup, number) for number, each in enumerate(_stored(attempts.store)) if each.holds)
    *milder, fastest = [(f"{speedup:.3g}x", number) for speedup, number in holding] or [("", 0)]
    if not milder:
        return None
    minutes = attempts.step.minutes
    deadline = math.inf if minutes is None else attempts.context.run.log.start + 60 * minutes
    return Rungs(fastest[0], {name: partial(attempts.state, number) for name, number in milder}, deadline)


def _attempt(attempts: _Attempts) -> SelectedPlan:
    """The plan of the fastest attempt that holds the metric, whose weights the model of the main process has."""
    run, base, model = attempts.context.run, attempts.base, attempts.model
    weights, noted = model.copy_state(), len(run.log.notes)
    if run.state.is_main_process:
        attempts = _Search(attempts.step, base, attempts.context, attempts.store, attempts.deadline, attempts.trains)
    quiet = replace(attempts.context, run=replace(run, log=run.log.without_notes()))
    while True:
        model.load_state(weights)
        attempts.plan()
        run.state.wait_for_everyone()
        stored = _stored(attempts.store)
        if (number := _unfinished(stored)) is None:
            break
        start = base
        if (earlier := stored[number].start) is not None:
            start = attempts.state(earlier)
            start = replace(start, selected=replace(start.selected, notes=base.selected.notes))
        attempts.carry_out(number, start, quiet)
    if not isinstance(attempts, _Search):
        return base.selected
    shutil.rmtree(run.work.learning / STATISTICS, ignore_errors=True)
    selected = attempts.result()
    # A run that resumes after this has the notes of the plan alone.
    return replace(selected, notes=(*selected.notes, *run.log.notes[noted:]))


def _stored(store: Store) -> tuple[_Attempt, ...]:
    """The attempts so far."""
    file = store.path / ATTEMPTS
    return _ATTEMPTS.validate_json(file.read_bytes()) if file.is_file() else ()


def _unfinished(attempts: Sequence[_Attempt]) -> int | None:
    """The number of the first attempt that has no result yet; None: all have one."""
    return next((n for n, attempt in enumerate(attempts) if attempt.score is None and not attempt.failure), None)


class _Attempts:
    """The attempts of a step. Every process carries them out; in the main process `_Search` decides on them.

    Args:
        base: the state before the first attempt, with the engine that units are removed for.
        deadline: when the last attempt has to end, by `time.perf_counter`; infinite without a limit.
        trains: whether attempts are trained: the step says so, and there is time for it.
    """

    def __init__(
        self, step: Within, base: State, context: StepContext, store: Store, deadline: float, trains: bool
    ) -> None:
        self.step, self.base, self.context, self.store = step, base, context, store
        self.deadline, self.trains = deadline, trains

    @property
    def model(self) -> ModelAccess:
        """The model."""
        return self.context.run.model.folder.access

    def stores(self, number: int) -> tuple[Store, Store]:
        """The store of the units of an attempt, which the main process alone removes; and that of its result."""
        step, store = self.step, self.store
        path, inputs = store.path / f"attempt-{number + 1}", {**store.inputs, "attempt": number}
        pruned = replace(store, path=path / step.units.name, inputs=inputs, processes=None)
        if step.distill is None or not self.trains or _stored(store)[number].untrained:
            return pruned, pruned
        return pruned, replace(store, path=path / step.distill.name, inputs=inputs)

    def state(self, number: int) -> State:
        """The state after an attempt, whose weights the model gets."""
        state = stored_state(self.stores(number)[-1], self.model)
        return replace(state, engine=self.base.engine, scorer=self.base.scorer)

    def carry_out(self, number: int, start: State, context: StepContext) -> None:
        """Remove the units of an attempt, train what is left and score it, as far as no interrupted run did."""
        began = time.perf_counter() - (_stored(self.store)[number].seconds or 0.0)
        pruned, final = self.stores(number)
        if final.has(PLAN):
            state = stored_state(final, self.model)
        else:
            removed = self.remove_units(number, start, context, pruned)
            context.run.state.wait_for_everyone()
            if _stored(self.store)[number].failure:
                return
            state = stored_state(pruned, self.model) if removed is None else removed
            if self.stores(number)[-1] != pruned:
                self._train(number, state, context)
                context.run.state.wait_for_everyone()
                if context.run.state.is_main_process:
                    shutil.rmtree(pruned.path)  # the weights before the training are as large
        if _stored(self.store)[number].score is None:
            self.score(number, state.selected.plan, began)

    def _train(self, number: int, state: State, context: StepContext) -> None:
        """Train what is left, for as long as the attempt allows."""
        step, minutes = self.step.distill, _stored(self.store)[number].minutes
        assert step is not None
        outputs = step.teacher_outputs or self.store.path / "teacher"
        limits = {"minutes": step.minutes if minutes is None else minutes, "teacher_outputs": outputs}
        functions_of(step).run(step.model_copy(update=limits), state, context, self.stores(number)[-1])

    def plan(self) -> None:
        """Store what is attempted next, in the main process."""

    def remove_units(self, number: int, start: State, context: StepContext, store: Store) -> State | None:
        """The state without the units of an attempt, in the main process."""

    def score(self, number: int, plan: Plan, began: float) -> None:
        """Score an attempt, in the main process."""


class _Search(_Attempts):
    """Decides on the attempts, in the main process.

    Attributes:
        groups: the groups whose units may be removed.
        costs: what plans cost; its tables decide which units an attempt removes.
        scorer: scores models on the evaluation rows, or on some of them if a certificate needs the others.
        searched: the number of these rows.
        unseen: the rows of the certificate; None: none is requested.
        whole: the score of the model before the first attempt.

    Raises:
        UsageError: the metric cannot be certified.
        InputError: the model is no better than the same answer for every row, so that no loss would show, or there are
            too few rows for a certificate.
    """

    def __init__(
        self, step: Within, base: State, context: StepContext, store: Store, deadline: float, trains: bool
    ) -> None:
        # Attempts of an interrupted run took their part of the time.
        deadline -= sum(attempt.seconds or 0.0 for attempt in _stored(store))
        super().__init__(step, base, context, store, deadline, trains)
        run, self._pruning_seconds = context.run, 0.0
        self.groups, _ = prunable_groups(step.units, run.model, context.graphs.refused)
        seconds = _COSTS_SHARE * max(0.0, self.deadline - time.perf_counter())
        source = replace(units.cost_source(step.units, context, base.engine), seconds=seconds)
        times = KeptTimes(source, replace(store, processes=None))
        costs = plan_costs(times, self.groups, Budgets(), is_timed=True)
        self.costs = replace(costs, deciding=costs.timed if step.trains else [mean_table(costs.timed)])
        rows, confidence = run.rows.eval, step.units.certify
        self.unseen: Dataset | None = None
        if confidence is not None:
            rows, self.unseen = split_rows(rows, self.task, step.max_drop, confidence, step.units.seed)
        self.searched, began = len(rows), time.perf_counter()
        if base.selected.plan.method is not None:
            fold_gates(self.model, run.model.groups, base.selected.plan)
        with self.model.on_accelerator(copies=3):
            self.scorer = Scorer(self.model, self.task, rows, step.units.seed, run.log)
            self.whole = self.scorer.score_whole()
        require_informed(self.whole, self.task.metric)
        # Not only the rows take time: the engine of an attempt is built as that of the whole model was.
        chosen = ["compressed: quantizing the graph", f"trying {base.selected.engine}"]
        building = [EXPORT_STAGE] if self._rounds_weights else chosen
        engine_seconds = sum(run.log.seconds.get(stage, 0.0) for stage in building) if self._rounds else 0.0
        self._forward_seconds = time.perf_counter() - began
        self._score_seconds = self._forward_seconds + engine_seconds

    @property
    def _rounds(self) -> bool:
        """Whether the engine rounds, so that attempts are scored by their engines."""
        engine = self.base.engine
        return engine is not None and (self._rounds_weights or engine.choice.config.definite_precision != "fp32")

    @property
    def _rounds_weights(self) -> bool:
        """Whether the engine with caches, which is scored then, has rounded weights."""
        return self.context.run.recipe.engine.weight_precision is not None

    @property
    def task(self) -> Task:
        """The task whose metric is bounded."""
        return self.context.run.rows.eval_task

    def plan(self) -> None:
        """Store what is attempted next, unless it is stored or nothing is worth its time."""
        attempts = _stored(self.store)
        if _unfinished(attempts) is not None:
            return
        if (attempt := self._next(attempts)) is not None:
            self._write((*attempts, attempt))

    def _next(self, attempts: Sequence[_Attempt]) -> _Attempt | None:
        """The attempt between the fastest that holds and the slowest above it that does not; None: there is none."""
        left, shortest = self.deadline - time.perf_counter(), self._pruning_seconds + self._score_seconds
        if not attempts:
            shortest += self._row_seconds * min(_FEWEST_ROWS, len(self.context.run.rows.train))
        is_late = left < (_SHORTEST if attempts else 1) * shortest
        if sum(not attempt.failure for attempt in attempts) >= self.step.attempts or is_late:
            return None
        holding = self._holding(attempts)
        failed = [attempt.speedup for number, attempt in enumerate(attempts) if number not in holding]
        whole, highest = speed_bounds(self.costs.deciding, [group.name for group in self.groups])
        is_short = self.step.trains and not self.trains
        bounds = (whole, min(highest, _MOST_UNTRAINED * whole) if is_short else highest)
        speeds = [self._speed(attempts[number]) for number in holding]
        if self.trains:
            close, ratio = _CLOSE_TRAINED, _LATER_RATIO if speeds else _FIRST_RATIO
        else:  # in little time the first attempt may be the only one
            close, ratio = _CLOSE, _ONLY_RATIO if is_short and not attempts else math.inf
        speed = next_speed(speeds, failed, bounds, close, ratio)
        if speed is None:
            return None
        start = holding[-1] if holding and self.trains else None
        return _Attempt(speedup=speed, start=start, rows=attempts[0].rows if attempts else self._affordable_rows(left))

    def _affordable_rows(self, left: float) -> int | None:
        """The number of rows by which units are chosen in a part of the time that is left; None: there is no limit."""
        if math.isinf(left):
            return None
        seconds = (_PRUNED_SHARE if self.trains else _PRUNED_SHARE_UNTRAINED) * left
        return max(_FEWEST_ROWS, int(seconds / self._row_seconds))

    @property
    def _row_seconds(self) -> float:
        """The time of choosing and refitting units by one row."""
        return _FORWARDS_OF_ROW * self._forward_seconds / self.searched

    def _speed(self, attempt: _Attempt) -> float:
        """How many times as fast as dense an attempt is."""
        # A plan that is not trained may be faster than it has to be, which bounds the next attempt.
        is_aimed_at = self.trains and not attempt.untrained
        return attempt.speedup if is_aimed_at else speed_of(self.costs.deciding, attempt.counts)

    def remove_units(self, number: int, start: State, context: StepContext, store: Store) -> State:
        """The state without the units of an attempt, which fails where no plan has its speed, or an earlier one did."""
        attempts, began, log = _stored(self.store), time.perf_counter(), context.run.log
        earlier = sum(log.seconds.get(stage, 0.0) for stage in RANKING_STAGES)
        options = {"speedup": attempts[number].speedup, "max_drop": None, "certify": None}
        if (rows := attempts[number].rows) is not None:
            options["prune_rows"] = min(rows, self.step.units.prune_rows)
        try:
            step = self.step.units.model_copy(update=options)
            state = units.remove_units(step, start, context, store, measured=self.costs)
        except BudgetError as error:
            self.update(number, failure=str(error), seconds=time.perf_counter() - began)
            return start
        counts, seconds = state.selected.plan.counts, time.perf_counter() - began
        if not self.trains and counts in [attempt.counts for attempt in attempts[:number]]:
            self.update(number, failure="an earlier attempt has the same plan", seconds=seconds)
        elif not self._holds_untrained(number, state.selected.plan, began):
            self.allot(number, seconds)
        self._pruning_seconds = seconds
        if not self.trains:  # the next attempt has the statistics of the same weights
            self._pruning_seconds -= sum(log.seconds.get(stage, 0.0) for stage in RANKING_STAGES) - earlier
        return state

    def _holds_untrained(self, number: int, plan: Plan, began: float) -> bool:
        """Whether an attempt, whose minutes are limited, holds as it is; its score is then stored.

        The model scores in a fraction of the time of its engine, which is built only where the model holds.
        """
        attempts = _stored(self.store)
        if self.step.minutes is None or not self.trains:
            return False

        def holds(score: ResampledScore, allowed: float) -> bool:
            scored = attempts[number].model_copy(update={"score": score})
            return self._holds([*attempts[:number], scored], number, allowed)

        label = f"attempt {number + 1} without training"
        score = self._model_score(label)
        if not holds(score, self._allowed_in_floats):
            return False
        if self._rounds:
            try:
                score = self._engine_score(label, plan)
            except (CompressorError, GraphPassError):
                return False  # raised again after the training
            if not holds(score, self._allowed):
                return False
        seconds = time.perf_counter() - began
        self.update(number, untrained=True, counts=plan.counts, score=score, seconds=seconds)
        return True

    def _holds(self, attempts: Sequence[_Attempt], number: int, allowed: float) -> bool:
        """Whether an attempt has a score whose loss is within what is allowed, with a margin."""
        loss = self._estimated(attempts, upper_losses).get(number)
        return loss is not None and is_within(loss, allowed)

    def allot(self, number: int, seconds: float) -> None:
        """Store how long the training of an attempt may take, whose units took some seconds.

        A training that is shorter than the choice of its units is wasted.
        """
        attempts = _stored(self.store)
        if self.step.minutes is None or not self.trains or attempts[number].minutes is not None:
            return
        left, rest = self.deadline - time.perf_counter() - self._score_seconds, seconds + self._score_seconds
        # There are as many attempts as leave each training some times as long as the rest of its attempt.
        shares = ((left - later * rest) / (later + 1) for later in range(self.step.attempts - len(attempts), 0, -1))
        if left >= seconds:
            least = _TRAINING_RATIO * rest
            self.update(number, minutes=next((share for share in shares if share >= least), left) / 60)
        else:
            self.update(number, failure="no time is left for its training", seconds=seconds)

    def score(self, number: int, plan: Plan, began: float) -> None:
        """Score the model, which has the weights of an attempt with a plan, and began at some time.

        Rounding costs a model of few units more than the whole one, so that an engine that rounds is what is scored.
        """
        label = f"attempt {number + 1}"
        try:
            score = self._engine_score(label, plan) if self._rounds else self._model_score(label)
        except (CompressorError, GraphPassError) as error:
            if not self._rounds:
                raise
            self.update(number, counts=plan.counts, failure=str(error), seconds=time.perf_counter() - began)
            return
        self.update(number, counts=plan.counts, score=score, seconds=time.perf_counter() - began)

    def _model_score(self, label: str) -> ResampledScore:
        """The score of the model as it is."""
        with self.model.on_accelerator(copies=3):
            return self.scorer.score(label)

    def _engine_score(self, label: str, plan: Plan) -> ResampledScore:
        """The score of the engine of a plan, whose weights the model has, built as it would be delivered.

        Attention under masks stays dense, which computes the same.

        Raises:
            CompressorError: it cannot be built.
            GraphPassError: its graph cannot be made.
        """
        context, began = self.context, time.perf_counter()
        with context.run.work.aside() as work:
            run = replace(context.run, work=work, log=context.run.log.separate())
            engine = self._rounded_engine(run, plan) if self._rounds_weights else self._chosen_engine(run, plan)
            score = self.scorer.score(label, GeneratingForward(engine.run, cache(engine.generator)))
        self._score_seconds = time.perf_counter() - began
        return score

    def _rounded_engine(self, run: RunContext, plan: Plan) -> Engine:
        """The engine with caches of a plan, with rounded weights."""
        cached = self.context.graphs.cached
        assert cached is not None, "a run that rounds weights has graphs with caches"
        return rounded_engine(run, plan, cached)

    def _chosen_engine(self, run: RunContext, plan: Plan) -> Engine:
        """The engine of a plan in the form that units are removed for."""
        base = self.base
        assert base.engine is not None
        assert base.scorer is not None
        choice = replace(base.engine.choice, in_float=())
        graph = run.compress_graph(self.context.graphs.reference, plan)
        trials = run.engine_trials(graph, base.scorer, run.work.scratch)
        trial = trials.build(choice, trials.quantize([choice]).get(choice.quantized_graph))
        if trial.variant is None:
            assert trial.error is not None
            raise trial.error
        return trial.variant.engine

    def result(self) -> SelectedPlan:
        """The plan of the fastest attempt that holds, with its weights; that before the first where none does."""
        attempts, base = _stored(self.store), self.base.selected
        holding = self._holding(attempts)
        notes, certificate = [self._note(attempts, holding)], base.certificate
        if not attempts:
            text = "no attempt fits into the time of the run, so no unit is removed; allow more minutes"
            notes = [Note(code=NoteCode.TIME_LIMITED, text=text)]
        elif self.step.trains and not self.trains:
            text = "no training fits into the time of the run, so nothing is trained; allow more minutes"
            notes.append(Note(code=NoteCode.TIME_LIMITED, text=text))
        if self.unseen is None:
            notes += self._unseen_notes(attempts, holding)
        else:
            certificate, holding = self._certify(attempts, holding, self.unseen)
        for number in holding:
            self.update(number, holds=True)
        if not holding:
            return replace(base, notes=(*base.notes, *notes), certificate=certificate)
        selected = self.state(holding[-1]).selected
        return replace(selected, notes=(*notes, *selected.notes), certificate=certificate)

    def _note(self, attempts: Sequence[_Attempt], holding: Sequence[int]) -> Note:
        """How fast the fastest attempt is that holds and what it is expected to lose, or which came closest."""
        losses, bounds = self._estimated(attempts, estimate_losses), self._estimated(attempts, upper_losses)
        task = self.task
        count = sum(not attempt.failure for attempt in attempts)
        points = " points" if task.metric_unit is MetricUnit.POINTS else ""

        def speed(number: int) -> str:
            return f"{speed_of(self.costs.deciding, attempts[number].counts):.3g} times as fast as the whole model"

        def expected(number: int) -> str:
            if self._shows_nothing(losses[number]):
                return f"no evaluation row shows a loss of {task.metric}"
            values = (losses[number].loss, losses[number].error, bounds[number])
            loss, error, bound = (f"{task.metric_unit.scale * value:.2g}" for value in values)
            return (
                f"expected loss of {task.metric}: {loss}{points}, standard error {error}, at most {bound} with a"
                " confidence of 95%"
            )

        kept = f"the {task.metric} within {self.step.max_drop:g} of the whole model's"
        if holding:
            text = f"the fastest of {count} attempts that keeps {kept} is {speed(holding[-1])} by the cost table"
            if attempts[holding[-1]].untrained:
                text += ", without training"
            return Note(code=NoteCode.BUDGET_MET, text=f"{text}; {expected(holding[-1])}")
        text, advice = f"no unit is removed: none of {count} attempts keeps {kept}", "allow more loss (--max-drop)"
        if losses:
            closest = min(bounds, key=bounds.__getitem__)
            loss, error = max(0.0, losses[closest].loss), losses[closest].error
            text += f"; the closest is {speed(closest)}: {expected(closest)}"
            if loss < self._allowed and math.isfinite(error):
                rows = self.searched * (MARGIN * error / (self._allowed - loss)) ** 2
                if rows > self.searched:
                    advice = f"about {rows:,.0f} evaluation rows would be needed to tell (--eval-data)"
        code = NoteCode.NOTHING_HOLDS if self.step.trains else NoteCode.NOTHING_REMOVED
        return Note(code=code, text=f"{text}; {advice}")

    def _unseen_notes(self, attempts: Sequence[_Attempt], holding: Sequence[int]) -> Iterator[Note]:
        """Why the loss of the fastest attempt that holds may exceed what is allowed although no row shows a loss."""
        losses, allowed = self._estimated(attempts, estimate_losses), self._allowed
        if not holding or not self._shows_nothing(losses[holding[-1]]) or not 0 < allowed < 1:
            return
        if unseen_share(self.searched) > allowed:
            text = (
                f"{self.searched} evaluation rows are too few to tell a loss of {allowed:g}: none shows one, and up to"
                f" {unseen_share(self.searched):.2%} of the answers to other rows may change (95% bound);"
                f" {rows_that_show(allowed):,} rows would tell (--eval-data)"
            )
            yield Note(code=NoteCode.LOSS_UNSEEN, text=text)

    def _shows_nothing(self, estimate: LossEstimate) -> bool:
        """Whether no evaluation row shows a loss of a metric that is a share of them."""
        return self.task.metric_unit is MetricUnit.POINTS and estimate.loss == 0 and estimate.error == 0

    def _certify(
        self, attempts: Sequence[_Attempt], holding: list[int], rows: Dataset
    ) -> tuple[CertifiedLoss, list[int]]:
        """The certificate of the loss on rows kept from the attempts, and the attempts that it covers."""
        run, model, confidence = self.context.run, self.model, self.step.units.certify
        assert confidence is not None

        def losses(number: int | None) -> np.ndarray:
            if number is None:
                model.load_state(self.scorer.whole_state)
            else:
                self.state(number)
            predicted, labels = metric_sums(model.forward(), self.task, rows, "a plan for the certificate", run.log).T
            return (predicted != labels).astype(np.float64)

        before = model.copy_state()
        with model.on_accelerator():
            certificate = certify([None, *holding], losses, self.step.max_drop, confidence, self.searched)
        model.load_state(before)
        earlier = record_certificate(run.rows.eval, {"run": self.store.inputs.get("step", "")})
        scope = CertificateScope(rows=run.rows.eval_hash or "", seed=self.step.units.seed, earlier=earlier)
        whole = sum(group.counts[-1] for group in self.groups)
        kept = [whole, *(sum(attempts[number].counts[group.name] for group in self.groups) for number in holding)]
        types = " and ".join(sorted({group.type for group in self.groups}))
        run.log.add_notes([certificate.note(kept, scope, types)])
        return certificate.result(kept, scope, types), holding[: certificate.certified - 1]

    def _holding(self, attempts: Sequence[_Attempt]) -> list[int]:
        """Numbers of the attempts that hold, with a margin for the choice of the rows, the fastest last."""
        holding = [number for number in range(len(attempts)) if self._holds(attempts, number, self._allowed)]
        return sorted(holding, key=lambda number: self._speed(attempts[number]))

    def _estimated(self, attempts: Sequence[_Attempt], estimate: Callable[..., list[T]]) -> dict[int, T]:
        """Number of each attempt that has a score -> what is estimated of it."""
        scores = {number: attempt.score for number, attempt in enumerate(attempts) if attempt.score is not None}
        higher = self.task.higher_is_better
        return dict(zip(scores, estimate(self.whole, list(scores.values()), higher_is_better=higher), strict=True))

    @property
    def _allowed(self) -> float:
        """What an attempt may lose by its score, which is that of its engine where that rounds."""
        return self.step.max_drop if self._rounds else self._allowed_in_floats

    @property
    def _allowed_in_floats(self) -> float:
        """What a model in floats may lose, beside what its engine costs."""
        lost = 0.0 if self.base.engine is None else self.base.engine.lost(self.task)
        return self.step.max_drop - max(0.0, lost)

    def update(self, number: int, **fields: Any) -> None:
        """Store what is known of an attempt."""
        attempts = list(_stored(self.store))
        attempts[number] = attempts[number].model_copy(update=fields)
        self._write(attempts)

    def _write(self, attempts: Sequence[_Attempt]) -> None:
        write_json(self.store.path / ATTEMPTS, _ATTEMPTS.dump_python(tuple(attempts), mode="json"))


FUNCTIONS = StepFunctions(_run, _check_options, _check, _rehearse)
