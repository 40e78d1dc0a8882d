"""`compress sites`: list the attention sites that can be pruned."""

from __future__ import annotations

from collections.abc import Sequence
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

_COLUMNS = ("name", "kind", "heads", "kv_heads", "head_dim")


@click.command(short_help="What can be pruned in a model folder or an ONNX graph.")
@click.argument("model")
@options_of(SourceConfig, without=("model",))
@common
@click.pass_obj
def sites(console: Console, model: str, **source: Any) -> None:
    """List the attention sites of MODEL, a model folder or an ONNX file, in the order in which they run."""
    path = Path(model)
    if not path.exists():
        raise InputError(
            f"{model}: no such folder or .onnx file; name a model folder or an ONNX graph",
            code=ErrorCode.FILE_MISSING,
            path=path,
        )
    settings = {name: value for name, value in source.items() if value is not None}
    with console.stage("finding attention"):
        attention = _of_graph(path) if path.suffix == ".onnx" else _of_folder(path, settings)
    rows = [{column: getattr(site, column) for column in _COLUMNS} for site in attention]
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text("-" if value is None else str(value)) for value in row.values()))
    console.result(table, rows)


def _of_graph(path: Path) -> Sequence[Any]:
    import graph_passes

    return graph_passes.find_attention(graph_passes.load(path))


def _of_folder(path: Path, settings: dict[str, Any]) -> Sequence[Any]:
    from compressor.model_folder import example_inputs, load
    from compressor.units import find_sites

    folder = load(path, needs_processor=False, **settings)
    return find_sites(folder.model, example_inputs(folder, batch=2, seq=8))
