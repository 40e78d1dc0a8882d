"""Checks of fields of a recipe against each other."""

from __future__ import annotations

from compressor.config.budget_checks import check_budget
from compressor.config.distillation_checks import check_distillation
from compressor.config.fields import FieldConflictError
from compressor.config.methods import BUDGET_METHODS, SEARCH_METHODS
from compressor.config.recipe_sections import RecipeSections
from compressor.errors import ErrorCode
from compressor.targets import DEFAULT_TARGET, target


def check_settings(recipe: RecipeSections) -> None:
    """Raise FieldConflictError for settings of the run that contradict each other, whatever its steps are."""
    _check_engine(recipe)
    max_drop = recipe.selection.max_drop
    if max_drop is not None and not recipe.rows.available:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"<max_drop> {max_drop:g}: there are no rows to score; add rows (<data>)",
            *("max_drop", "data"),
        )


def check_agreement(recipe: RecipeSections) -> None:
    """Raise FieldConflictError for flags of steps that contradict each other, or of which one is missing."""
    _check_rows(recipe)
    _check_blocks(recipe)
    check_distillation(recipe)
    _check_grouping(recipe)
    check_budget(recipe)
    _check_prune_units(recipe)
    _check_selection(recipe)


def _check_rows(recipe: RecipeSections) -> None:
    keep = recipe.selection.keep
    if recipe.rows.data is None and keep is not None and recipe.plan_file is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"<keep> {keep}: there are no rows to learn from; add training rows (<data>) or a plan (<plan>)",
            *("keep", "data"),
        )


def _check_engine(recipe: RecipeSections) -> None:
    engine = recipe.engine
    runtime = target(engine.reference.target)
    if engine.provider is not None and engine.provider not in runtime.providers:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<provider> {engine.provider}: {runtime.title} runs on {' or '.join(runtime.providers)} only; omit it,"
            f" or choose {DEFAULT_TARGET} (<target>)",
            *("provider", "target"),
        )
    if engine.kernel is not None and ("kernel" not in runtime.options or engine.provider == "cuda"):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<kernel> {engine.kernel}: only ONNX Runtime on the CPU uses it; omit it",
            *("kernel", "target"),
        )


def _check_blocks(recipe: RecipeSections) -> None:
    blocks = recipe.blocks
    if blocks.drops_any and recipe.rows.data is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            "<drop_blocks>: there are no rows to compute attention maps from; add training rows (<data>)",
            *("drop_blocks", "data"),
        )
    if blocks.drops_any and recipe.plan_file is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<drop_blocks>: the plan {recipe.plan_file} already says what is kept; omit one of them",
            *("drop_blocks", "plan"),
        )
    if recipe.start_plan_file is not None and recipe.selects_heads:
        field = "method" if recipe.selection.keep is None else "keep"
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<drop_blocks>, <{field}>: the heads are those of the plan {recipe.start_plan_file}; omit <{field}>",
            *(field, "drop_blocks"),
        )


def _check_grouping(recipe: RecipeSections) -> None:
    budget = recipe.budget
    if budget.group_by == "kv" or recipe.rows.data is None or recipe.plan_file is not None:
        return
    if recipe.selection.method not in BUDGET_METHODS:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<group_by> {budget.group_by}: {recipe.selection.method} drops heads one by one, in any group; omit it,"
            f" or choose one of {', '.join(BUDGET_METHODS)} (<method>)",
            *("group_by", "method"),
        )


def _check_prune_units(recipe: RecipeSections) -> None:
    method = recipe.selection.method
    if recipe.prunes_after_heads and recipe.budget.prune_units == "heads":
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<prune_units> heads: {method} selects the heads, and the budget then removes neurons only; omit it, or"
            f" choose one of {', '.join(BUDGET_METHODS)} (<method>)",
            *("prune_units", "method"),
        )


def _check_selection(recipe: RecipeSections) -> None:
    selection = recipe.selection
    learns = recipe.plan_file is None and recipe.selects_heads and not recipe.learns_units
    says_how = {"method", "plan"} & selection.model_fields_set or recipe.blocks.model_fields_set
    if learns and selection.keep is None and not says_how:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            "nothing says how much to remove; set a budget (<speedup>, <latency>, <macs>, <parameters>), the loss"
            " allowed (<max_drop>), or the number of heads (<keep>)",
            *("keep", "speedup"),
        )
    if selection.ray is not None and not selection.searches:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<ray> {selection.ray}: it distributes a search; choose one of {', '.join(SEARCH_METHODS)} (<method>)",
            *("ray", "method"),
        )
