"""The list of steps that the flags of a recipe stand for.

This module and the checks of `Recipe` are the only ones that know which flags go together; everything behind them
walks the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic

from compressor.config.fields import FieldConflictError, flag_of
from compressor.config.methods import BUDGET_METHODS, DEFAULT_BUDGET_METHOD
from compressor.config.recipe_fields import FIELDS
from compressor.config.recipe_sections import RecipeSections
from compressor.config.sections import AUTO, BlocksConfig, BudgetConfig, DistillationConfig, SelectionConfig
from compressor.config.steps import (
    STEPS,
    Blocks,
    Distill,
    Follow,
    Heads,
    Step,
    Units,
    Within,
    no_loss_to_certify,
    parts_of,
    step_of,
)
from compressor.errors import ErrorCode, UsageError

_LEARNING = ("batch_size", "seed")
_TRAINING = (*_LEARNING, "options", "epochs", "learning_rate")
_BUDGET = (
    *("speedup", "latency", "macs", "parameters", "budget_at", "group_by", "prune_rows", "statistics", "start_from"),
    "skip_refused",
)


_ORDER = tuple(name for name in STEPS if name != Within.name)
"""Names of the steps in the order in which a list has them; `within` carries out two of them."""
OPTIONS_OF_STEPS = frozenset(
    name
    for section in (SelectionConfig, BudgetConfig, BlocksConfig, DistillationConfig)
    for name in section.model_fields
    if name not in ("seed", "batch_size", "max_drop", "match_dense", "compare_points")
)
"""Flags that set an option of a step; the others of their sections are settings of the run."""


def steps_of(recipe: RecipeSections) -> tuple[Step, ...]:
    """The steps of a recipe, in order: those that it writes out, or those of its flags; empty if nothing is learned.

    A plan is followed in place of learning one. Blocks are dropped from the heads that are selected, or from those of
    the plan in the model folder. A budget removes units last, and whatever is left is distilled.
    """
    if recipe.steps is not None:
        return tuple(_written(recipe, recipe.steps))
    try:
        return tuple(_of_flags(recipe))
    except pydantic.ValidationError as error:
        cause = error.errors(include_url=False)[0].get("ctx", {}).get("error")
        if isinstance(cause, FieldConflictError):
            raise cause from error
        raise


def _written(recipe: RecipeSections, steps: Sequence[Step]) -> Iterator[Step]:
    """Steps that are written out, with the seed and the batch size of the run where they set none.

    After heads are selected, units are neurons.
    """
    follows_heads = False
    for step in steps:
        yield _with_settings(recipe, step, follows_heads=follows_heads)
        follows_heads |= isinstance(step, Heads)


def _with_settings(recipe: RecipeSections, step: Step, *, follows_heads: bool) -> Step:
    if isinstance(step, Within):
        parts = (_with_settings(recipe, part, follows_heads=follows_heads) for part in step.steps)
        return step.model_copy(update={"steps": tuple(parts)})
    unset = (type(step).model_fields.keys() & set(_LEARNING)) - step.model_fields_set
    changes = {name: getattr(recipe.selection, name) for name in unset}
    if follows_heads and isinstance(step, Units) and "prune_units" not in step.model_fields_set:
        changes["prune_units"] = "neurons"
    return step.model_copy(update=changes)


def check_steps(recipe: RecipeSections) -> None:
    """Check the list of a recipe: the options of each step, their order, and the rows that they need.

    Raises:
        FieldConflictError: the list cannot be carried out.
    """
    steps = steps_of(recipe)
    if recipe.steps is not None:
        _check_written(recipe, steps)
    _check_certificate(recipe, steps)
    _check_documents(recipe, steps)
    _check_unlabelled_rows(recipe, steps)
    for step in parts_of(steps):
        if isinstance(step, Distill) and step.quantized_share and recipe.engine.precision not in ("int8", "bf16", AUTO):
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<quantized_share>: weights are not trained for the rounding of {recipe.engine.precision}; set"
                " <precision> int8, bf16 or auto, or omit it",
                *("quantized_share", "precision"),
            )


def _check_written(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    """Check what flags cannot get wrong: the order of the steps, and flags beside them."""
    names = [part.name for part in parts_of(steps)]
    ordered = [name for name in _ORDER if name in names]
    exclusive = ({Blocks.name, Units.name}, {Follow.name, Heads.name}, {Follow.name, Units.name})
    if names != ordered or any(pair <= set(names) for pair in exclusive):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<steps> {', '.join(names) or 'none'}: steps are carried out in the order {', '.join(_ORDER)}, each at"
            " most once; units are not removed after blocks, and after a plan that is followed come blocks or a"
            " distillation alone; write such a list, or run compress on the output of another run",
            "steps",
        )
    stored = recipe.stored_plan
    if stored is not None and names[:1] != [Follow.name]:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<steps> {', '.join(names)}: the plan {stored} in the model folder says what its weights are of; begin"
            " with the step follow, or name the folder of the whole model",
            "steps",
        )
    if Heads.name in names and any(
        isinstance(part, Units) and part.prune_units != "neurons" for part in parts_of(steps)
    ):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            "<steps> heads, units: the step heads selects the heads, and units then removes neurons alone; omit"
            " units.prune_units, or the step heads",
            "steps",
        )
    learning = next((step for step in steps if not isinstance(step, Follow)), None)
    if learning is not None and recipe.rows.data is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"<steps> {learning.name}: there are no rows to learn from; add training rows (<data>)",
            *("steps", "data"),
        )
    if isinstance(learning, Distill) and learning is steps[0] and learning.teacher is None:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            "<steps> distill: nothing is removed from the model, so there is nothing to distill; add a step before it,"
            " or name a teacher (<teacher>)",
            *("steps", "teacher"),
        )
    # The recipe of a report sets every field; those that have their default decide nothing.
    flags = [name for name in sorted(OPTIONS_OF_STEPS) if recipe.value(name) != FIELDS[name].default]
    if flags:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<{flags[0]}>: the steps are written out; set the option of its step instead, or omit the list of steps",
            *(flags[0], "steps"),
        )


def _check_certificate(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    """Check that what is delivered is what the certificate covers."""
    certified = [number for number, step in enumerate(steps) if getattr(step, "certify", None) is not None]
    follows = any(isinstance(step, Follow) for step in steps)  # which a note says
    if recipe.selection.certify is not None and not certified and not follows:
        raise no_loss_to_certify(recipe.selection.certify)
    for number in certified:
        step = steps[number]
        certify = step.certify  # type: ignore[attr-defined]
        if number + 1 < len(steps):
            later = steps[number + 1]
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<certify> {certify:g}, <{later.flag}>: the loss after the step {step.name} is certified, not that of"
                f" the model that the step {later.name} delivers; omit one of them",
                *("certify", later.flag),
            )
        engine = recipe.engine
        if isinstance(step, Units) and (engine.allows_quantized or engine.precision == "bf16"):
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<certify> {certify:g}, <precision> {engine.precision}: the loss of the model in floats is certified,"
                " not that of the precision of the engine; omit one of them",
                *("certify", "precision"),
            )


def _check_documents(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    """Check that documents of the dense model are ranked by a step, and that no other model teaches."""
    if not recipe.budget.match_dense:
        return
    distills = (step for step in parts_of(steps) if isinstance(step, Distill))
    teacher = next((step.teacher for step in distills if step.teacher is not None), None)
    if teacher is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<match_dense>, <teacher> {teacher}: documents are those of the whole model, not of another teacher; omit"
            " one of them",
            *("match_dense", "teacher"),
        )
    if not any(isinstance(step, Units | Distill) for step in parts_of(steps)):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            "<match_dense>: no unit is chosen and nothing is trained by it; set a budget (<macs>), or omit it",
            *("match_dense", "macs"),
        )


def _check_unlabelled_rows(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    """Check that rows without labels are read by a step, or compare engines, and that no step needs their labels."""
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
    learning = next((step for step in steps if step.reads_labels), None)
    if learning is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<unlabelled_data> {source}, <{learning.flag}>: the step {learning.name} learns from labels, and these"
            " rows have none; omit one of them",
            *("unlabelled_data", learning.flag),
        )
    if not (any(step.rows_drawn(1) for step in steps) or recipe.engine.chooses):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<unlabelled_data> {source}: no unit is removed from the model and nothing is trained by these rows; set a"
            " budget (<speedup>) or <distill>, or omit it",
            *("unlabelled_data", "distill"),
        )


def _of_flags(recipe: RecipeSections) -> Iterator[Step]:
    followed = recipe.plan_file or recipe.start_plan_file
    if followed is not None:
        yield Follow(plan=followed)
    if recipe.plan_file is None and recipe.rows.data is not None:
        if recipe.selects_heads and not recipe.learns_units:
            yield heads_of(recipe)
        if recipe.blocks.drops_any:
            yield blocks_of(recipe)
        if recipe.prunes:
            units = units_of(recipe)
            if recipe.distills and units.is_unbounded and units.certify is None:
                yield within_of(recipe, units)
                return
            yield units
    if recipe.distills:
        yield distill_of(recipe)


def heads_of(recipe: RecipeSections) -> Heads:
    """The step that selects heads by the flags of a recipe."""
    selection = recipe.selection
    ends_by_loss = selection.searches and selection.keep is None
    return Heads(
        method=selection.method,
        keep=selection.keep,
        max_drop=selection.max_drop if ends_by_loss else None,
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
    types = "neurons" if follows_heads or keeps_heads else budget.prune_units
    if keep is not None and types == "all":
        types = "heads"
    method = selection.method if prunes_alone or recipe.learns_units else DEFAULT_BUDGET_METHOD
    training = _training(recipe)
    if method != selection.method:
        training["options"] = {}
    return Units(
        method=method,
        keep=keep,
        prune_units=types,
        max_drop=selection.max_drop,
        certify=None if follows_heads else selection.certify,
        **{name: getattr(budget, name) for name in _BUDGET if not (recipe.learns_units and name == "statistics")},
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


def within_of(recipe: RecipeSections, units: Units) -> Within:
    """The step that removes as many units as the metric permits after they are distilled, by the flags of a recipe.

    Args:
        recipe: the recipe.
        units: the step that removes units until the metric has lost what it may.
    """
    distill = distill_of(recipe).model_copy(update={"minutes": None})
    return Within(max_drop=units.max_drop, minutes=recipe.distillation.minutes, steps=(units, distill))


def _training(recipe: RecipeSections) -> dict[str, Any]:
    """The options of training, which all steps that train share."""
    selection = recipe.selection
    return {"training_steps": selection.training_steps, **{name: getattr(selection, name) for name in _TRAINING}}


_RENAMED = {
    "drop_blocks": "share",
    "drop_blocks_by_kind": "share_by_kind",
    "distill_steps": "training_steps",
    "distill_learning_rate": "learning_rate",
}
"""Flag -> option of its step, where they differ."""


def with_flags(fields: Mapping[str, Any], steps: Sequence[Step], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe whose file writes the steps out, with the options that flags replace.

    A flag replaces the option of the only step that has it.

    Args:
        fields: the fields of file and flags.
        steps: the steps of the file.
        flags: field name -> value of its flag.

    Raises:
        UsageError: no step has the option, several have it, or it cannot have the value.
    """
    changed = list(steps)
    for name in (name for name in flags if name in OPTIONS_OF_STEPS):
        option = _RENAMED.get(name, name)
        readers = ((step, [part for part in _with_parts(step) if _reads(part, name, option)]) for step in changed)
        matching = [(step, parts[0]) for step, parts in readers if parts]
        heads = [pair for pair in matching if isinstance(pair[1], Heads)]
        matching = heads or matching  # the flags of a selection are those of the heads where there are any
        if len(matching) != 1:
            number = f"{len(matching)} steps have" if matching else "no step has"
            raise UsageError(
                f"{flag_of(name)}: {number} this option, and the recipe file writes the steps out; set it there",
                code=ErrorCode.CONTRADICTION,
                field=name,
                value=flags[name],
            )
        ((step, part),) = matching
        changed[changed.index(step)] = _with_option(step, part, option, flags[name])
    bounded = [step for step in changed if getattr(step, "max_drop", None) is not None]
    if "max_drop" in flags and len(bounded) == 1:
        step = bounded[0]
        changed[changed.index(step)] = _with_option(step, step, "max_drop", flags["max_drop"])
    replaced = flags.keys() & OPTIONS_OF_STEPS
    return {**{name: value for name, value in fields.items() if name not in replaced}, "steps": changed}


def _with_parts(step: Step) -> tuple[Step, ...]:
    """A step, and those that it carries out."""
    return (step,) if step.parts == (step,) else (step, *step.parts)


def _with_option(step: Step, part: Step, option: str, value: Any) -> Step:
    """A step with another value for an option of it, or of the part that it carries out."""
    changed = step_of({part.name: {**{name: getattr(part, name) for name in part.model_fields_set}, option: value}})
    if part is step:
        return changed
    parts = tuple(changed if each is part else each for each in step.parts)
    return step_of({step.name: {**{name: getattr(step, name) for name in step.model_fields_set}, "steps": parts}})


def _reads(step: Step, flag: str, option: str) -> bool:
    """Whether a flag sets an option of a step."""
    if option not in type(step).model_fields:
        return False
    if isinstance(step, Distill | Within):
        return flag in DistillationConfig.model_fields
    is_of_blocks = flag in BlocksConfig.model_fields
    return flag not in DistillationConfig.model_fields and (isinstance(step, Blocks) or not is_of_blocks)
