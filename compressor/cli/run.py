"""The commands of a run: `compress run`, `build` and `report`, how they end, and `recipe`, which lists the keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from compressor.cli.commands import (
    Command,
    CommandGroup,
    FieldsCommand,
    HeadedOption,
    common,
    options_of,
    recipe_option,
)
from compressor.cli.console import Console, text_table
from compressor.config.fields import reference_rows
from compressor.config.ladder import recipes_of
from compressor.config.methods import METHODS, PENALISED_METHODS
from compressor.config.recipe_file import FILE_NAME, json_schema, selecting_step
from compressor.config.run import BUILD_FIELDS, FIELDS, Recipe
from compressor.config.sections import AUTO, HEADS, MODEL
from compressor.config.step_list import steps_of
from compressor.errors import ErrorCode, InputError, MetricDropError, TargetMissingError, UsageError, suggestion

if TYPE_CHECKING:
    from compressor.report.frontier import Frontier
    from compressor.results import MissingTarget, Report

_BUILD_FIELDS = {name: FIELDS[name] for name in BUILD_FIELDS}
_steps_option = click.option(
    "--steps",
    cls=HeadedOption,
    heading=MODEL,
    is_basic=False,
    metavar="LIST",
    help="list of the run's steps: '[{ heads = { keep = 36 } }, { units = { speedup = 4 } }]'; default: that of the"
    " other flags",
)


_penalty_option = click.option(
    *("--lambda", "penalty"),
    cls=HeadedOption,
    heading=HEADS,
    is_basic=False,
    type=float,
    metavar="LAMBDA",
    help=f"penalty of an open head, short for --options penalty=LAMBDA ({', '.join(PENALISED_METHODS)})",
)


@click.command(cls=FieldsCommand, short_help="Prune, distill and quantize a model; prove and measure the engine.")
@click.argument("model", required=False)
@click.argument("words", nargs=-1, metavar="")
@recipe_option
@_steps_option
@options_of(FIELDS, without=("model",))
@_penalty_option
@common
@click.pass_context
def run(
    ctx: click.Context,
    model: str | None = None,
    words: tuple[str, ...] = (),
    file: str | None = None,
    penalty: float | None = None,
    **fields: Any,
) -> None:
    """Prune MODEL, a model folder or an ONNX file, build its engine, and prove and measure it.

    With --data alone the run takes about 20 minutes and delivers the fastest engine that loses at most a point of the
    metric. A recipe file sets options by their names; a flag overrides it. A budget with several values, such as
    --speedup 2,4,8, is a ladder: each value gets a folder, whose run starts from the one before, and frontier.html
    shows metric against speed.
    """
    _check_words(ctx, model, words)
    recipes = _recipes(model, file, fields, penalty)
    recipe, console = recipes[0], ctx.obj
    from compressor.run.ladder import compress_ladder
    from compressor.run.pipeline import compress

    if len(recipes) == 1:
        finish(console, compress(recipe, console), recipe.output.out)
    else:
        out = recipe.output.out.parent
        finish_ladder(console, compress_ladder(recipes, out, console), out)


def _recipes(model: str | None, file: str | None, fields: dict[str, Any], penalty: float | None) -> tuple[Recipe, ...]:
    """The recipe of the options of `run`, or one for each rung of a ladder."""
    recipes = recipes_of(model, file, fields, options={} if penalty is None else {"penalty": penalty})
    selecting = selecting_step(recipes[0])
    method = recipes[0].selection.method if selecting is None else selecting.method
    if penalty is not None and method not in PENALISED_METHODS:
        raise UsageError(
            f"--lambda {penalty:g}: {method} has no penalty; omit it, or use --method {' or '.join(PENALISED_METHODS)}",
            code=ErrorCode.CONTRADICTION,
            field="lambda",
            method=method,
        )
    return recipes


def _check_words(ctx: click.Context, model: str | None, words: tuple[str, ...]) -> None:
    """Raise an error for several words, and for a missing folder whose name is similar to that of a command."""
    group = ctx.parent.command if ctx.parent else None
    if model is None or not isinstance(group, CommandGroup):
        return
    exists, command = Path(model).exists(), group.similar_command(model)
    missing = f"{model}: no such folder, and no such command; "
    if words and exists:
        raise click.UsageError(f"{words[0]}: not expected, since only one model folder is accepted.", ctx.parent)
    if words:
        advice = f"did you mean {command}?" if command else f"commands: {', '.join(group.list_commands(ctx))}."
        raise click.UsageError(missing + advice, ctx.parent)
    if command and not exists:
        raise InputError(f"{missing}did you mean {command}?", code=ErrorCode.FILE_MISSING, path=Path(model))


@click.command(cls=FieldsCommand, short_help="List the steps of a run and their options, without running it.")
@click.argument("model", required=False)
@recipe_option
@_steps_option
@options_of(FIELDS, without=("model",))
@_penalty_option
@common
@click.pass_obj
def explain(
    console: Console, model: str | None = None, file: str | None = None, penalty: float | None = None, **fields: Any
) -> None:
    """List the steps of compress run with the same options, and what each does. Nothing is loaded.

    The list can be written into compress.toml as [[steps]], or passed to compress run as --steps.
    """
    explained = _explained_runs(_recipes(model, file, fields, penalty))
    console.result(Text("\n".join(_explanation_lines(explained))), explained)


def _explained_runs(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """The runs of a command as JSON: for each its steps, what each does, and the options that differ from defaults."""
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


def _explanation_lines(explained: dict[str, Any]) -> list[str]:
    """What `_explained_runs` returns, for a terminal."""
    lines = [f"model: {explained['model']}", f"rows: {', '.join(explained['rows']) or 'none'}"]
    for run in explained["runs"]:
        lines += ["", f"{run['out']}:"]
        for number, step in enumerate(run["steps"], 1):
            lines += _step_lines(f"{number}.", step, "  ")
        if not run["steps"]:
            lines.append("  no step: the model is exported and built with every unit")
    target, precision, bound = (explained[name] for name in ("target", "precision", "max_drop"))
    choice = " (the fastest that keeps the metric, by measurement)" if AUTO in (target, precision) else ""
    lines += [
        "",
        f"engine: {target} {precision}{choice}",
        "then: export, shrink, build, prove, score on test rows, time against the whole model, report",
    ]
    if bound is not None:
        point = " (a point: 0.01 of accuracy, 1 BLEU, 1% of a perplexity)" if explained["allows_a_point"] else ""
        lines.append(f"the run fails (exit code 4) if the metric falls by more than {bound:g}{point}")
    return lines


@click.command(cls=FieldsCommand, short_help="Build the engine of a finished run on this machine.")
@click.argument("out", type=click.Path(path_type=Path))
@options_of(_BUILD_FIELDS)
@common
@click.pass_obj
def build(console: Console, out: Path, **fields: Any) -> None:
    """Build, prove, measure and report the engine of OUT, the folder of a run, which may come from another machine.

    Options default to the values of the run; with another target only --batch, --seq and --seconds do. The defaults in
    brackets are those of compress run. The engine and the report in OUT are replaced when every proof holds.
    """
    from compressor.run.rebuild import rebuild

    finish(console, rebuild(out, fields, console), out)


@click.command(cls=Command, short_help="Rewrite report.html from report.json.")
@click.argument("out", type=click.Path(path_type=Path))
@common
@click.pass_obj
def report(console: Console, out: Path) -> None:
    """Rewrite the report.html of OUT, the folder of a finished run, from its report.json.

    OUT may also be the path of another report, such as out/run-report.json; its page is then run-report.html.
    """
    from compressor.report import load, write_page

    content = load(out)
    page = write_page(content, out / "report.html" if out.is_dir() else out.with_suffix(".html"))
    _print_report(console, content)
    console.note(f"wrote {page}")


@click.command(cls=Command, short_help="List the keys of compress.toml.")
@click.option("--schema", is_flag=True, help=f"print the JSON schema of {FILE_NAME}")
@click.option("--options", "method", metavar="METHOD", help="list the options of a method instead")
@common
@click.pass_obj
def recipe(console: Console, schema: bool, method: str | None) -> None:
    """List every key of compress.toml, which is also a flag of compress run, with its default."""
    if method is not None:
        _print_options(console, method)
        return
    content = json_schema()
    if schema:
        click.echo(console.as_json(content))
        return
    console.result(_reference_table("key", reference_rows(FIELDS)), content)


def _reference_table(subject: str, rows: Iterable[tuple[str, ...]]) -> Table:
    """The rows of the documentation's table of fields, for a terminal."""
    table = text_table(subject, "default", "description")
    for row in rows:
        table.add_row(*(Text(cell.replace("`", "")) for cell in row))
    return table


def _print_options(console: Console, method: str) -> None:
    if method not in METHODS:
        raise UsageError(
            f"--options {method}: unknown method; {suggestion(method, list(METHODS))}",
            code=ErrorCode.UNKNOWN_NAME,
            field="options",
            value=method,
        )
    from compressor.selection.options import option_models, option_rows

    models = option_models(method)
    defaults = {name: field.default for model in models for name, field in model.model_fields.items()}
    console.result(_reference_table("option", option_rows(*models)), defaults)


def _print_report(console: Console, content: Report) -> None:
    from compressor.report import summary

    console.result(Text(content.verdict) if console.quiet else summary(content), content.model_dump(mode="json"))


def finish(console: Console, result: Report | None, out: Path) -> None:
    """Print the result of a run or of a build, which worker processes lack, and raise an error if the run failed.

    Raises:
        MetricDropError: the metric fell by more than the run allows, or every unit stays because it would.
        TargetMissingError: this machine lacks the requested target; everything else is in the folder.
    """
    if result is None:
        return
    from compressor.report.files import HTML_NAME
    from compressor.report.frontier import FRONTIER_HTML
    from compressor.results import DropStatus, NoteCode, headline_scores
    from compressor.workdir import LADDER

    _print_report(console, result)
    console.note(f"the whole report is in {out / HTML_NAME}")
    if (ladder := out / LADDER / FRONTIER_HTML).is_file():
        console.note(f"slower engines that keep the metric too are compared in {ladder}")
    if result.drop_status is DropStatus.FAILED:
        scores = ", ".join(
            f"{score.metric} on the {score.split_name} rows went from {score.dense:.4g} to {score.compressed:.4g}"
            for score in headline_scores(result.scores)
        )
        raise MetricDropError.of_file(
            out,
            f"{scores or 'the metric of the run fell'}, more than --max-drop {result.recipe['max_drop']:g}"
            f" allows; keep more heads, train longer, or allow more (the evidence is in {HTML_NAME})",
            ErrorCode.METRIC_FELL,
        )
    if (note := next((note for note in result.notes if note.code is NoteCode.NOTHING_HOLDS), None)) is not None:
        raise MetricDropError.of_file(out, f"{note}", ErrorCode.METRIC_FELL)
    if result.missing is not None:
        raise _missing_target(result.missing, f"on the machine that will run it: {result.missing.command}", out)


def finish_ladder(console: Console, frontier: Frontier, out: Path) -> None:
    """Print the result of a ladder, and raise an error if the ladder failed.

    Raises:
        MetricDropError: no rung keeps the metric within the loss allowed, or the fastest loses more on test rows.
        TargetMissingError: this machine lacks the requested target; everything else is in the folders.
    """
    from compressor.report.frontier import FRONTIER_HTML
    from compressor.report.terminal import frontier_summary

    console.result(frontier_summary(frontier), frontier.model_dump(mode="json"))
    console.note(f"the rungs are compared in {out / FRONTIER_HTML}")
    if frontier.is_missed:
        raise MetricDropError.of_file(
            out,
            f"{frontier.sentence}; add a milder rung, train longer (--distill-steps), or allow more (the"
            f" evidence is in {FRONTIER_HTML})",
            ErrorCode.METRIC_FELL,
        )
    if frontier.missing is not None:
        raise _missing_target(frontier.missing, "of each rung on the machine that will run it", out)


def _missing_target(missing: MissingTarget, remedy: str, out: Path) -> TargetMissingError:
    text = f"{missing.target}: {missing.reason}; build the engine {remedy} (the proven graphs are in {out})"
    return TargetMissingError(text, code=ErrorCode.DEVICE_MISSING, target=missing.target)
