"""Select the heads to keep, by a gate or a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compressor.config.steps import Heads, Step
from compressor.errors import ErrorCode, UsageError
from compressor.processes import process_count, refuse_processes
from compressor.run.plan_source import PlanFiles
from compressor.run.run_context import RunInputs
from compressor.run.steps.base import PLAN, State, StepContext, StepFunctions, signed
from compressor.selection.checks import (
    check_certificate,
    check_max_drop,
    check_options,
    check_task_options,
    known_options,
)
from compressor.selection.learn import learn
from compressor.selection.options import heads_to_keep, pool_of
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Store, versioned


def _check_options(step: Heads) -> None:
    if step.searches and process_count() > 1:
        refuse_processes(
            UsageError(
                f"{step.method} does not train; run it without accelerate launch, or distribute it with --ray",
                code=ErrorCode.CONTRADICTION,
                field="method",
            )
        )
    check_options(step)


def _check(step: Heads, inputs: RunInputs, earlier: Sequence[Step]) -> None:
    data = inputs.rows
    if step.keep is not None:
        heads_to_keep(step.keep, sum(site.heads for site in pool_of(inputs.model.sites, step.options)))
    if step.max_drop is not None:
        check_max_drop(step.max_drop, data.eval_task.chooser)
        check_certificate(step, data)
    check_task_options(step, data.task.name)


@versioned(
    1,
    *("compressor.selection.gates", "compressor.selection.train_gate", "compressor.training.fit"),
    *("compressor.selection.search", "compressor.selection.learn"),
)
def _run(step: Heads, state: State, context: StepContext, store: Store) -> State:
    """The heads that the method keeps. A joint method trains the model, which then has the trained weights."""
    run, folder = context.run, context.run.model.folder

    def select(work: Path) -> SelectedPlan:
        known = step.model_copy(update={"options": known_options(step)})
        with run.log.stage(f"learning which heads to keep ({step.method})") as on_progress:
            learned = learn(folder.network, run.model.sites, run.rows, known, work / "checkpoints", on_progress)
        return signed(learned, folder)

    return replace(state, selected=store.memo(PLAN, {}, select, PlanFiles(folder.access)))


FUNCTIONS = StepFunctions(_run, _check_options, _check)
