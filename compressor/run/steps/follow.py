"""Follow a plan: the model gets the weights beside it, where its run fitted some."""

from __future__ import annotations

from compressor.config.steps import Follow
from compressor.run.plan_source import load_weights
from compressor.run.steps.base import State, StepContext, StepFunctions
from compressor.store import Store, versioned


@versioned(1)
def _run(step: Follow, state: State, context: StepContext, store: Store) -> State:
    """The plan of the file, which was read when the run was loaded."""
    run = context.run
    assert run.followed is not None
    return State(load_weights(run.recipe, run.model, run.followed))


FUNCTIONS = StepFunctions(_run)
