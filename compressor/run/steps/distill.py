"""Train what is left of the model on the outputs of a whole one."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.config.steps import Distill, Step
from compressor.run.distillation.distill import check_distillation, distill
from compressor.run.run_context import RunInputs
from compressor.run.step_store import StepStore
from compressor.run.steps.base import State, StepContext, StepFunctions, with_plan


def _check(step: Distill, inputs: RunInputs, earlier: Sequence[Step]) -> None:
    check_distillation(step, inputs)


def _run(step: Distill, state: State, context: StepContext, store: StepStore) -> State:
    """The plan, whose units the model has with trained weights."""
    run = context.run
    selected = store.load_finished_plan(run.model.folder.model)
    if selected is None:
        with run.log.stage("training on the outputs of the whole model") as on_progress:
            selected = distill(step, run, state.selected, store, on_progress)
    return with_plan(state, selected)


FUNCTIONS = StepFunctions(_run, check=_check)
