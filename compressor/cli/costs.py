"""`compress costs`: what the heads and neurons of a model cost on an engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from compressor.cli.commands import FieldsCommand, check_output_file, common, options_of
from compressor.cli.console import Console, text_table
from compressor.config.request import CostsOutput
from compressor.config.run import FIELDS, Recipe
from compressor.config.sections import ExportConfig, MeasureConfig, SourceConfig
from compressor.errors import ErrorCode, UsageError

if TYPE_CHECKING:
    from compressor.run.model_units import ModelCosts

_NAMES = (
    *SourceConfig.model_fields,
    *("target", "precision", "provider", "threads", "shapes"),
    *ExportConfig.model_fields,
    "group_by",
    *(name for name in MeasureConfig.model_fields if name != "seconds"),
)
_FIELDS = {**{name: FIELDS[name] for name in _NAMES}, **CostsOutput.model_fields}
_SUFFIXES = (".html", ".png")


@click.command(cls=FieldsCommand, short_help="What heads and neurons cost on an engine.")
@click.argument("model")
@options_of(_FIELDS, without=("model",))
@common
@click.pass_obj
def costs(console: Console, model: str, out: str | None = None, force: bool = False, **fields: Any) -> None:
    """Time the engine of MODEL, a model folder, with fewer and fewer heads and neurons.

    These are the times that budgets such as --speedup are met by. Groups of units that cost the same share a row; a
    cliff is a number of units that takes longer than the next larger one, by more than noise. No rows are needed.
    """
    recipe = Recipe(model=model, **fields)
    path = None if out is None else _output_file(Path(out), force=force)
    from compressor.report.cost_page import curve_bars, curve_rows, curves_of, headline
    from compressor.run.model_units import measure_costs

    measured = measure_costs(recipe, console)
    parts: list[Any] = []
    for table in measured.tables:
        parts.append(Text(headline(table), style="bold"))
        for curve in curves_of(table):
            rows = zip(curve_rows(curve), curve_bars(curve), strict=True)
            parts += [Text(f"\n{curve.title}: {curve.pattern}"), _table(curve.unit, rows)]
        parts.append(Text())
    if path is not None:
        _write(measured, path)
    console.result(Group(*parts[:-1]), _data(measured))
    if path is not None:
        console.note(f"the curves are in {path}")


def _output_file(path: Path, *, force: bool) -> Path:
    """The file to write; raises UsageError if it is neither a page nor a picture, or cannot be written."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(
            f"--out {path}: unknown kind of file; write a page ({_SUFFIXES[0]}) or a picture ({_SUFFIXES[1]})",
            code=ErrorCode.INVALID_VALUE,
            field="out",
            value=path,
        )
    check_output_file(path, force=force)
    return path


def _table(unit: str, rows: Iterable[tuple[tuple[str, ...], str]]) -> Table:
    """The rows of a curve, each with its bar before its cliff."""
    table = text_table(f"{unit} kept", "time of one", "all, of the model", "", "")
    for column in table.columns[:3]:
        column.justify = "right"
    for (*cells, cliff), bar in rows:
        table.add_row(*map(Text, (*cells, bar, cliff)))
    return table


def _data(measured: ModelCosts) -> dict[str, Any]:
    """The tables as JSON, with their cliffs."""
    tables = []
    for table in measured.tables:
        content = table.model_dump(mode="json")
        for row, stored in zip(table.rows, content["rows"], strict=True):
            stored["cliffs"] = list(row.cliffs)
        tables.append(content)
    return {"model": measured.model, "engine": measured.engine, "tables": tables}


def _write(measured: ModelCosts, path: Path) -> None:
    from compressor.report.cost_page import picture, render
    from graph_passes.files import atomic_replace

    if path.suffix == ".png":
        content = picture(measured.tables)
    else:
        content = render(measured.model, measured.engine, measured.tables).encode()
    with atomic_replace(path) as temporary:
        temporary.write_bytes(content)
