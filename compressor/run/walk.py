"""Walk the list of steps of a run, in the main process and in the workers of a distributed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from accelerate import PartialState

from compressor.config.run import Recipe
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.progress import NullListener, RunLog
from compressor.run.load_context import load_context, next_rung
from compressor.run.plan_source import whole_plan
from compressor.run.run_context import RunContext
from compressor.run.step_stores import open_stores, step_store
from compressor.run.steps.base import Graphs, State, StepContext, stored_state
from compressor.run.steps.registry import functions_of
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
    if whole is not None:
        for number, step in enumerate(run.steps):
            functions_of(step).rehearse(step, context, run.steps[:number])
    stores = tuple(step_store(step, run.work.learning / step.name) for step in run.steps)
    if learning:  # a plan that is followed alone needs no rows, and leaves nothing to resume
        stores, notes = open_stores(run.steps, run.recipe, run.model, run.rows, run.work.learning, run.state)
        run.log.add_notes(notes)
    network = run.model.folder.model
    original = weight_fingerprints(network)
    state = State(whole_plan(run.model))
    for step, store in zip(run.steps, stores, strict=True):
        takes_part = step.is_parallel or run.state.is_main_process
        if takes_part:
            state = functions_of(step).run(step, replace(state, rungs=None), context, store)
        run.state.wait_for_everyone()
        if not takes_part:
            state = stored_state(store, network)

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


def run_worker(rungs: Sequence[Recipe], state: PartialState) -> None:
    """Take part in a run as a worker process; the main process exports, builds, proves and measures."""
    log, (first, *later) = RunLog(NullListener()), rungs
    whole = load_context(first, WorkDir(first.output.out.absolute()), log, state, later)
    walk(whole)
    for recipe in later:
        walk(next_rung(whole, recipe, WorkDir(recipe.output.out.absolute()), log))
