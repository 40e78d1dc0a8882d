"""Checks of the fields of a distillation against the other fields of a recipe, one function for each rule."""

from __future__ import annotations

from compressor.config.fields import FieldConflictError
from compressor.config.recipe_sections import RecipeSections
from compressor.config.sections import AUTO, DistillationConfig
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


def _certifies_no_trained_model(recipe: RecipeSections) -> None:
    if recipe.distillation.distill and recipe.selection.certify is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<certify> {recipe.selection.certify:g}, <distill>: the loss before the training is certified, not that"
            " of the trained model; omit one of them",
            *("certify", "distill"),
        )


def _matches_documents_of_the_whole_model(recipe: RecipeSections) -> None:
    teacher = recipe.distillation.teacher
    if recipe.budget.match_dense and teacher is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<match_dense>, <teacher> {teacher}: documents are those of the whole model, not of another"
            " teacher; omit one of them",
            *("match_dense", "teacher"),
        )


def _matches_documents_in_pruning_or_training(recipe: RecipeSections) -> None:
    if recipe.budget.match_dense and not (recipe.prunes or recipe.distills):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            "<match_dense>: no unit is chosen and nothing is trained by it; set a budget (<macs>), or omit it",
            *("match_dense", "macs"),
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


def _rounds_for_an_engine_that_rounds(recipe: RecipeSections) -> None:
    if recipe.distillation.quantized_share and recipe.engine.precision not in ("int8", "bf16", AUTO):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<quantized_share>: weights are not trained for the rounding of {recipe.engine.precision}; set <precision>"
            " int8, bf16 or auto, or omit it",
            *("quantized_share", "precision"),
        )


_RULES = (
    _has_training_rows,
    _removes_something,
    _certifies_no_trained_model,
    _matches_documents_of_the_whole_model,
    _matches_documents_in_pruning_or_training,
    _sets_no_unused_field,
    _rounds_for_an_engine_that_rounds,
)
