"""`compress sites`: list the groups of units that can be pruned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from compressor.cli.commands import FieldsCommand, common, options_of
from compressor.cli.console import Console
from compressor.config.fields import flag_of
from compressor.config.request import SitesOptions
from compressor.config.run import FIELDS, Recipe
from compressor.config.sections import ExportConfig, SourceConfig
from compressor.errors import ErrorCode, InputError, UsageError

_COLUMNS = ("name", "type", "kind", "units", "step", "kv_heads", "head_dim", "parameters", "macs", "ms")
_SHARES = ("parameters", "macs")
_NAMES = (*SourceConfig.model_fields, "group_by", *ExportConfig.model_fields)
_FIELDS = {**{name: FIELDS[name] for name in _NAMES}, **SitesOptions.model_fields}


@click.command(cls=FieldsCommand, short_help="What can be pruned in a model folder or an ONNX graph.")
@click.argument("model")
@options_of(_FIELDS, without=("model",))
@common
@click.pass_obj
def sites(console: Console, model: str, **fields: Any) -> None:
    """List what can be pruned in MODEL, a model folder or an ONNX file, in the order in which it runs.

    For a folder these are the heads of each attention and the neurons of each feed-forward; for an ONNX file the
    heads. A budget keeps a multiple of the step, or all units. For a folder the shares of the parameters and of the
    multiply-accumulates that all units of a group account for are listed too, and their time in milliseconds, if
    compress costs, or a run under a budget of time, has measured it on this machine.
    """
    path = Path(model)
    if not path.exists():
        raise InputError(
            f"{model}: no such folder or .onnx file; name a model folder or an ONNX graph",
            code=ErrorCode.FILE_MISSING,
            path=path,
        )
    if path.suffix == ".onnx":
        unused = sorted(fields.keys() - {"count"})
        if unused:
            raise UsageError(
                f"{flag_of(unused[0])}: the flag is for a model folder, and {path} is a graph; omit it",
                code=ErrorCode.CONTRADICTION,
                field=unused[0],
            )
        with console.stage("finding units"):
            rows = list(_of_graph(path))
    else:
        rows = list(_of_folder(console, path, fields))
    table = Table(box=None, pad_edge=False)
    columns = [column for column in _COLUMNS if not rows or any(row[column] is not None for row in rows)]
    cells = [[_cell(column, row[column]) for column in columns] for row in rows]
    for column, *values in zip(columns, *cells, strict=True):
        # Names are never cut, even on a narrow terminal.
        table.add_column(column, min_width=max(map(len, (column, *values))))
    for values in cells:
        table.add_row(*map(Text, values))
    console.result(table, rows)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column in _SHARES:
        return f"{value:.2%}"
    return f"{value:.3g}" if column == "ms" else str(value)


def _of_graph(path: Path) -> Iterator[dict[str, Any]]:
    """A row for each attention of a graph."""
    import graph_passes

    for site in graph_passes.find_attention(graph_passes.load(path)):
        yield dict.fromkeys(_COLUMNS) | _heads(site)


def _of_folder(console: Console, path: Path, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each group of units of a model."""
    from compressor.run.model_units import list_units

    options = SitesOptions(**{name: fields.pop(name) for name in SitesOptions.model_fields if name in fields})
    recipe = Recipe(model=path, seq=None if options.seq is None else (options.seq,), **fields)
    for unit in list_units(recipe, console, count=options.count):
        group, costs = unit.group, {"parameters": unit.parameters, "macs": unit.macs, "ms": unit.ms}
        row = {"name": group.name, "type": group.type, "units": group.units, "step": group.multiple}
        of_site = {} if group.site is None else _heads(group.site)
        yield dict.fromkeys(_COLUMNS) | row | of_site | costs


def _heads(site: Any) -> dict[str, Any]:
    """The row of an attention of a model or of a graph."""
    sizes = {"units": site.heads, "kv_heads": site.kv_heads, "head_dim": site.head_dim}
    return {"name": site.name, "type": "heads", "kind": site.kind, **sizes}
