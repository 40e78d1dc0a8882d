"""The units of a model that can be pruned: those that a budget may remove, their share of the model, what they cost."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from compressor.config.run import Recipe
from compressor.config.steps import Units
from compressor.engines.build import build_variant, drops_unread, shrink_graph
from compressor.engines.choices import DYNAMIC, PORTABLE, SYMMETRIC, Choice
from compressor.engines.export import export_graph, export_unproven, rehearse
from compressor.errors import CompressorError, ErrorCode, InputError, SiteRefusedError
from compressor.measure.costs import CostTable
from compressor.model_folder import example_feeds, example_feeds_by_size
from compressor.progress import Listener, NullListener, RunLog
from compressor.pruning.allocate import macs_of
from compressor.pruning.costs import PlanEngines, count_costs, float_graph
from compressor.pruning.measure import CostSource, latest_tables
from compressor.quantization import require_nncf
from compressor.results import CostUnit, Note, NoteCode
from compressor.run.load import find_units, load_folder
from compressor.run.run_context import LoadedModel, RunInputs
from compressor.run.sizes import timed_lengths, work_out_sizes
from compressor.targets import QUANTIZED, target
from compressor.units import PrunableGroup, keep_all
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
    return LoadedModel(folder, *find_units(recipe, folder, recipe.budget.group_by))


def note_refusals(refused: Collection[Refusal], log: RunLog) -> None:
    """Note the groups that cannot be removed from the graph."""
    for refusal in refused:
        text = f"{', '.join(sorted(refusal.sites))}: cannot be removed from the graph ({refusal})"
        log.add_notes([Note(code=NoteCode.GROUPS_SKIPPED, text=text)])


def prunable_groups(
    step: Units, model: LoadedModel, refused: Sequence[Refusal]
) -> tuple[list[PrunableGroup], tuple[Note, ...]]:
    """The groups whose units a budget may remove, and notes on those that are kept whole and on experts.

    Raises:
        SiteRefusedError: one cannot be removed from the graph (`refused`), and the step does not allow to skip it; or
            the tensors of the model have positions before rows.
    """
    if any(site.batch_axis for site in model.sites):
        raise SiteRefusedError(
            f"{model.folder.family}: its tensors have positions before rows, so what its linears read cannot be"
            " assigned to rows, which a budget needs; choose a number of heads (--keep)",
            code=ErrorCode.SITE_REFUSED,
            family=model.folder.family,
        )
    units = step.prune_units
    groups = [group for group in model.groups if units in ("all", group.type)]
    reasons = {name: str(refusal) for refusal in refused for name in refusal.sites}
    if not step.learns:  # a gate multiplies the heads themselves
        reasons |= {group.name: "its output projection was not recognized" for group in groups if group.linear is None}
    skipped = [group for group in groups if group.name in reasons]
    if skipped and not step.skip_refused:
        first = skipped[0]
        raise SiteRefusedError(
            f"{first.name}: {reasons[first.name]}; keep such groups whole with --skip-refused, or try --attention sdpa"
            " or --opset 23",
            code=ErrorCode.SITE_REFUSED,
            refused=tuple(group.name for group in skipped),
        )
    remaining = [group for group in groups if group not in skipped]
    if not remaining:
        raise SiteRefusedError(
            f"{model.folder.family}: it has no {'units' if units == 'all' else units} that can be removed; choose"
            " others (--prune-units)",
            code=ErrorCode.SITE_REFUSED,
        )
    notes = []
    for reason in dict.fromkeys(reasons[group.name] for group in skipped):
        names = ", ".join(group.name for group in skipped if reasons[group.name] == reason)
        notes.append(Note(code=NoteCode.GROUPS_SKIPPED, text=f"{names}: kept whole, because {reason}"))
    return remaining, (*notes, *([] if units == "heads" else expert_notes(model)))


def expert_notes(model: LoadedModel) -> list[Note]:
    """A note on the experts of a model whose neurons are no units; empty if it has none."""
    experts = model.folder.access.expert_weights(model.groups)
    text = f"{', '.join(experts)}: neurons of experts whose weights are one tensor of three axes cannot be removed"
    return [Note(code=NoteCode.EXPERTS_KEPT, text=text)] if experts else []


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
    tables = latest_tables(model.folder.access.structure_with(model.groups))
    if tables is None:
        text = "times are not known; compress costs measures them"
        log.add_notes([Note(code=NoteCode.COSTS_NOT_MEASURED, text=text)])
        return {}
    table = tables[0]
    text = f"times are of {table.engine}, {table.size_label}, as measured earlier on this machine"
    log.add_notes([Note(code=NoteCode.COSTS_REUSED, text=text)])
    return {name: row.saving(0) for row in table.rows for name in row.groups}


@dataclass(frozen=True)
class ModelCosts:
    """The cost tables of a model on one engine.

    Attributes:
        model: name of the model folder.
        engine: target, precision and form of the engine.
        tables: times, one table for each size.
    """

    model: str
    engine: str
    tables: tuple[CostTable, ...]


def measure_costs(recipe: Recipe, listener: Listener | None = None) -> ModelCosts:
    """Time the engines of plans of a model, at every size that the recipe times.

    No rows are needed, since times do not depend on weights. A table of the same model, engine and machine that was
    measured earlier is used.

    Returns:
        A table of median times of a call in ms for each size, in the order of the recipe's batch sizes and lengths.

    Raises:
        UsageError: the engine is to be chosen.
        TargetMissingError: the runtime, its device or the quantizer is missing.
        InputError: the model folder or a length cannot be used.
    """
    engine = recipe.engine
    engine.require_definite()
    runtime, form = target(engine.target), ""
    if engine.precision in QUANTIZED:
        form = SYMMETRIC if runtime.symmetric else PORTABLE
        form = DYNAMIC if runtime.quantizes and engine.precision == "int8" else form
    choice = Choice(engine, form)
    runtime.check(precision=engine.definite_precision, provider=engine.provider)
    if choice.form == PORTABLE:
        require_nncf()
    log = RunLog(listener or NullListener())
    with log.stage("loading the model"):
        model = load_units(recipe)
    log.add_notes(expert_notes(model))
    example_feeds(model.folder, 1, max(recipe.measure.seq or (1,)))  # lengths beyond the model end here
    with tempfile.TemporaryDirectory() as scratch:
        tables = _measure(recipe, model, choice, Path(scratch), log)
    return ModelCosts(recipe.source.model.resolve().name, choice.label, tables)


def _measure(recipe: Recipe, model: LoadedModel, choice: Choice, scratch: Path, log: RunLog) -> tuple[CostTable, ...]:
    """The cost tables, in the order of sizes."""
    folder, export = model.folder, recipe.export
    sizes = work_out_sizes(RunInputs(recipe, (), model, data=None, followed=None))
    with log.stage("exporting the graph"):
        file = scratch / "reference.onnx"
        reference = export_graph("dense", folder, keep_all(model.groups), export, sizes.cases, file)
    note_refusals(rehearse(reference.path, model.groups).refused, log)
    with log.stage("building the engine of the whole model"):
        (scratch / "dense").mkdir()
        graph = shrink_graph(reference, sizes.cases, scratch / "dense" / "model.onnx")
        dense = build_variant(graph, choice.config.reference, sizes.build, sizes.cases)
    engines = PlanEngines(
        reference=reference,
        choice=choice,
        options=sizes.build,
        row=example_feeds(folder, 1, 8),  # ranges of activations, which times do not depend on
        drop_unread=drops_unread(recipe.export, recipe.engine),
        scratch=scratch / "plans",
    )
    inputs = example_feeds_by_size(folder, itertools.product(recipe.measure.batch, sizes.lengths))
    structure = folder.access.structure_with(model.groups)
    source = CostSource(structure, model.groups, engines, dense.engine, inputs, log)
    return tuple(source.time_tables(macs_of(source.count_tables())))
