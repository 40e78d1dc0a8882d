"""Checks of a budget that is met after heads are learned, before they are: these may take hours."""

from __future__ import annotations

from compressor.run.pruning.budget import require_reachable
from compressor.run.pruning.budget_run import BudgetRun
from compressor.run.pruning.constraints import constraints_of
from compressor.run.pruning.prunable_groups import prunable_groups
from compressor.run.pruning.prune import pruner_of


def check_before_heads(run: BudgetRun) -> None:
    """Check what is known of a budget without measuring times, and without the heads that another method selects.

    Args:
        run: the run, whose cost tables are counted in the graph of the whole model.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        InputError: the rows have fewer tokens than a linear has inputs.
        BudgetError: a budget of multiply-accumulates or parameters is below the cost of a plan without any unit.
    """
    groups, _ = prunable_groups(run.recipe, run.model, run.refused)
    pruner_of(run, groups)
    budget = run.recipe.budget
    if budget.macs is not None or budget.parameters is not None:
        counted = constraints_of(run.recipe, run.costs.count_tables(), heads=0)
        heads = [group for group in run.model.groups if group.type == "heads"]
        require_reachable([*groups, *heads], counted)
