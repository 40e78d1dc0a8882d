"""`compress sites`: list the groups of units that can be pruned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.cli.field_options import options_of
from compressor.config.sections import SourceConfig
from compressor.errors import ErrorCode, InputError

_COLUMNS = ("name", "type", "kind", "units", "kv_heads", "head_dim")


@click.command(short_help="What can be pruned in a model folder or an ONNX graph.")
@click.argument("model")
@options_of(SourceConfig, without=("model",))
@common
@click.pass_obj
def sites(console: Console, model: str, **source: Any) -> None:
    """List what can be pruned in MODEL, a model folder or an ONNX file, in the order in which it runs.

    For a folder these are the heads of each attention and the neurons of each feed-forward; for an ONNX file the
    heads.
    """
    path = Path(model)
    if not path.exists():
        raise InputError(
            f"{model}: no such folder or .onnx file; name a model folder or an ONNX graph",
            code=ErrorCode.FILE_MISSING,
            path=path,
        )
    settings = {name: value for name, value in source.items() if value is not None}
    with console.stage("finding units"):
        rows = list(_of_graph(path) if path.suffix == ".onnx" else _of_folder(path, settings))
    cells = [["-" if row[column] is None else str(row[column]) for column in _COLUMNS] for row in rows]
    table = Table(box=None, pad_edge=False)
    for column, *values in zip(_COLUMNS, *cells, strict=True):
        # Names are never cut, however narrow the terminal is.
        table.add_column(column, min_width=max(map(len, (column, *values))))
    for values in cells:
        table.add_row(*map(Text, values))
    console.result(table, rows)


def _of_graph(path: Path) -> Iterator[dict[str, Any]]:
    """A row for each attention of a graph."""
    import graph_passes

    for site in graph_passes.find_attention(graph_passes.load(path)):
        yield _heads(site)


def _of_folder(path: Path, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each group of units of a model."""
    from compressor.model_folder import example_inputs, load
    from compressor.units import find_groups

    folder = load(path, needs_processor=False, **settings)
    for group in find_groups(folder.model, example_inputs(folder, batch=2, seq=8)):
        if group.site is not None:
            yield _heads(group.site)
        else:
            yield dict.fromkeys(_COLUMNS) | {"name": group.name, "type": group.type, "units": group.units}


def _heads(site: Any) -> dict[str, Any]:
    """The row of an attention of a model or of a graph."""
    sizes = {"units": site.heads, "kv_heads": site.kv_heads, "head_dim": site.head_dim}
    return {"name": site.name, "type": "heads", "kind": site.kind, **sizes}
