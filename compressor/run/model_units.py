"""The units of a model that can be pruned, and what share of the model each group of them accounts for."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from compressor.config.run import Recipe
from compressor.engines.build import drops_unread
from compressor.engines.export import export_unproven, rehearse
from compressor.errors import CompressorError, InputError
from compressor.model_folder import example_inputs
from compressor.progress import Listener, NullListener, RunLog
from compressor.pruning.costs import count_costs, float_graph
from compressor.pruning.measure import latest_tables, structure_of
from compressor.results import CostUnit, Note, NoteCode
from compressor.run.load import load_folder
from compressor.run.prunable_groups import expert_notes
from compressor.run.run_context import LoadedModel
from compressor.run.sizes import timed_lengths
from compressor.units import PrunableGroup, find_groups, keep_all
from graph_passes import Plan, Refusal


@dataclass(frozen=True)
class UnitGroup:
    """A group of units, and what the model would save without all of them.

    Attributes:
        group: the group.
        parameters: share of the parameters of the model; None: not counted.
        macs: share of the multiply-accumulates of a call; None: not counted.
        ms: milliseconds of a call; None: not known on this machine.
    """

    group: PrunableGroup
    parameters: float | None = None
    macs: float | None = None
    ms: float | None = None


def list_units(recipe: Recipe, listener: Listener | None = None, *, count: bool = True) -> tuple[UnitGroup, ...]:
    """The groups of units of a model, in the order in which they run.

    Parameters and multiply-accumulates are those of the cost tables of budgets, which are counted in the exported
    graph, at the first length of the recipe. Times are those of the cost table that was measured last on this machine.

    Args:
        recipe: the model, how it is exported, and the length.
        listener: receives stages, progress and notes.
        count: whether parameters and multiply-accumulates are counted.

    Raises:
        InputError: the model folder cannot be used.
        SiteRefusedError: no heads and no neurons were found.
        UsageError: the model takes no text, and the recipe has a length.
    """
    log = RunLog(listener or NullListener())
    with log.stage("finding units"):
        model = load_units(recipe)
        length = timed_lengths(recipe.measure, model.folder)[0]
    log.add_notes(expert_notes(model))
    shares = _counted_shares(recipe, model, length, log) if count else {}
    costs = [shares.get("parameters", {}), shares.get("macs", {}), _known_times(model, log)]
    return tuple(UnitGroup(group, *(of_groups.get(group.name) for of_groups in costs)) for group in model.groups)


def load_units(recipe: Recipe) -> LoadedModel:
    """The model of a recipe and its groups, without the processor of its rows."""
    folder = load_folder(recipe, recipe.source.model)
    inputs, attention, group_by = example_inputs(folder, 2, 8), recipe.export.attention, recipe.budget.group_by
    groups = tuple(find_groups(folder.model, inputs, attention=attention, group_by=group_by))
    sites = tuple(group.site for group in groups if group.site is not None)
    return LoadedModel(folder, sites, groups)


def note_refusals(refused: Collection[Refusal], log: RunLog) -> None:
    """Note the groups that cannot be removed from the graph."""
    for refusal in refused:
        text = f"{', '.join(sorted(refusal.sites))}: cannot be removed from the graph ({refusal})"
        log.add_notes([Note(code=NoteCode.GROUPS_SKIPPED, text=text)])


def _counted_shares(
    recipe: Recipe, model: LoadedModel, length: int | None, log: RunLog
) -> dict[CostUnit, dict[str, float]]:
    """Shares of the parameters and of the multiply-accumulates by group, without what cannot be counted."""
    plan = keep_all(model.groups)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "reference.onnx"
        try:
            with log.stage("exporting the graph"):
                export_unproven(model.folder, plan, recipe.export, path)
                refused = rehearse(path, model.groups).refused
        except CompressorError as error:
            _note_uncounted("parameters and multiply-accumulates", error, log)
            return {}
        note_refusals(refused, log)
        kept = frozenset().union(*(refusal.sites for refusal in refused))
        groups = [group for group in model.groups if group.name not in kept]

        def graph_of(plan: Plan) -> ir.Model:
            return float_graph(path, plan, drop_unread=drops_unread(recipe.export, recipe.engine))

        with log.stage("counting the cost of units") as on_progress:
            try:
                tables = count_costs(graph_of, plan, groups, [(1, length)], on_progress)
            except InputError as error:  # multiply-accumulates of experts depend on the rows
                _note_uncounted("multiply-accumulates", error, log)
                tables = count_costs(graph_of, plan, groups, [], on_progress)
    return {
        table.unit: {name: row.saving(0) / table.whole for row in table.rows for name in row.groups} for table in tables
    }


def _note_uncounted(subject: str, error: CompressorError, log: RunLog) -> None:
    log.add_notes([Note(code=NoteCode.COSTS_NOT_COUNTED, text=f"{subject} were not counted: {error}")])


def _known_times(model: LoadedModel, log: RunLog) -> dict[str, float]:
    """Name of the group -> milliseconds of a call, by the cost table that was measured last; empty: there is none."""
    tables = latest_tables(structure_of(model.folder.model, model.groups))
    if tables is None:
        text = "times are not known; compress costs measures them"
        log.add_notes([Note(code=NoteCode.COSTS_NOT_MEASURED, text=text)])
        return {}
    table = tables[0]
    text = f"times are of {table.engine}, {table.size_label}, as measured earlier on this machine"
    log.add_notes([Note(code=NoteCode.COSTS_REUSED, text=text)])
    return {name: row.saving(0) for row in table.rows for name in row.groups}
