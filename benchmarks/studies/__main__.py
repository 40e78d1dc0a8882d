"""`python -m benchmarks.studies`: compare many runs in one table, with figures."""

from __future__ import annotations

from typing import Any

import click
import pydantic
from rich.console import Group, RenderableType
from rich.text import Text

from benchmarks.studies.request import AXES, RESERVED, SIZES, UNREAD, StudyAxes, StudyRequest, axes_of, recipe_of_study
from compressor.cli import main
from compressor.cli.commands import FieldsCommand, HeadedOption, common, option_of, options_of, recipe_option
from compressor.cli.console import Console, text_table
from compressor.config.fields import flag_of, usage_error
from compressor.config.recipe_file import stored_recipe
from compressor.config.run import FIELDS
from compressor.config.sections import SelectionConfig
from compressor.errors import ErrorCode, UsageError, suggestion

NAME = "python -m benchmarks.studies"
_SEPARATE = ("model", "data", "ray", "epochs")
"""Fields of the recipe whose option differs from that of `compress run`."""


@click.command(cls=FieldsCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kind", metavar="KIND")
@click.argument("model", required=False)
@click.option(
    "--size", cls=HeadedOption, heading=AXES, default="small", metavar="tiny|small|paper", help="amount of work [small]"
)
@recipe_option
@options_of(StudyAxes)
@option_of("data", FIELDS["data"], multiple=True, help_text=f"{FIELDS['data'].description}; repeat to compare several")
@option_of("ray", FIELDS["ray"], help_text=f"{FIELDS['ray'].description} (astar, ablate)")
@option_of("epochs", FIELDS["epochs"], help_text="passes over the training examples; default: those of --size")
@options_of(FIELDS, without=(*RESERVED, *UNREAD, *_SEPARATE))
@common
@click.pass_obj
def studies(
    console: Console, kind: str, size: str, model: str | None = None, file: str | None = None, **flags: Any
) -> None:
    """Run a study of MODEL cell by cell into a folder; KIND is grid, astar, ablate, dynamics, penalty, importance,
    speed or blocks.

    Finished cells are not run again: the same command resumes an interrupted study, and several processes started with
    the same command share the cells. The folder gets study.csv, study.html and figures/*.svg.
    """
    axes = axes_of({name: flags[name] for name in StudyAxes.model_fields if name in flags})
    sources, ray = flags.pop("data", ()), _workers(flags.pop("ray", None))
    fields = {name: value for name, value in flags.items() if name in FIELDS}
    if sources:
        fields["data"] = sources[0]
    stored = stored_recipe(model, file)
    recipe = recipe_of_study(model, stored, fields)
    unread = [name for name in stored.fields if name in UNREAD]
    if unread:
        console.note(f"{stored.path}: studies do not read {', '.join(unread)}")
    if size not in SIZES:
        raise UsageError(
            f"--size {size}: unknown; {suggestion(size, list(SIZES))}", code=ErrorCode.UNKNOWN_NAME, field="size"
        )
    sources = tuple(sources) or ((recipe.rows.data,) if recipe.rows.data else ())
    request = StudyRequest(recipe, SIZES[size], sources, axes, ray)
    from benchmarks.studies import run  # PyTorch takes long to import

    run.check(kind, request)
    console.note(f"size {request.size}")
    findings = run.study(kind, request, console)
    tables: list[RenderableType] = []
    for content in findings.tables:
        table = text_table(*content.columns)
        table.title, table.title_justify = content.title, "left"
        for row in content.rows:
            table.add_row(*(Text(value) for value in row))
        tables += [table, Text()]
    data = {"kind": kind, "size": str(request.size), "rows": [dict(row) for row in findings.rows]}
    console.result(
        Group(*tables, *(Text(line) for line in findings.summary)), {**data, "summary": list(findings.summary)}
    )
    console.note(f"the figures and the whole table are in {recipe.output.out / 'study.html'}")


def _workers(text: str | None) -> str | None:
    """The value of `--ray`, validated like the recipe's field `ray`."""
    try:
        return SelectionConfig(method="astar", ray=text).ray
    except pydantic.ValidationError as error:
        raise usage_error(error, SelectionConfig.model_fields, flag_of) from error


if __name__ == "__main__":
    main(command=studies, name=NAME)
