"""One run of a method inside a study: the recipe's pace, the method's own options, a seed and a number of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compressor.errors import ErrorCode, UsageError, nearest
from compressor.progress import ProgressCallback
from compressor.selection.learn import learn
from compressor.selection.options import option_names
from compressor.selection.plan_and_curves import Learned
from compressor.studies.context import StudyContext
from graph_passes import Plan


def check_options(
    options: Mapping[str, Any], methods: Sequence[str], decided: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse an option that none of the methods has, or that the study decides itself.

    Args:
        options: the recipe's.
        methods: those that are studied.
        decided: option -> why it cannot be given, and the mend.

    Raises:
        UsageError: one is unknown, or decided.
    """
    known = sorted({name for method in methods for name in option_names(method)})
    for name in options:
        method, dot, option = name.rpartition(".")
        if dot and method not in methods:
            raise UsageError(
                f"option {name!r}: {method} is not studied; {nearest(method, methods)}",
                code=ErrorCode.UNKNOWN_NAME,
                field=name,
            )
        among = sorted(option_names(method)) if dot else known
        if option not in among:
            raise UsageError(
                f"option {name!r} of {method or ', '.join(methods)}: unknown; {nearest(option, among)}",
                code=ErrorCode.UNKNOWN_NAME,
                field=name,
            )
        if dot and option == "pool":
            raise UsageError(
                f"option {name!r}: all methods of a study choose from one pool; say pool={options[name]}",
                code=ErrorCode.CONTRADICTION,
                field=name,
            )
        if option in decided:
            raise UsageError(f"option {name!r}: {decided[option]}", code=ErrorCode.CONTRADICTION, field=name)


def options_of(context: StudyContext, method: str) -> dict[str, Any]:
    """What a study gives a method: the size's own pace, then the recipe's options that it has (`name=value`), then
    those that name it (`method.name=value`)."""
    size, options = context.size, context.recipe.selection.options
    paced = {"evaluations": size.evaluations, "rows": size.sample, "trials": size.trials}
    mine = {name.removeprefix(f"{method}."): value for name, value in options.items() if name.startswith(f"{method}.")}
    return {name: value for name, value in {**paced, **options, **mine}.items() if name in option_names(method)}


def choose(
    context: StudyContext,
    method: str,
    keep: int | str | None,
    seed: int,
    work: Path,
    tell: ProgressCallback,
    *,
    max_drop: float | None = None,
    steps: int | None = None,
    **options: Any,
) -> Learned:
    """Choose heads of the subject's model as it is now; an interrupted run of the same is gone on with from `work`."""
    selection = context.recipe.selection.model_copy(
        update={
            "method": method,
            "keep": keep,
            "max_drop": max_drop,
            "options": {**options_of(context, method), **options},
            "steps": context.steps() if steps is None else steps,
            "seed": seed,
        }
    )
    return learn(context.model, context.sites, context.data, selection, work / "checkpoints", tell)


def kept_heads(plan: Plan) -> list[list[Any]]:
    """The heads of a plan as JSON: `[site, head]` each."""
    return [[site.name, head] for site in plan.sites for head in site.kept]
