"""`compress sites`: list the groups of units that can be pruned."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from compressor.cli.commands import FieldsCommand, common, options_of
from compressor.cli.console import Console
from compressor.config.fields import flag_of
from compressor.config.graph_file import graph_of
from compressor.config.request import SitesOptions
from compressor.config.run import FIELDS, Recipe
from compressor.config.sections import ExportConfig, SourceConfig
from compressor.errors import ErrorCode, InputError, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

    from graph_passes import FoundGroup, FoundGroups, Refusal

_COLUMNS = ("name", "type", "kind", "units", "step", "kv_heads", "head_dim", "parameters", "macs", "ms")
_SHARES = ("parameters", "macs")
_NAMES = (*SourceConfig.model_fields, "group_by", *ExportConfig.model_fields)
_OF_GRAPHS = frozenset(("inputs", *SitesOptions.model_fields))
"""The fields that are for graphs, too."""
_LENGTHS = (128, 64, 32, 16, 8)
"""Lengths in tokens at which multiply-accumulates of a graph are counted by default: at the first that it runs with."""
_FIELDS = {**{name: FIELDS[name] for name in _NAMES}, **SitesOptions.model_fields}


@click.command(cls=FieldsCommand, short_help="What can be pruned in a model folder or an ONNX graph.")
@click.argument("model")
@options_of(_FIELDS, without=("model",))
@common
@click.pass_obj
def sites(console: Console, model: str, **fields: Any) -> None:
    """List what can be pruned in MODEL, a model folder or an ONNX file, in the order in which it runs.

    These are the heads of each attention and the neurons of each feed-forward, with the shares of the parameters and of
    the multiply-accumulates that all units of a group account for. For a folder, a budget keeps a multiple of the step,
    or all units; and the time of a group in milliseconds is listed too, if compress costs, or a run under a budget of
    time, has measured it on this machine. A graph may be of any exporter; what looks like an attention or a
    feed-forward there and cannot be pruned is named in a note.
    """
    path = Path(model)
    if not path.exists():
        raise InputError(
            f"{model}: no such folder or .onnx file; name a model folder or an ONNX graph",
            code=ErrorCode.FILE_MISSING,
            path=path,
        )
    graph = graph_of(path)
    if graph is not None:
        unused = sorted(fields.keys() - _OF_GRAPHS)
        if unused:
            raise UsageError(
                f"{flag_of(unused[0])}: the flag is for a model folder, and {graph} is a graph; omit it",
                code=ErrorCode.CONTRADICTION,
                field=unused[0],
            )
        rows = list(_of_graph(console, graph, fields))
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


def _of_graph(console: Console, path: Path, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each group of units of a graph."""
    import graph_passes
    from graph_passes.errors import listed

    options = SitesOptions(**{name: fields[name] for name in SitesOptions.model_fields if name in fields})
    example = fields.get("inputs")
    shapes = {} if example is None else _shapes_of(Path(example), graph_passes.load(path))

    def load() -> ir.Model:
        model = graph_passes.load(path)
        graph_passes.record_example_sizes(model, shapes)
        return model

    with console.stage("finding units"):
        found = graph_passes.find_groups(load())
    _require_groups(path, found)
    reasons: dict[tuple[str, str], list[Refusal]] = {}
    for obstacle in found.obstacles:
        reasons.setdefault((obstacle.op, obstacle.why), []).append(obstacle)
    for obstacles in reasons.values():
        names = listed(min(obstacle.sites) for obstacle in obstacles)
        console.note(f"{names}: cannot be removed from the graph ({obstacles[0]})")
    shares: dict[str, dict[str, float]] = {}
    if options.count:
        try:
            with console.stage("counting the cost of units"):
                shares = _shares(load, found, _LENGTHS if options.seq is None else (options.seq,))
        except graph_passes.GraphPassError as error:
            console.note(f"parameters and multiply-accumulates were not counted: {error}")
    for group in found.groups:
        row = {"name": group.name, "type": group.type, "kind": group.kind, "units": group.units}
        sizes = {"kv_heads": group.kv_heads, "head_dim": group.head_dim}
        yield dict.fromkeys(_COLUMNS) | row | sizes | shares.get(group.name, {})


def _shapes_of(path: Path, model: ir.Model) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of an .npz file, for inputs of a graph.

    Raises:
        InputError: it cannot be read as such a file, or an array is for no input.
    """
    import numpy as np

    try:
        with np.load(path) as arrays:
            shapes = {name: arrays[name].shape for name in arrays.files}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: this is no .npz file with an array per input of the graph; write one with numpy.savez",
            code=ErrorCode.FILE_UNREADABLE if path.is_file() else ErrorCode.FILE_MISSING,
            path=path,
        ) from error
    inputs = [value.name or "" for value in model.graph.inputs]
    if unknown := sorted(shapes.keys() - set(inputs)):
        raise InputError(
            f"{path}: {unknown[0]} is no input of the graph; name the arrays like its inputs, {', '.join(inputs)}",
            code=ErrorCode.UNKNOWN_NAME,
            path=path,
            value=unknown[0],
        )
    return shapes


def _require_groups(path: Path, found: FoundGroups) -> None:
    """Check that something can be removed from a graph.

    Raises:
        InputError: nothing can; the message says what was looked for, and where it ended.
    """
    import graph_passes

    if found.groups:
        return
    first = next(iter(found.obstacles), None)
    remedy = ""
    if first is not None and first.code is graph_passes.RefusalCode.UNKNOWN_SHAPE:
        remedy = "; state the sizes of inputs that the graph runs on (--inputs FILE.npz)"
    raise InputError(
        f"{path}: nothing can be removed. {found.outcome}{remedy}",
        code=ErrorCode.SITE_REFUSED,
        path=path,
        operator=first.op if first is not None else None,
        node=first.node if first is not None else None,
        reason=first.code if first is not None else None,
    )


def _shares(load: Callable[[], ir.Model], found: FoundGroups, lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Name of the group -> its shares of the parameters and of the multiply-accumulates, as far as they are known.

    Groups whose names differ in numbers alone are those of similar layers, of which the first and the last are counted.

    Args:
        load: returns the graph.
        found: its groups.
        lengths: sizes of the free axes other than the batch, of which the first is used that the graph runs with.
    """
    import graph_passes
    from compressor.measure.macs import macs

    def shrunk_without(pruned: FoundGroup | None) -> ir.Model:
        kept = {group.name: group.units // 2 if group is pruned else group.units for group in found.groups}
        plan = graph_passes.Plan(groups=tuple(group.plan(range(kept[group.name])) for group in found.groups))
        return graph_passes.shrink(load(), plan).model

    def count(model: ir.Model) -> dict[str, int | None]:
        return {"parameters": graph_passes.count_parameters(model), "macs": macs(model, 1, length)}

    whole_model = shrunk_without(None)
    length = next((length for length in lengths if macs(whole_model, 1, length) is not None), lengths[0])
    classes: dict[Hashable, list[FoundGroup]] = {}
    for group in found.groups:
        pattern = re.sub(r"\d+", "#", group.name)
        classes.setdefault((pattern, group.type, group.units, group.width, group.kv_heads), []).append(group)
    whole, shares = count(whole_model), dict[str, dict[str, float]]()
    for members in classes.values():
        for group in dict.fromkeys((members[0], members[-1])):
            rest, dropped = count(shrunk_without(group)), group.units - group.units // 2
            shares[group.name] = {
                unit: (total - left) * group.units / dropped / total
                for unit, total in whole.items()
                if total and (left := rest[unit]) is not None
            }
        shares |= {group.name: shares[members[0].name] for group in members[1:-1]}
    return shares


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
