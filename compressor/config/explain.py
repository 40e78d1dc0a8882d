"""What a run will do, before it does it: its rows, its steps with their options, and its engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compressor.config.run import Recipe
from compressor.config.sections import AUTO
from compressor.config.step_list import steps_of


def explain(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """The runs of a command as JSON: for each its steps, what each does, and the options that differ from defaults.

    Args:
        recipes: the recipe of a run, or the rungs of a ladder.
    """
    recipe = recipes[0]
    engine, rows = recipe.engine, recipe.rows
    return {
        "model": str(recipe.source.model),
        "rows": list(rows.sources),
        "max_drop": recipe.selection.max_drop,
        "allows_a_point": recipe.allows_a_point,
        "target": engine.target,
        "precision": engine.precision,
        "runs": [
            {"out": str(rung.output.out), "steps": [_explained(step) for step in steps_of(rung)]} for rung in recipes
        ],
    }


def _explained(step: Any) -> dict[str, Any]:
    explained = {
        "step": step.name,
        "does": step.summary,
        "options": step.model_dump(mode="json", include=set(step.changed) - {"steps"}),
    }
    parts = {} if step.parts == (step,) else {"steps": [_explained(part) for part in step.parts]}
    return {**explained, **parts}


def _step_lines(number: str, step: dict[str, Any], indent: str) -> list[str]:
    lines = [f"{indent}{number} {step['step']}: {step['does']}"]
    lines += [f"{indent}     {name} = {value}" for name, value in step["options"].items()]
    for letter, part in zip("abcdefgh", step.get("steps", ()), strict=False):
        lines += _step_lines(f"{letter}.", part, f"{indent}   ")
    return lines


def explanation_lines(explained: dict[str, Any]) -> list[str]:
    """The explanation for a terminal.

    Args:
        explained: what `explain` returns.
    """
    lines = [f"model: {explained['model']}", f"rows: {', '.join(explained['rows']) or 'none'}"]
    for run in explained["runs"]:
        lines += ["", f"{run['out']}:"]
        for number, step in enumerate(run["steps"], 1):
            lines += _step_lines(f"{number}.", step, "  ")
        if not run["steps"]:
            lines.append("  no step: the model is exported and built with every unit")
    choice = "the fastest that holds, by measurement" if AUTO in (explained["target"], explained["precision"]) else ""
    bound = explained["max_drop"]
    lines += [
        "",
        f"engine: {explained['target']} {explained['precision']}" + (f" ({choice})" if choice else ""),
        "then: export, shrink, build, prove, score on test rows, time against the whole model, report",
    ]
    if bound is not None:
        point = " (a point: 0.01 of accuracy, 1 BLEU, 1% of a perplexity)" if explained["allows_a_point"] else ""
        lines.append(f"the run fails (exit code 4) if the metric falls by more than {bound:g}{point}")
    return lines
