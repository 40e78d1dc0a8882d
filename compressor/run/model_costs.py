"""The cost tables of a model without pruning it: what its heads and neurons cost, counted or measured on one engine."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

from compressor.config.run import Recipe
from compressor.config.sections import EngineConfig
from compressor.engines.build import build_variant, drops_unread, shrink_graph
from compressor.engines.choices import DYNAMIC, PORTABLE, SYMMETRIC, Choice
from compressor.engines.export import export_graph, rehearse
from compressor.measure.costs import CostTable
from compressor.model_folder import example_feeds, example_feeds_by_size, example_inputs
from compressor.progress import Listener, NullListener, RunLog
from compressor.pruning.allocate import macs_of
from compressor.pruning.costs import PlanEngines
from compressor.pruning.measure import CostSource, structure_of
from compressor.quantization import require_nncf
from compressor.run.model_units import load_units, note_refusals
from compressor.run.prunable_groups import expert_notes
from compressor.run.run_context import LoadedModel, RunInputs
from compressor.run.sizes import work_out_sizes
from compressor.targets import QUANTIZED, target
from compressor.units import keep_all


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

    Args:
        recipe: the model, the engine, and the sizes to time.
        listener: receives stages, progress and notes.

    Returns:
        A table of median times of a call in ms for each size, in the order of the recipe's batch sizes and lengths.

    Raises:
        UsageError: the engine is to be chosen.
        TargetMissingError: the runtime, its device or the quantizer is missing.
        InputError: the model folder or a length cannot be used.
    """
    engine = recipe.engine
    engine.require_definite()
    choice = Choice(engine, _form(engine))
    target(engine.target).check(precision=engine.definite_precision, provider=engine.provider)
    if choice.form == PORTABLE:
        require_nncf()
    log = RunLog(listener or NullListener())
    with log.stage("loading the model"):
        model = load_units(recipe)
    log.add_notes(expert_notes(model))
    example_inputs(model.folder, 1, max(recipe.measure.seq or (1,)))  # lengths beyond the model end here
    with tempfile.TemporaryDirectory() as scratch:
        tables = _measure(recipe, model, choice, Path(scratch), log)
    return ModelCosts(recipe.source.model.resolve().name, choice.label, tables)


def _form(config: EngineConfig) -> str:
    """The form of an engine whose cost is measured."""
    runtime = target(config.target)
    if config.precision not in QUANTIZED:
        return ""
    if runtime.quantizes and config.precision == "int8":
        return DYNAMIC
    return SYMMETRIC if runtime.symmetric else PORTABLE


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
    source = CostSource(structure_of(folder.model, model.groups), model.groups, engines, dense.engine, inputs, log)
    return tuple(source.time_tables(macs_of(source.count_tables())))
