"""Train what is left of the model on the outputs of a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compressor.config.steps import Distill, Step
from compressor.run.distillation.distill import check_distillation, distill
from compressor.run.plan_source import PlanFiles
from compressor.run.run_context import RunInputs, SelectedPlan
from compressor.run.steps.base import PLAN, State, StepContext, StepFunctions, with_plan
from compressor.store import Store, versioned


def _check(step: Distill, inputs: RunInputs, earlier: Sequence[Step]) -> None:
    check_distillation(step, inputs)


@versioned(1, "compressor.run.distillation", "compressor.training")
def _run(step: Distill, state: State, context: StepContext, store: Store) -> State:
    """The plan, whose units the model has with trained weights."""
    run = context.run

    def train(work: Path) -> SelectedPlan:
        with run.log.stage("training on the outputs of the whole model") as on_progress:
            return distill(step, run, state.selected, store.within(work), on_progress)

    return with_plan(state, store.memo(PLAN, {}, train, PlanFiles(run.model.folder.model)))


FUNCTIONS = StepFunctions(_run, check=_check)
