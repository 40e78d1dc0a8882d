"""One run of a method within a study, with the options and the schedule of the study's recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compressor.errors import ErrorCode, UsageError, nearest
from compressor.progress import ProgressCallback
from compressor.selection.learn import learn
from compressor.selection.options import option_names
from compressor.selection.plan_and_curves import LearningResult
from compressor.studies.context import StudyContext
from graph_passes import Plan


def check_options(
    options: Mapping[str, Any], methods: Sequence[str], reserved: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse an option that none of the methods has, or that the study sets itself.

    Args:
        options: options of the recipe.
        methods: methods that the study compares.
        reserved: option -> reason why it cannot be set, and the remedy.

    Raises:
        UsageError: an option is unknown or reserved.
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
        if option in reserved:
            raise UsageError(f"option {name!r}: {reserved[option]}", code=ErrorCode.CONTRADICTION, field=name)


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
) -> LearningResult:
    """Select heads of the context's model as it is now; an interrupted run resumes from the checkpoints in `work`."""
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
