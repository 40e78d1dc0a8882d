"""Run one ladder of budgets with several methods, and print the metric and the speed of all rungs in one table.

    python -m benchmarks.compare_methods model/ --data rows.tsv --speedup 2,4 --methods reconstruct,fisher,dsp -o out/

Every other option is one of `compress run`; `--options` are those of the first method, and each method has all of
`--minutes`. A method has a folder of its name in the output folder, with the page of its ladder, and finished rungs
are not repeated. The table is also written to `methods.md`.

Gates such as `dsp` meet budgets of multiply-accumulates and parameters, not of time. In a ladder by time each of their
rungs keeps the share of multiply-accumulates that the rung of the first method reached, so that engines of about equal
cost are compared. A further method that fails ends its own ladder only; the reason is printed below the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from benchmarks.machine import machine
from benchmarks.speed import table
from compressor.cli import main
from compressor.cli.commands import FieldsCommand, HeadedOption, common, options_of, recipe_option
from compressor.cli.console import Console
from compressor.config.fields import as_list
from compressor.config.ladder import recipes_of
from compressor.config.methods import METHODS
from compressor.config.recipe_file import recipe_of
from compressor.config.run import FIELDS, Recipe
from compressor.config.sections import HEADS
from compressor.errors import CompressorError, ErrorCode, UsageError, suggestion
from compressor.progress import Listener
from compressor.report.frontier import FRONTIER_JSON, Frontier, Rung, frontier_rows
from compressor.run.ladder import compress_ladder
from graph_passes import GraphPassError
from graph_passes.files import write_text

NAME = "python -m benchmarks.compare_methods"
TABLE = "methods.md"


@click.command(cls=FieldsCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", required=False)
@recipe_option
@click.option(
    "--methods",
    cls=HeadedOption,
    heading=HEADS,
    required=True,
    metavar="METHODS",
    help="methods to compare, separated by commas; gates follow the multiply-accumulates of the first",
)
@options_of(FIELDS, without=("model", "method"))
@common
@click.pass_obj
def compare(console: Console, methods: str, model: str | None = None, file: str | None = None, **flags: Any) -> None:
    """Compress MODEL along a ladder of budgets with each of several methods, and compare the rungs in one table."""
    ladders = ladders_of(model, file, flags, as_list(methods))
    frontiers = run_ladders(ladders, console)
    out = next(iter(ladders.values()))[0].output.out.parent.parent
    text = comparison(frontiers, [method for method in ladders if follows_macs(ladders, method)])
    write_text(out / TABLE, f"machine: {machine('torch', 'onnxruntime', 'openvino')}\n\n{text}")
    data = {method: frontier.model_dump(mode="json") for method, frontier in frontiers.items()}
    console.result(Text(text), data)
    console.note(f"the table is in {out / TABLE}")


def ladders_of(
    model: str | None, file: str | None, flags: Mapping[str, Any], methods: Sequence[str]
) -> dict[str, tuple[Recipe, ...]]:
    """The rungs of each method, which write to a folder of its name.

    Rungs of gates in a ladder by time have a budget of all multiply-accumulates: `run_ladders` lowers it.

    Args:
        model: the model folder; None where the file names it.
        file: a recipe file; see `recipes_of`.
        flags: field name -> value of its flag.
        methods: the methods; the first one decides the budgets of gates.

    Raises:
        UsageError: a method is unknown or cannot meet the budgets, or no budget has several values.
    """
    for method in methods or ("",):
        if method not in METHODS:
            text = f"--methods {method}: unknown; {suggestion(method, list(METHODS))}"
            raise UsageError(text, code=ErrorCode.UNKNOWN_NAME, field="methods", value=method)
    first = methods[0]
    rungs = recipes_of(model, file, {**flags, "method": first})
    if len(rungs) == 1:
        text = "methods are compared along a ladder; give a budget several values: --speedup 2,4"
        raise UsageError(text, code=ErrorCode.CONTRADICTION, field="methods")
    out = rungs[0].output.out.parent
    ladders = {}
    for method in methods:
        fields = {**flags, "method": method, "out": str(out / method)}
        try:
            if METHODS[method].kind == "gate" and rungs[0].budget.is_timed and rungs[0].selection.keep is None:
                ladder = tuple(_gate_rung(model, file, fields, rung) for rung in rungs)
            else:
                ladder = recipes_of(model, file, fields)
        except UsageError as error:
            details = {**error.details, "field": "methods", "method": method}
            raise UsageError(f"--methods {method}: {error}", code=error.code, **details) from error
        ladders[method] = ladder if method == first else tuple(recipe.updated(options={}) for recipe in ladder)
    return ladders


def _gate_rung(model: str | None, file: str | None, flags: Mapping[str, Any], rung: Recipe) -> Recipe:
    """The recipe of a gate beside a rung by time: a folder of the same name, the same minutes, no budget of time."""
    budgets = {"speedup": None, "latency": None, "macs": 1.0, "parameters": rung.budget.parameters}
    recipe = recipe_of(model, file, {**flags, **budgets, "out": str(Path(flags["out"]) / rung.output.out.name)})
    minutes = rung.distillation.minutes
    return recipe if minutes is None else recipe.updated(minutes=minutes)


def follows_macs(ladders: Mapping[str, Sequence[Recipe]], method: str) -> bool:
    """Whether the rungs of a method keep the multiply-accumulates of those of the first method, which are by time."""
    first = next(iter(ladders.values()))
    return first[0].budget.is_timed and not ladders[method][0].budget.is_timed


def run_ladders(ladders: Mapping[str, Sequence[Recipe]], listener: Listener) -> dict[str, Frontier]:
    """The frontier of each method, whose unfinished rungs are run one after the other.

    Args:
        ladders: method -> its rungs; see `ladders_of`.
        listener: receives stages, progress and notes.

    Raises:
        CompressorError: the ladder of the first method fails; see `compress_ladder`.
        GraphPassError: likewise.
    """
    (first, rungs), *further = ladders.items()
    frontiers = {first: compress_ladder(rungs, rungs[0].output.out.parent, listener)}
    for method, recipes in further:
        known = recipes
        if follows_macs(ladders, method):
            known = _with_macs(recipes, frontiers[first].rungs)
        frontier = _finished_part(known, recipes[0], listener)
        if frontier.ended is None and len(known) < len(recipes):
            reason = f"{first} has no such rung, or its report does not count multiply-accumulates (--force repeats it)"
            name = recipes[len(known)].output.out.name
            frontier = frontier.model_copy(update={"ended": f"{name}: {reason}"})
        frontiers[method] = frontier
    return frontiers


def _with_macs(recipes: Sequence[Recipe], rungs: Sequence[Rung]) -> list[Recipe]:
    """Recipes with the shares of multiply-accumulates that rungs keep, up to the first rung without such a share."""
    counted = itertools.takewhile(lambda rung: rung.macs is not None, rungs)
    return [recipe.updated(macs=rung.macs) for recipe, rung in zip(recipes, counted, strict=False)]


def _finished_part(recipes: Sequence[Recipe], first: Recipe, listener: Listener) -> Frontier:
    """The frontier of a method, up to a rung that fails."""
    out = first.output.out.parent
    frontier = Frontier(model=first.source.model.resolve().name, max_drop=first.selection.max_drop, rungs=())
    (out / FRONTIER_JSON).unlink(missing_ok=True)  # it is written again after each rung
    try:
        return compress_ladder(recipes, out, listener) if recipes else frontier
    except (CompressorError, GraphPassError) as error:
        if (out / FRONTIER_JSON).exists():
            return Frontier.model_validate_json((out / FRONTIER_JSON).read_text(encoding="utf-8"))
        return frontier.model_copy(update={"ended": f"{first.output.out.name}: {error}"})


def comparison(frontiers: Mapping[str, Frontier], followers: Sequence[str] = ()) -> str:
    """A table of the rungs of all methods as Markdown, then which rungs are missing, and why.

    Args:
        frontiers: method -> its frontier.
        followers: methods whose rungs keep the multiply-accumulates of those of the first method.
    """
    first = next(iter(frontiers))
    rungs = [
        rung.model_copy(update={"name": f"{method}/{rung.name}"})
        for method, frontier in frontiers.items()
        for rung in frontier.rungs
    ]
    headings, rows = frontier_rows(frontiers[first].model_copy(update={"rungs": tuple(rungs)}))
    cells: list[dict[str, Any]] = [dict(zip(headings, row, strict=True)) for row in rows]
    if (bound := frontiers[first].max_drop) is not None:
        for row, rung in zip(cells, rungs, strict=True):
            row[f"within {bound:g}"] = {True: "yes", False: "no", None: ""}[rung.holds]
    lines = [f"{method} ends before {frontier.ended}" for method, frontier in frontiers.items() if frontier.ended]
    lines += [f"{method} keeps the multiply-accumulates of the rungs of {first}" for method in followers]
    return "\n".join([table(cells), *(f"\n{line}" for line in lines), ""])


if __name__ == "__main__":
    main(command=compare, name=NAME)
