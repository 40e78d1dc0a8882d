"""Ladders of recipes: one recipe for each value of a budget, from the mildest to the strictest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.config.fields import as_list, flag_of
from compressor.config.methods import BUDGET_METHODS, METHODS
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
        UsageError: see `recipe_of`; or two budgets have several values each, or a value is given twice.
    """
    stored = stored_recipe(model, file)
    fields = {**stored.fields, **flags}
    several = {name: as_list(fields[name]) for name in BUDGETS if len(as_list(fields.get(name))) > 1}
    if not several:
        return (recipe_of(model, file, flags, options=options),)
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


def compared_ladders(
    model: str | None, file: str | None, flags: Mapping[str, Any], recipes: Sequence[Recipe]
) -> dict[str, tuple[Recipe, ...]]:
    """The ladders of the methods that a ladder is compared with, by method.

    Gates meet no budget of time. Beside one, the recipes of a gate have a budget of multiply-accumulates in its place:
    each rung keeps the share that the rung of the ladder reached. It is 100% in these recipes: it is not known yet.

    Args:
        model: the model folder; None where the file names it.
        file: a recipe file; see `recipe_of`.
        flags: field name -> value of its flag.
        recipes: the rungs of the ladder; see `recipes_of`.

    Raises:
        UsageError: the budget has one value only, a method is that of the ladder, or it cannot meet the budgets.
    """
    methods = recipes[0].budget.compare_with
    if len(recipes) == 1:
        for name in ("compare_with", "compare_points"):
            if recipes[0].value(name):
                raise UsageError(
                    f"{flag_of(name)}: only ladders are compared; give the budget several values: --speedup 2,4",
                    code=ErrorCode.CONTRADICTION,
                    field=name,
                )
    if (own := recipes[0].selection.method) in methods:
        raise UsageError(
            f"--compare-with {own}: it is the method of the ladder itself; name others, or another --method",
            code=ErrorCode.CONTRADICTION,
            field="compare_with",
            method=own,
        )
    out = recipes[0].output.out.parent
    ladders = {}
    for method in methods:
        fields = {**flags, "method": method, "out": str(out / method)}
        try:
            if _meets_no_time(method, recipes[0]):
                ladder = tuple(_counted_recipe(model, file, fields, rung) for rung in recipes)
            else:
                ladder = recipes_of(model, file, fields)
        except UsageError as error:
            details = {**error.details, "field": "compare_with", "method": method}
            raise UsageError(f"--compare-with {method}: {error}", code=error.code, **details) from error
        ladders[method] = tuple(recipe.updated(options={}) for recipe in ladder)  # those set are of the ladder's method
    return ladders


def follows_macs(recipe: Recipe, rung: Recipe) -> bool:
    """Whether a recipe of `compared_ladders` keeps the multiply-accumulates of a rung, whose budget is one of time."""
    return rung.budget.is_timed and not recipe.budget.is_timed


def _meets_no_time(method: str, rung: Recipe) -> bool:
    """Whether a method cannot meet the budget of time of a rung: a gate that is given no number of heads."""
    return METHODS[method].kind == "gate" and rung.budget.is_timed and rung.selection.keep is None


def _counted_recipe(model: str | None, file: str | None, flags: Mapping[str, Any], rung: Recipe) -> Recipe:
    """The recipe of a gate beside a rung, in a folder of the same name and with the same minutes.

    Args:
        model: the model folder; None where the file names it.
        file: a recipe file; see `recipe_of`.
        flags: field name -> value of its flag; those of the gate.
        rung: the rung, whose budget is one of time.
    """
    budgets = {"speedup": None, "latency": None, "macs": 1.0, "parameters": rung.budget.parameters}
    recipe = recipe_of(model, file, {**flags, **budgets, "out": str(Path(flags["out"]) / rung.output.out.name)})
    minutes = rung.distillation.minutes
    return recipe if minutes is None else recipe.updated(minutes=minutes)


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
