"""The groups of a model whose units a budget may remove."""

from __future__ import annotations

from typing import Literal

from compressor.config.run import Recipe
from compressor.errors import ErrorCode, SiteRefusedError
from compressor.results import Note, NoteCode
from compressor.run.pruning.budget_run import BudgetRun
from compressor.units import PrunableGroup


def prunable_types(recipe: Recipe, *, selects_heads: bool) -> Literal["all", "heads", "neurons"]:
    """The type of the units that a budget may remove, or `all`.

    Args:
        recipe: the recipe.
        selects_heads: whether another method selects the heads before.
    """
    if selects_heads:
        return "neurons"
    only_heads = recipe.selection.method == recipe.pruner and recipe.selection.keep is not None
    return "heads" if only_heads else recipe.budget.prune_units


def prunable_groups(run: BudgetRun) -> list[PrunableGroup]:
    """The groups whose units may be removed.

    Raises:
        SiteRefusedError: one cannot be removed from the graph, and the recipe does not allow to skip it; or the tensors
            of the model have positions before rows.
    """
    if any(site.batch_axis for site in run.model.sites):
        raise SiteRefusedError(
            f"{run.model.folder.family}: its tensors have positions before rows, so what its linears read cannot be"
            " assigned to rows, which a budget needs; choose a number of heads (--keep)",
            code=ErrorCode.SITE_REFUSED,
            family=run.model.folder.family,
        )
    units = prunable_types(run.recipe, selects_heads=run.selected is not None)
    groups = [group for group in run.model.groups if units in ("all", group.type)]
    reasons = {name: str(refusal) for refusal in run.refused for name in refusal.sites}
    if not run.recipe.learns_units:  # a gate multiplies the heads themselves
        reasons |= {group.name: "its output projection was not recognized" for group in groups if group.linear is None}
    skipped = [group for group in groups if group.name in reasons]
    if skipped and not run.recipe.budget.skip_refused:
        first = skipped[0]
        raise SiteRefusedError(
            f"{first.name}: {reasons[first.name]}; keep such groups whole with --skip-refused, or try --attention sdpa"
            " or --opset 23",
            code=ErrorCode.SITE_REFUSED,
            refused=tuple(group.name for group in skipped),
        )
    if skipped:
        text = f"{', '.join(group.name for group in skipped)}: kept whole, because {reasons[skipped[0].name]}"
        run.log.add_notes([Note(code=NoteCode.GROUPS_SKIPPED, text=text)])
    remaining = [group for group in groups if group not in skipped]
    if not remaining:
        raise SiteRefusedError(
            f"{run.model.folder.family}: it has no {'units' if units == 'all' else units} that can be removed; choose"
            " others (--prune-units)",
            code=ErrorCode.SITE_REFUSED,
        )
    return remaining
