"""What can be pruned, and what it costs: `compress sites` lists groups of units, `compress costs` times an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from compressor.cli.commands import FieldsCommand, check_output_file, common, options_of
from compressor.cli.console import Console, text_table
from compressor.config.fields import flag_of
from compressor.config.request import CostsOutput, SitesOptions
from compressor.config.run import FIELDS, Recipe
from compressor.config.sections import ExportConfig, MeasureConfig, SourceConfig, graph_of
from compressor.errors import ErrorCode, InputError, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

    from compressor.run.model_units import ModelCosts
    from graph_passes import GraphGroup, GraphGroups, Refusal

_COLUMNS = ("name", "type", "kind", "units", "step", "kv_heads", "head_dim", "parameters", "macs", "ms")
_SHARES = ("parameters", "macs")
_FOLDER_FIELDS = (*SourceConfig.model_fields, "group_by", *ExportConfig.model_fields)
_OF_GRAPHS = frozenset(("inputs", *SitesOptions.model_fields))
"""The fields that are for graphs, too."""
_LENGTHS = (128, 64, 32, 16, 8)
"""Lengths in tokens at which multiply-accumulates of a graph are counted by default: at the first that it runs with."""
_FIELDS = {**{name: FIELDS[name] for name in _FOLDER_FIELDS}, **SitesOptions.model_fields}

_COST_NAMES = (
    *_FOLDER_FIELDS,
    *("target", "precision", "provider", "threads", "shapes"),
    *(name for name in MeasureConfig.model_fields if name != "seconds"),
)
_COST_FIELDS = {**{name: FIELDS[name] for name in _COST_NAMES}, **CostsOutput.model_fields}
_SUFFIXES = (".html", ".svg")


@click.command(cls=FieldsCommand, short_help="List what can be pruned in a model folder or an ONNX graph.")
@click.argument("model")
@options_of(_FIELDS, without=("model",))
@common
@click.pass_obj
def sites(console: Console, model: str, **fields: Any) -> None:
    """List what can be pruned in MODEL, a model folder or an ONNX file, in the order in which it runs.

    Each row is a group: the heads of an attention or the neurons of a feed-forward, with its shares of the parameters
    and of the multiply-accumulates. A budget keeps a multiple of the step, or all units. For a folder the row has the
    time in milliseconds, if compress costs or a run under a budget of time has measured it on this machine. A graph may
    be of any exporter; a note names each attention or feed-forward in it that cannot be pruned.
    """
    path = Path(model)
    if not path.exists():
        text = f"{model}: no such folder or .onnx file; name a model folder or an ONNX graph"
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=path)
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
        groups = graph_passes.find_groups(load())
    _require_groups(path, groups)
    refusals, shares = list(groups.obstacles), dict[str, dict[str, float]]()
    if options.count:
        try:
            with console.stage("counting the cost of units"):
                shares, refused = _shares(load, groups, _LENGTHS if options.seq is None else (options.seq,))
            refusals += refused
        except graph_passes.GraphPassError as error:
            console.note(f"parameters and multiply-accumulates were not counted: {error}")
    reasons: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refusals:
        reasons.setdefault((refusal.op, refusal.why), []).append(refusal)
    for alike in reasons.values():
        names = listed(min(refusal.sites) for refusal in alike)
        console.note(f"{names}: cannot be removed from the graph ({alike[0]})")
    for group in groups.groups:
        row = {"name": group.name, "type": group.type, "kind": group.kind, "units": group.units}
        sizes = {"kv_heads": group.kv_heads, "head_dim": group.head_dim}
        yield dict.fromkeys(_COLUMNS) | row | sizes | shares.get(group.name, {})


def _shapes_of(path: Path, model: ir.Model) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of an .npz file, for inputs of a graph."""
    from compressor.targets.example_rows import read_arrays

    if not path.is_file():
        text = "no such file; write an array per input of the graph with numpy.savez"
        raise InputError.of_file(path, text, ErrorCode.FILE_MISSING)
    shapes = {name: array.shape for name, array in read_arrays(path).items()}
    inputs = [value.name or "" for value in model.graph.inputs]
    if unknown := sorted(shapes.keys() - set(inputs)):
        raise InputError.of_file(
            path,
            f"{unknown[0]} is no input of the graph; name the arrays like its inputs, {', '.join(inputs)}",
            ErrorCode.UNKNOWN_NAME,
            value=unknown[0],
        )
    return shapes


def _require_groups(path: Path, groups: GraphGroups) -> None:
    """Check that something can be removed; the error says what was looked for, and where it ended."""
    import graph_passes

    if groups.groups:
        return
    first = next(iter(groups.obstacles), None)
    remedy = ""
    if first is not None and first.code is graph_passes.RefusalCode.UNKNOWN_SHAPE:
        remedy = "; state the sizes of inputs that the graph runs on (--inputs FILE.npz)"
    raise InputError.of_file(
        path,
        f"nothing can be removed. {groups.outcome}{remedy}",
        ErrorCode.SITE_REFUSED,
        operator=first.op if first is not None else None,
        node=first.node if first is not None else None,
        reason=first.code if first is not None else None,
    )


def _shares(
    load: Callable[[], ir.Model], groups: GraphGroups, lengths: Sequence[int]
) -> tuple[dict[str, dict[str, float]], list[Refusal]]:
    """Name of the group -> its shares of the parameters and of the multiply-accumulates, as far as they are known.

    A group of which half of the units cannot be removed has none, and the reason is in the list.

    Groups whose names differ in numbers alone are those of similar layers, of which the first and the last are counted.

    Args:
        lengths: sizes of the free axes other than the batch, of which the first is used that the graph runs with.
    """
    import graph_passes
    from compressor.measure.macs import macs
    from graph_passes.passes import DropUnreadPositions

    def shrunk_without(pruned: GraphGroup | None) -> graph_passes.Shrunk:
        kept = {group.name: group.units // 2 if group is pruned else group.units for group in groups.groups}
        plan = graph_passes.Plan(groups=tuple(group.plan(range(kept[group.name])) for group in groups.groups))
        return graph_passes.shrink(load(), plan)

    def count(model: ir.Model) -> dict[str, int | None]:
        read = DropUnreadPositions()(model).model  # what a run delivers
        return {"parameters": graph_passes.count_parameters(read), "macs": macs(read, 1, length)}

    whole_model = shrunk_without(None).model
    length = next((length for length in lengths if macs(whole_model, 1, length) is not None), lengths[0])
    classes: dict[Hashable, list[GraphGroup]] = {}
    for group in groups.groups:
        pattern = re.sub(r"\d+", "#", group.name)
        classes.setdefault((pattern, group.type, group.units, group.width, group.kv_heads), []).append(group)
    whole, shares = count(whole_model), dict[str, dict[str, float]]()
    refused: list[Refusal] = []
    for members in classes.values():
        for group in dict.fromkeys((members[0], members[-1])):
            shrunk, dropped = shrunk_without(group), group.units - group.units // 2
            refused += shrunk.refused[:1]
            rest = {} if shrunk.refused else count(shrunk.model)
            shares[group.name] = {
                unit: (total - left) * group.units / dropped / total
                for unit, total in whole.items()
                if total and (left := rest.get(unit)) is not None
            }
        shares |= {group.name: shares[members[0].name] for group in members[1:-1]}
    return shares, refused


def _of_folder(console: Console, path: Path, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each group of units of a model."""
    from compressor.run.model_units import list_units

    options = SitesOptions(**{name: fields.pop(name) for name in SitesOptions.model_fields if name in fields})
    recipe = Recipe(model=path, seq=None if options.seq is None else (options.seq,), **fields)
    for unit in list_units(recipe, console, count=options.count):
        group, costs = unit.group, {"parameters": unit.parameters, "macs": unit.macs, "ms": unit.ms}
        row = {"name": group.name, "type": group.type, "units": group.units, "step": group.multiple}
        if (site := group.site) is not None:
            row |= {"name": site.name, "type": "heads", "kind": site.kind, "units": site.heads}
            row |= {"kv_heads": site.kv_heads, "head_dim": site.head_dim}
        yield dict.fromkeys(_COLUMNS) | row | costs


@click.command(cls=FieldsCommand, short_help="Measure what heads and neurons cost on an engine.")
@click.argument("model")
@options_of(_COST_FIELDS, without=("model",))
@common
@click.pass_obj
def costs(console: Console, model: str, out: str | None = None, force: bool = False, **fields: Any) -> None:
    """Time the engine of MODEL, a model folder or an ONNX file, with fewer and fewer heads and neurons.

    Budgets such as --speedup use these times. Groups of units that cost the same share a row; a cliff is a number of
    units that takes longer than a larger one, by more than noise. No rows are needed.
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
    from graph_passes.files import write_text

    if path.suffix == ".svg":
        write_text(path, picture(measured.tables))
    else:
        write_text(path, render(measured.model, measured.engine, measured.tables))
