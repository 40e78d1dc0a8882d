"""`compress sites`: what can be pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.errors import InputError

_COLUMNS = ("name", "kind", "heads", "kv_heads", "head_dim")


@click.command(short_help="What can be pruned in a model folder or an ONNX graph.")
@click.argument("model")
@click.option("--task", metavar="TASK", help="What the model is for, where its class does not say it.")
@click.option("--allow-pickle", is_flag=True, help="Load pickled weights, which can run code.")
@click.option("--trust-remote-code", is_flag=True, help="Run the Python files that the model folder brings.")
@common
@click.pass_obj
def sites(view: Console, model: str, **loading: Any) -> None:
    """List the attention sites of MODEL, a model folder or an ONNX file, in the order in which they are called."""
    path = Path(model)
    if not path.exists():
        raise InputError(f"{model}: no such folder or .onnx file; give a model folder or an ONNX graph")
    with view.stage("looking for attention"):
        found = _of_graph(path) if path.suffix == ".onnx" else _of_folder(path, loading)
    rows = [{column: getattr(site, column) for column in _COLUMNS} for site in found]
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text("-" if value is None else str(value)) for value in row.values()))
    view.result(table, rows)


def _of_graph(path: Path) -> list[Any]:
    import graph_passes

    return list(graph_passes.find_attention(graph_passes.load(path)))


def _of_folder(path: Path, loading: dict[str, Any]) -> list[Any]:
    from compressor.model_folder import example_inputs, load
    from compressor.units import find_sites

    folder = load(path, needs_processor=False, **loading)
    return list(find_sites(folder.model, example_inputs(folder, batch=2, seq=8)))
