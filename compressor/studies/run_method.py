"""One run of a method within a study, with the options and the schedule of the study's recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compressor.errors import ErrorCode, UsageError, suggestion
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
                f"option {name!r}: {method} is not studied; {suggestion(method, methods)}",
                code=ErrorCode.UNKNOWN_NAME,
                field=name,
            )
        among = sorted(option_names(method)) if dot else known
        if option not in among:
            raise UsageError(
                f"option {name!r} of {method or ', '.join(methods)}: unknown; {suggestion(option, among)}",
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
    """The options with which a study runs a method.

    They are the limits of the study's size, overridden by the options of the recipe (`name=value`), overridden by those
    that name the method (`method.name=value`). Options that the method does not have are left out.
    """
    size, options = context.size, context.recipe.selection.options
    size_options = {"evaluations": size.evaluations, "rows": size.sample, "trials": size.trials}
    prefix = f"{method}."
    method_options = {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}
    merged = {**size_options, **options, **method_options}
    known = option_names(method)
    return {name: value for name, value in merged.items() if name in known}


def select_heads(
    context: StudyContext,
    method: str,
    keep: int | str,
    seed: int,
    work: Path,
    on_progress: ProgressCallback,
    *,
    steps: int | None = None,
    **options: Any,
) -> LearningResult:
    """Select heads of the context's model as it is now; an interrupted run resumes from the checkpoints in `work`.

    Args:
        context: its model is trained, on its rows.
        method: method of selection.
        keep: number or share of the heads to keep.
        seed: seed of the run.
        work: working folder of the cell; checkpoints are written below it.
        on_progress: receives the finished and the total number of steps.
        steps: optimizer steps; the default is `StudyContext.steps`.
        options: options of the method, which override those of the recipe.

    Returns:
        The plan, and the course of the selection.
    """
    selection = context.recipe.selection.model_copy(
        update={
            "method": method,
            "keep": keep,
            "max_drop": None,
            "options": {**options_of(context, method), **options},
            "steps": context.steps() if steps is None else steps,
            "seed": seed,
        }
    )
    return learn(context.model, context.sites, context.data, selection, work / "checkpoints", on_progress)


def kept_heads(plan: Plan) -> list[list[Any]]:
    """The heads of a plan as JSON: `[site, head]` each."""
    return [[site.name, head] for site in plan.sites for head in site.kept]
