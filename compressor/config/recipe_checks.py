"""Checks of fields of a recipe against each other."""

from __future__ import annotations

from compressor.config.budget_checks import check_budget
from compressor.config.distillation_checks import check_distillation
from compressor.config.fields import FieldConflictError
from compressor.config.methods import BUDGET_METHODS, SEARCH_METHODS
from compressor.config.recipe_fields import BUDGETS
from compressor.config.recipe_sections import RecipeSections
from compressor.errors import ErrorCode
from compressor.targets import DEFAULT_TARGET, target


def check_agreement(recipe: RecipeSections) -> None:
    """Raise FieldConflictError if two fields contradict each other, or one that others need is missing."""
    _check_rows(recipe)
    _check_engine(recipe)
    _check_blocks(recipe)
    check_distillation(recipe)
    _check_grouping(recipe)
    check_budget(recipe)
    _check_prune_units(recipe)
    _check_selection(recipe)
    _check_certificate(recipe)
    _check_unlabelled_rows(recipe)


def _check_rows(recipe: RecipeSections) -> None:
    keep, max_drop = recipe.selection.keep, recipe.selection.max_drop
    if recipe.rows.data is None and keep is not None and recipe.plan_file is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"<keep> {keep}: there are no rows to learn from; add training rows (<data>) or a plan (<plan>)",
            *("keep", "data"),
        )
    if max_drop is not None and not recipe.rows.available:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"<max_drop> {max_drop:g}: there are no rows to score; add rows (<data>)",
            *("max_drop", "data"),
        )


def _check_unlabelled_rows(recipe: RecipeSections) -> None:
    source = recipe.rows.unlabelled_data
    if source is None:
        return
    if recipe.rows.data is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"<unlabelled_data> {source}: there are no training rows to add these rows to; name them as training rows"
            " (<data>)",
            *("unlabelled_data", "data"),
        )
    if recipe.reads_no_labels:
        return
    if recipe.plan_file is None and (recipe.blocks.drops_any or recipe.selects_heads):
        by_number = recipe.selection.keep is not None and "method" not in recipe.fields_set
        field = "drop_blocks" if recipe.blocks.drops_any else "keep" if by_number else "method"
        learner = "blocks are dropped by training" if recipe.blocks.drops_any else f"{recipe.selection.method} learns"
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<unlabelled_data> {source}, <{field}>: {learner} from labels, and these rows have none; omit one of them",
            *("unlabelled_data", field),
        )
    raise FieldConflictError(
        ErrorCode.CONTRADICTION,
        f"<unlabelled_data> {source}: no unit is removed from the model and nothing is trained by these rows; set a"
        " budget (<speedup>) or <distill>, or omit it",
        *("unlabelled_data", "distill"),
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
    if blocks.maps is not None and blocks.entmax:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<maps> {blocks.maps}, <entmax>: maps of an earlier run cannot be computed with entmax; omit one",
            *("maps", "entmax"),
        )
    ranking = [name for name in ("weight_by_count", "entmax") if getattr(blocks, name)]
    if blocks.random_blocks and ranking:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<random_blocks>, <{ranking[0]}>: random blocks are not ranked; omit one of them",
            *("random_blocks", ranking[0]),
        )
    if recipe.selection.certify is not None and blocks.drops_any:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<certify> {recipe.selection.certify:g}: it covers heads that are removed, not blocks; omit one of them",
            *("certify", "drop_blocks"),
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
    if budget.prune_units == "neurons":
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<group_by> {budget.group_by}, <prune_units> neurons: no head is removed; omit one of them",
            *("group_by", "prune_units"),
        )


def _check_prune_units(recipe: RecipeSections) -> None:
    method, keep, units = recipe.selection.method, recipe.selection.keep, recipe.budget.prune_units
    if recipe.prunes_after_heads and units == "heads":
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<prune_units> heads: {method} selects the heads, and the budget then removes neurons only; omit it, or"
            f" choose one of {', '.join(BUDGET_METHODS)} (<method>)",
            *("prune_units", "method"),
        )
    if recipe.prunes and method in BUDGET_METHODS and keep is not None and units == "neurons":
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<keep> {keep}, <prune_units> neurons: no head is removed; omit one of them",
            *("keep", "prune_units"),
        )


def _check_selection(recipe: RecipeSections) -> None:
    selection = recipe.selection
    if selection.ray is not None and not selection.searches:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<ray> {selection.ray}: it distributes a search; choose one of {', '.join(SEARCH_METHODS)} (<method>)",
            *("ray", "method"),
        )


def _check_certificate(recipe: RecipeSections) -> None:
    selection = recipe.selection
    method, keep, max_drop, certify = selection.method, selection.keep, selection.max_drop, selection.certify
    bisects = method in BUDGET_METHODS and not recipe.budget.is_set and keep is None
    if certify is not None and (not (selection.searches or bisects) or max_drop is None):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<certify> {certify:g}: it certifies a loss; set the loss allowed (<max_drop>) and no budget, or"
            f" choose one of {', '.join(SEARCH_METHODS)} (<method>)",
            *("certify", "max_drop"),
        )
    if certify is not None and bisects and (recipe.engine.allows_quantized or recipe.engine.precision == "bf16"):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<certify> {certify:g}, <precision> {recipe.engine.precision}: the loss of the model in floats is"
            " certified, not that of the precision of the engine; omit one of them",
            *("certify", "precision"),
        )
    if certify is not None and (first := next((name for name in BUDGETS if recipe.value(name) is not None), None)):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<certify> {certify:g}, <{first}>: the certificate covers the heads that a search removes, not what"
            " the budget removes after it; omit one of them",
            *("certify", first),
        )
    if certify is not None and keep is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<certify> {certify:g}, <keep> {keep}: the certificate decides how many heads go; omit one of them",
            *("certify", "keep"),
        )
