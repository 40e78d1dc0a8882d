"""Checks of fields of a recipe against each other."""

from __future__ import annotations

from compressor.config.fields import FieldConflictError
from compressor.config.methods import BUDGET_METHODS, PENALISED_METHODS, SEARCH_METHODS
from compressor.config.recipe_fields import BUDGETS
from compressor.config.recipe_sections import RecipeSections
from compressor.config.sections import AUTO, DistillationConfig
from compressor.errors import ErrorCode
from compressor.targets import DEFAULT_TARGET, target


def check_agreement(recipe: RecipeSections) -> None:
    """Raise FieldConflictError if two fields contradict each other, or one that others need is missing."""
    _check_rows(recipe)
    _check_engine(recipe)
    _check_blocks(recipe)
    _check_distillation(recipe)
    _check_grouping(recipe)
    _check_budget(recipe)
    _check_prune_units(recipe)
    _check_selection(recipe)
    _check_certificate(recipe)


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


def _check_distillation(recipe: RecipeSections) -> None:
    distillation = recipe.distillation
    if distillation.distill and recipe.rows.data is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            "<distill>: there are no rows to train on; add training rows (<data>), whose labels are not needed",
            *("distill", "data"),
        )
    if distillation.distill and not recipe.learns and recipe.plan_file is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            "<distill>: nothing is removed from the model, so there is nothing to learn again; set a budget"
            " (<speedup>), the number of heads (<keep>), or a plan (<plan>)",
            *("distill", "speedup"),
        )
    if distillation.distill and recipe.selection.certify is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<certify> {recipe.selection.certify:g}, <distill>: the loss before the training is certified, not that"
            " of the trained model; omit one of them",
            *("certify", "distill"),
        )
    if recipe.budget.match_dense and distillation.teacher is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<match_dense>, <teacher> {distillation.teacher}: documents are those of the whole model, not of another"
            " teacher; omit one of them",
            *("match_dense", "teacher"),
        )
    if recipe.budget.match_dense and not (recipe.prunes or recipe.distills):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            "<match_dense>: no unit is chosen and nothing is trained by it; set a budget (<macs>), or omit it",
            *("match_dense", "macs"),
        )
    unused = [name for name in DistillationConfig.model_fields if name in recipe.fields_set - {"distill"}]
    if unused and not distillation.distill:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<{unused[0]}>: nothing is distilled; add <distill>, or omit it",
            *(unused[0], "distill"),
        )
    if distillation.quantized_share and recipe.engine.precision not in ("int8", AUTO):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<quantized_share>: engines in {recipe.engine.precision} do not round to 8 bits; set <precision> int8 or"
            " auto, or omit it",
            *("quantized_share", "precision"),
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


def _check_budget(recipe: RecipeSections) -> None:
    budget, keep = recipe.budget, recipe.selection.keep
    set_budgets = [name for name in BUDGETS if getattr(budget, name) is not None]
    prunes_alone = recipe.selection.method in BUDGET_METHODS
    if not set_budgets and not prunes_alone:
        return
    first = set_budgets[0] if set_budgets else "method"
    if recipe.rows.data is None and recipe.plan_file is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"<{first}>: there are no rows to choose units by; add training rows (<data>), whose labels are not"
            " needed, or a plan (<plan>)",
            *(first, "data"),
        )
    if budget.speedup is not None and budget.latency is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<speedup> {budget.speedup:g}, <latency> {budget.latency}: both bound the time of a call; omit one",
            *("speedup", "latency"),
        )
    if budget.budget_at and not (budget.is_timed or budget.macs is not None):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            "<budget_at>: there is no budget that depends on the size; set <speedup>, <latency> or <macs>",
            *("budget_at", "speedup"),
        )
    if budget.start_from is not None and not prunes_alone:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<start_from> {budget.start_from}: {recipe.selection.method} selects heads of the whole model; omit one"
            f" of them, or choose one of {', '.join(BUDGET_METHODS)} (<method>)",
            *("start_from", "method"),
        )
    if recipe.blocks.drops_any:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<{first}>: blocks are dropped by training, after which units would have to be refitted again; drop"
            " blocks in a second run, on the output folder of the first",
            *(first, "drop_blocks"),
        )
    if prunes_alone and keep is not None and set_budgets:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<keep> {keep}, <{first}>: {recipe.selection.method} decides by the budget how many heads stay; omit one"
            " of them, or choose another method for the heads (<method>)",
            *("keep", first),
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
    method, keep, max_drop = selection.method, selection.keep, selection.max_drop
    learns = recipe.selects_heads and recipe.plan_file is None
    if method in BUDGET_METHODS:
        if recipe.plan_file is None and not recipe.budget.is_set and keep is None and max_drop is None:
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                f"{method} needs a budget: set <speedup>, <latency>, <macs>, <parameters>, the number of heads"
                " (<keep>), or the loss allowed (<max_drop>)",
                *("method", "speedup"),
            )
        learns = False
    counts_heads = not recipe.learns_units and method not in (*SEARCH_METHODS, *PENALISED_METHODS)
    if learns and keep is None and counts_heads:
        also = ", or the share of blocks to drop (<drop_blocks>)" if recipe.blocks.model_fields_set else ""
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"{method} learns which units to keep, not how many; set the number of heads (<keep>), or a budget of"
            f" operations or parameters alone (<macs>, <parameters>){also}",
            "keep",
        )
    if learns and keep is None and max_drop is None and selection.searches:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"{method} needs a stopping rule: set the number of heads (<keep>) or the loss allowed (<max_drop>)",
            *("keep", "max_drop"),
        )
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
    if certify is not None and bisects and recipe.engine.allows_quantized:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<certify> {certify:g}, <precision> {recipe.engine.precision}: the loss of the model in floats is"
            " certified, not that of quantization; omit one of them",
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
