"""Checks of the fields of a distillation against the other fields of a recipe, one function for each rule."""

from __future__ import annotations

from compressor.config.fields import FieldConflictError
from compressor.config.recipe_sections import RecipeSections
from compressor.config.sections import DistillationConfig
from compressor.errors import ErrorCode


def check_distillation(recipe: RecipeSections) -> None:
    """Apply the rules of a distillation, in order.

    Raises:
        FieldConflictError: a rule is violated.
    """
    for rule in _RULES:
        rule(recipe)


def _has_training_rows(recipe: RecipeSections) -> None:
    if recipe.distillation.distill and recipe.rows.data is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            "<distill>: there are no rows to train on; add training rows (<data>), whose labels are not needed",
            *("distill", "data"),
        )


def _removes_something(recipe: RecipeSections) -> None:
    taught = recipe.distillation.teacher is not None
    if recipe.distillation.distill and not (recipe.learns or taught) and recipe.plan_file is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            "<distill>: nothing is removed from the model, so there is nothing to distill; set a budget"
            " (<speedup>), the number of heads (<keep>), a plan (<plan>), or a teacher (<teacher>)",
            *("distill", "speedup"),
        )


def _sets_no_unused_field(recipe: RecipeSections) -> None:
    # The recipe in a report has every field; those that have their default decide nothing.
    unused = [
        name
        for name, field in DistillationConfig.model_fields.items()
        if name in recipe.fields_set - {"distill"} and getattr(recipe.distillation, name) != field.default
    ]
    if unused and not recipe.distillation.distill:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<{unused[0]}>: nothing is distilled; add <distill>, or omit <{unused[0]}>",
            *(unused[0], "distill"),
        )


_RULES = (
    _has_training_rows,
    _removes_something,
    _sets_no_unused_field,
)
