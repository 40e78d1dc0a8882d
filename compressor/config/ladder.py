"""Ladders of recipes: one recipe for each value of a budget, from the mildest to the strictest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from compressor.config.fields import as_list, flag_of
from compressor.config.methods import BUDGET_METHODS
from compressor.config.recipe_file import recipe_of, stored_recipe
from compressor.config.run import BUDGETS, Recipe
from compressor.errors import ErrorCode, UsageError


def recipes_of(
    model: str | None, file: str | None, flags: Mapping[str, Any], *, options: Mapping[str, Any] | None = None
) -> tuple[Recipe, ...]:
    """The recipe of a command, or the rungs of a ladder where a budget has several values: `--speedup 2,4,8`.

    Rungs are ordered from the mildest budget to the strictest. Each writes a folder of its own inside the output
    folder, and starts from the units and weights of the rung before.

    Args:
        model: the model folder; None where the file names it.
        file: a recipe file; see `recipe_of`.
        flags: field name -> value of its flag.
        options: see `recipe_of`.

    Raises:
        UsageError: see `recipe_of`; two budgets have several values each, a value is given twice, or `compare_points`
            is set and no budget has several values.
    """
    stored = stored_recipe(model, file)
    fields = {**stored.fields, **flags}
    several = {name: as_list(fields[name]) for name in BUDGETS if len(as_list(fields.get(name))) > 1}
    if not several:
        recipe = recipe_of(model, file, flags, options=options)
        if recipe.budget.compare_points is not None:
            raise UsageError(
                "--compare-points: only ladders have a page for them; give the budget several values: --speedup 2,4",
                code=ErrorCode.CONTRADICTION,
                field="compare_points",
            )
        return (recipe,)
    if "steps" in fields:
        raise UsageError(
            f"{flag_of(next(iter(several)))}: a ladder has its steps from flags; omit the list of steps, or give one"
            " value",
            code=ErrorCode.CONTRADICTION,
            field=next(iter(several)),
        )
    if len(several) > 1:
        raise UsageError(
            f"{' and '.join(map(flag_of, several))} have several values each; give one of them a single value",
            code=ErrorCode.CONTRADICTION,
            fields=tuple(several),
        )
    ((name, values),) = several.items()
    recipes = [recipe_of(model, file, {**flags, name: value}, options=options) for value in values]
    if (followed := recipes[0].plan_file) is not None:
        raise UsageError(
            f"{flag_of(name)}: a ladder begins with the whole model, not with the plan {followed}; give one value",
            code=ErrorCode.CONTRADICTION,
            fields=(name, "plan"),
        )
    rungs = [recipe.updated(out=recipe.output.out / rung_name(name, recipe.value(name))) for recipe in recipes]
    if len({recipe.output.out for recipe in rungs}) < len(rungs):
        raise UsageError(
            f"{flag_of(name)}: a value is given twice; give each once",
            code=ErrorCode.CONTRADICTION,
            field=name,
        )
    if (minutes := rungs[0].distillation.minutes) is not None:
        # A rung that makes all of its steps leaves minutes, but so does every later rung, whose model is smaller.
        rungs = [recipe.updated(minutes=minutes / len(rungs)) for recipe in rungs]
    rungs.sort(key=lambda recipe: _mildness(recipe, name), reverse=True)
    if rungs[0].selection.method not in BUDGET_METHODS:  # another method selects heads of the whole model
        return tuple(rungs)
    chained = [recipe.updated(start_from=before.output.out) for before, recipe in itertools.pairwise(rungs)]
    return (rungs[0], *chained)


def rung_name(name: str, value: float | str) -> str:
    """The folder of a rung: `speedup-4`, `macs-50`, `latency-5ms`.

    Args:
        name: the budget.
        value: its value in the recipe: a ratio, a share, or a time with its unit.
    """
    if isinstance(value, str):
        return f"{name}-{value}"
    return f"{name}-{value if name == 'speedup' else 100 * value:g}"


def _mildness(recipe: Recipe, name: str) -> float:
    """A number that is larger the more a budget allows."""
    if name == "latency":
        return recipe.budget.milliseconds or 0.0
    return -recipe.value(name) if name == "speedup" else recipe.value(name)
