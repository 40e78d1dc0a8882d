"""Checks of the budgets against the other fields of a recipe, one function for each rule."""

from __future__ import annotations

from compressor.config.fields import FieldConflictError
from compressor.config.methods import BUDGET_METHODS
from compressor.config.recipe_fields import BUDGETS
from compressor.config.recipe_sections import RecipeSections
from compressor.errors import ErrorCode


def check_budget(recipe: RecipeSections) -> None:
    """Apply the rules of budgets, in order, to a recipe that sets a budget or names a method for budgets.

    Raises:
        FieldConflictError: a rule is violated.
    """
    if _set_budgets(recipe) or _prunes_alone(recipe):
        for rule in _RULES:
            rule(recipe)


def _set_budgets(recipe: RecipeSections) -> list[str]:
    """Names of the budgets that are set."""
    return [name for name in BUDGETS if getattr(recipe.budget, name) is not None]


def _prunes_alone(recipe: RecipeSections) -> bool:
    """Whether the method itself removes units until the budgets are met."""
    return recipe.selection.method in BUDGET_METHODS


def _field_to_name(recipe: RecipeSections) -> str:
    """The field that messages name: the first budget, or the loss allowed or the method where there is none."""
    return next(iter(_set_budgets(recipe)), "method" if recipe.selection.max_drop is None else "max_drop")


def _follows_no_plan(recipe: RecipeSections) -> None:
    plan, budgets = recipe.plan_file, _set_budgets(recipe)
    if plan is not None and budgets:
        if recipe.selection.plan is None:
            remedy = (
                f"to remove more units, name the whole model, and start from this folder (<start_from> {plan.parent})"
            )
        else:
            remedy = "omit one of them, or remove more units than its run did (<start_from>, its output folder)"
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<{budgets[0]}>: the plan {plan} already says what is kept; {remedy}",
            *(budgets[0], "plan"),
        )


def _has_rows(recipe: RecipeSections) -> None:
    if recipe.rows.data is None and recipe.plan_file is None:
        field = _field_to_name(recipe)
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"<{field}>: there are no rows to choose units by; add training rows (<data>), whose labels are not needed",
            *(field, "data"),
        )


def _starts_from_a_run_of_its_method(recipe: RecipeSections) -> None:
    start_from, method = recipe.budget.start_from, recipe.selection.method
    if start_from is not None and not _prunes_alone(recipe):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<start_from> {start_from}: {method} selects heads of the whole model; omit one"
            f" of them, or choose one of {', '.join(BUDGET_METHODS)} (<method>)",
            *("start_from", "method"),
        )


def _drops_no_blocks(recipe: RecipeSections) -> None:
    if recipe.blocks.drops_any:
        field = _field_to_name(recipe)
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<{field}>: blocks are dropped by training, after which units would have to be refitted again; omit one of"
            " them",
            *(field, "drop_blocks"),
        )


_RULES = (
    _follows_no_plan,
    _has_rows,
    _starts_from_a_run_of_its_method,
    _drops_no_blocks,
)
