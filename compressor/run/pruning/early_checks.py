"""Checks of a budget that is met after another step has learned, before it does: it may learn for hours."""

from __future__ import annotations

from compressor.run.pruning.budget import require_reachable
from compressor.run.pruning.budget_run import BudgetRun
from compressor.run.pruning.constraints import constraints_of
from compressor.run.pruning.prunable_groups import prunable_groups
from compressor.run.pruning.prune import pruner_of


def check_reachable(run: BudgetRun) -> None:
    """Check what is known of a budget without measuring times, and without the plan of an earlier step.

    Args:
        run: the run, whose cost tables are counted in the graph of the whole model.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        InputError: the rows have fewer tokens than a linear has inputs.
        BudgetError: a budget of multiply-accumulates or parameters is below the cost of a plan without any unit.
    """
    groups, _ = prunable_groups(run.step, run.model, run.refused)
    pruner_of(run, groups)
    step = run.step
    if step.macs is not None or step.parameters is not None:
        counted = constraints_of(step, run.costs.count_tables(), heads=0)
        heads = [group for group in run.model.groups if group.type == "heads"]
        require_reachable([*groups, *heads], counted)
