"""Ladders of recipes: one recipe for each value of a budget, from the mildest to the strictest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compressor.config.fields import as_list, flag_of
from compressor.config.methods import BUDGET_METHODS
from compressor.config.recipe_file import stored_recipe
from compressor.config.run import BUDGETS, Recipe
from compressor.config.step_list import OPTIONS_OF_STEPS, rungs_of, steps_of, with_flags
from compressor.config.steps import Blocks, Step, Units, part_of, steps_from
from compressor.config.values import PER_TOKEN, milliseconds_of
from compressor.errors import ErrorCode, UsageError


def recipes_of(
    model: str | None, file: str | None, flags: Mapping[str, Any], *, options: Mapping[str, Any] | None = None
) -> tuple[Recipe, ...]:
    """The recipe of a command, or the rungs of a ladder where a budget has several values: `--speedup 2,4,8`.

    A list of steps with several budgets is the same ladder: `units`, `distill`, `units`, `distill`. Rungs are ordered
    from the mildest budget to the strictest. Each writes a folder of its own inside the output folder, and starts from
    the units and weights of the rung before. The arguments are those of `recipe_of`.

    Raises:
        UsageError: see `recipe_of`; two budgets have several values each, a value is given twice, the budgets of a list
            of steps are not in order, or `compare_points` is set and no budget has several values.
    """
    stored = stored_recipe(model, file)
    fields = {**stored.fields, **flags}
    several = {name: as_list(fields[name]) for name in BUDGETS if len(as_list(fields.get(name))) > 1}
    parts = rungs_of(steps_from(fields["steps"])) if fields.get("steps") is not None else ()
    if "steps" in fields and several:
        raise UsageError(
            f"{flag_of(next(iter(several)))}: the steps are written out; write the budgets of a ladder into their list,"
            " omit the list, or give one value",
            code=ErrorCode.CONTRADICTION,
            field=next(iter(several)),
        )
    if len(parts) > 1:
        several = _budgets_of(parts)
    if not several:
        recipe = stored.with_flags(model, flags, options)
        if recipe.budget.compare_points is not None:
            raise UsageError(
                "--compare-points: only ladders have a page for them; give the budget several values: --speedup 2,4",
                code=ErrorCode.CONTRADICTION,
                field="compare_points",
            )
        return (recipe,)
    if len(several) > 1:
        text = f"{' and '.join(map(flag_of, several))} have several values each; give one of them a single value"
        raise UsageError(text, code=ErrorCode.CONTRADICTION, fields=tuple(several))
    ((name, values),) = several.items()
    if "steps" not in fields:
        recipes = [stored.with_flags(model, {**flags, name: value}, options) for value in values]
    elif "steps" in flags:
        recipes = [stored.with_flags(model, {**flags, "steps": part}, options) for part in parts]
    else:
        steps = with_flags(stored.fields, stored.fields["steps"], flags)["steps"]  # refuses flags of several rungs
        starts = itertools.accumulate(map(len, parts), initial=0)
        files = (
            replace(stored, fields={**stored.fields, "steps": steps[start:end]}, lines=stored.lines[start:end])
            for start, end in itertools.pairwise(starts)
        )
        rest = {name: value for name, value in flags.items() if name not in OPTIONS_OF_STEPS}
        recipes = [file.with_flags(model, rest, options) for file in files]
    try:
        return _rungs(recipes, name, is_listed="steps" in fields)
    except UsageError as error:
        if "steps" not in stored.fields or "steps" in flags:
            raise
        raise stored.located(error, error.details.get("step")) from error


def _rungs(recipes: Sequence[Recipe], name: str, *, is_listed: bool) -> tuple[Recipe, ...]:
    """The recipes of a ladder of a budget in order, each with its folder, and its start from the rung before."""
    if (followed := recipes[0].plan_file) is not None:
        raise UsageError(
            f"{flag_of(name)}: a ladder begins with the whole model, not with the plan {followed}; give one value",
            code=ErrorCode.CONTRADICTION,
            fields=(name, "plan"),
        )
    rungs = [
        recipe.updated(out=recipe.output.out / rung_name(name, getattr(_units_of(recipe), name))) for recipe in recipes
    ]
    if len({recipe.output.out for recipe in rungs}) < len(rungs):
        raise UsageError(
            f"{flag_of(name)}: a value is given twice; give each once", code=ErrorCode.CONTRADICTION, field=name
        )
    if (minutes := rungs[0].distillation.minutes) is not None:
        # A rung that makes all of its steps leaves minutes, but so does every later rung, whose model is smaller.
        rungs = [recipe.updated(minutes=minutes / len(rungs)) for recipe in rungs]
    ordered = sorted(rungs, key=lambda recipe: _mildness(recipe, name), reverse=True)
    if is_listed and ordered != rungs:
        values_in_order = ", ".join(str(getattr(_units_of(rung), name)) for rung in rungs)
        text = f"steps: the budgets of a ladder, {name} {values_in_order}, are not in order; begin with the mildest"
        milder = (_mildness(rung, name) > _mildness(before, name) for before, rung in itertools.pairwise(rungs))
        step = len(rungs[0].steps or ()) * (1 + list(milder).index(True))
        raise UsageError(text, code=ErrorCode.CONTRADICTION, field="steps", step=step)
    if not _removes_units_first(rungs[0]):  # heads, or units that a gate learns, are selected of the whole model
        return tuple(ordered)
    chained = (rung.with_option(Units, "start_from", before.output.out) for before, rung in itertools.pairwise(ordered))
    return (ordered[0], *chained)


def _removes_units_first(recipe: Recipe) -> bool:
    """Whether the first step of a recipe removes units without training, so that it can go on from another run."""
    first, *later = steps_of(recipe)
    if any(isinstance(step, Blocks) for step in later):  # masks belong to the units of their run
        return False
    is_alone = recipe.steps is not None or recipe.selection.method in BUDGET_METHODS
    return is_alone and isinstance(first, Units) and not first.learns


def _budgets_of(parts: Sequence[Sequence[Step]]) -> dict[str, list[Any]]:
    """The budgets of the rungs of a list of steps that have several values -> these."""
    units = [step for part in parts for step in part if isinstance(step, Units)]
    values = {name: [getattr(step, name) for step in units] for name in BUDGETS}
    return {name: several for name, several in values.items() if len(set(several)) > 1}


def _units_of(recipe: Recipe) -> Units:
    units = part_of(steps_of(recipe), Units)
    assert units is not None
    return units


def rung_name(name: str, value: float | str) -> str:
    """The folder of a rung, by its budget, a ratio, a share or a time: `speedup-4`, `macs-50`, `latency-5ms`."""
    if isinstance(value, str):
        return f"{name}-{value.replace(PER_TOKEN, '-per-token')}"
    return f"{name}-{value if name == 'speedup' else 100 * value:g}"


def _mildness(recipe: Recipe, name: str) -> float:
    """A number that is larger the more a budget allows."""
    value = getattr(_units_of(recipe), name)
    if isinstance(value, str):
        return milliseconds_of(value) or 0.0
    return -value if name == "speedup" else float(value)
