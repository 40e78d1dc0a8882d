"""Walk the list of steps of a run, in the main process and in the workers of a distributed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from accelerate import PartialState

from compressor.config.run import Recipe
from compressor.config.steps import Step
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.progress import NullListener, RunLog
from compressor.run.load_context import load_context, next_rung
from compressor.run.plan_source import whole_plan
from compressor.run.run_context import RunContext
from compressor.run.step_stores import open_stores, step_store
from compressor.run.steps.base import Graphs, State, StepContext, stored_state
from compressor.run.steps.registry import functions_of
from compressor.store import Store
from compressor.training.processes import by_main
from compressor.workdir import WorkDir


def walk(run: RunContext, whole: Graphs | None = None) -> State:
    """Carry out the steps of a run, one after the other; the model has the weights of the last state afterwards.

    Every process of a distributed run walks the same list. A step that does not run in parallel is carried out by the
    main process, and the workers read its result from the store.

    Args:
        run: the settings, the steps, the model, the rows and the log.
        whole: the graph of the whole model; None in worker processes.

    Raises:
        CompressorError: a step cannot be carried out; no step has changed anything if it could be foreseen.
    """
    context = StepContext(run, whole)
    learning = [step for step in run.steps if step.follows is None]
    by_main(run.state, lambda: _rehearse(context))
    stores = tuple(step_store(step, run.work.learning / step.name) for step in run.steps)
    if learning:  # a plan that is followed alone needs no rows, and leaves nothing to resume
        stores, notes = open_stores(run.steps, run.recipe, run.model, run.rows, run.work.learning, run.state)
        run.log.add_notes(notes)
    network = run.model.folder.model
    original = weight_fingerprints(network)
    state = State(whole_plan(run.model))
    for step, store in zip(run.steps, stores, strict=True):
        state = _carry_out(step, replace(state, rungs=None), context, store)

    def recorded(state: State) -> State:
        """The state with a record of the weights of the model, if they were trained."""
        selected = state.selected
        if not (selected.trained and learning):
            return state
        return replace(state, selected=replace(selected, plan=record_weights(selected.plan, original, network)))

    state = recorded(state)
    if (rungs := state.rungs) is not None:
        milder = {name: partial(lambda load: recorded(load()), load) for name, load in rungs.milder.items()}
        state = replace(state, rungs=replace(rungs, milder=milder))
    return state


def _carry_out(step: Step, state: State, context: StepContext, store: Store) -> State:
    """The state after a step, which every process has."""
    run, results = context.run, list[State]()

    def carry_out() -> None:
        results.append(functions_of(step).run(step, state, context, store))

    if step.is_parallel:
        carry_out()
        run.state.wait_for_everyone()
    else:
        by_main(run.state, carry_out)
    return results[0] if results else stored_state(store, run.model.folder.model)


def _rehearse(context: StepContext) -> None:
    """Raise for what the graph of the whole model rules out."""
    steps = context.run.steps
    for number, step in enumerate(steps):
        functions_of(step).rehearse(step, context, steps[:number])


def run_worker(rungs: Sequence[Recipe], state: PartialState) -> None:
    """Take part in a run as a worker process; the main process exports, builds, proves and measures."""
    log, (first, *later) = RunLog(NullListener()), rungs
    whole = load_context(first, WorkDir(first.output.out.absolute()), log, state, later)
    walk(whole)
    for recipe in later:
        walk(next_rung(whole, recipe, WorkDir(recipe.output.out.absolute()), log))
