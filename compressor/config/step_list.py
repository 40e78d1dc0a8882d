"""The list of steps that the flags of a recipe stand for.

This module and the checks of `Recipe` are the only ones that know which flags go together; everything behind them
walks the list.
"""

from __future__ import annotations

from typing import Any

from compressor.config.methods import BUDGET_METHODS, DEFAULT_BUDGET_METHOD
from compressor.config.recipe_sections import RecipeSections
from compressor.config.sections import BlocksConfig
from compressor.config.steps import Blocks, Distill, Follow, Heads, Step, Units

_LEARNING = ("batch_size", "seed")
_TRAINING = (*_LEARNING, "options", "epochs", "learning_rate")
_BUDGET = (
    *("speedup", "latency", "macs", "parameters", "budget_at", "group_by", "prune_rows", "statistics", "start_from"),
    "skip_refused",
)


def steps_of(recipe: RecipeSections) -> tuple[Step, ...]:
    """The steps of a recipe, in order: those that it writes out, or those of its flags; empty if nothing is learned.

    A plan is followed in place of learning one. Blocks are dropped from the heads that are selected, or from those of
    the plan in the model folder. A budget removes units last, and whatever is left is distilled.
    """
    if recipe.steps is not None:
        return recipe.steps
    followed = recipe.plan_file or recipe.start_plan_file
    steps: list[Step] = [] if followed is None else [Follow(plan=followed)]
    if recipe.plan_file is None and recipe.rows.data is not None:
        if recipe.selects_heads and not recipe.learns_units:
            steps.append(heads_of(recipe))
        if recipe.blocks.drops_any:
            steps.append(blocks_of(recipe))
        if recipe.prunes:
            steps.append(units_of(recipe))
    if recipe.distills:
        steps.append(distill_of(recipe))
    return tuple(steps)


def heads_of(recipe: RecipeSections) -> Heads:
    """The step that selects heads by the flags of a recipe."""
    selection = recipe.selection
    return Heads(
        method=selection.method,
        keep=selection.keep,
        max_drop=selection.max_drop,
        certify=selection.certify,
        ray=selection.ray,
        **_training(recipe),
    )


def blocks_of(recipe: RecipeSections) -> Blocks:
    """The step that drops blocks by the flags of a recipe."""
    blocks = recipe.blocks
    renamed = ("drop_blocks", "drop_blocks_by_kind")
    fields = {name: getattr(blocks, name) for name in BlocksConfig.model_fields if name not in renamed}
    return Blocks(
        share=blocks.drop_blocks or 0.0, share_by_kind=blocks.drop_blocks_by_kind, **fields, **_training(recipe)
    )


def units_of(recipe: RecipeSections) -> Units:
    """The step that meets the budget of a recipe's flags.

    Where a method selects the heads, or all of them stay, it removes neurons alone.
    """
    selection, budget = recipe.selection, recipe.budget
    follows_heads = recipe.selects_heads and not recipe.learns_units
    prunes_alone = selection.method in BUDGET_METHODS
    keep = selection.keep if prunes_alone else None
    keeps_heads = selection.keep == "100%" and not prunes_alone
    types = "neurons" if follows_heads or keeps_heads else "heads" if keep is not None else budget.prune_units
    method = selection.method if prunes_alone or recipe.learns_units else DEFAULT_BUDGET_METHOD
    training = _training(recipe)
    if method != selection.method:
        training["options"] = {}
    return Units(
        method=method,
        keep=keep,
        prune_units=types,
        max_drop=selection.max_drop,
        certify=selection.certify if prunes_alone else None,
        **{name: getattr(budget, name) for name in _BUDGET},
        **training,
    )


def distill_of(recipe: RecipeSections) -> Distill:
    """The step that distills by the flags of a recipe."""
    fields = recipe.distillation.model_dump(exclude={"distill", "distill_steps", "distill_learning_rate"})
    return Distill(
        training_steps=recipe.distillation.distill_steps,
        learning_rate=recipe.distillation.distill_learning_rate,
        **fields,
        **{name: getattr(recipe.selection, name) for name in _LEARNING},
    )


def _training(recipe: RecipeSections) -> dict[str, Any]:
    """The options of training, which all steps that train share."""
    selection = recipe.selection
    return {"training_steps": selection.training_steps, **{name: getattr(selection, name) for name in _TRAINING}}
