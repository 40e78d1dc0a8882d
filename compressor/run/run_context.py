"""What the stages of a run share: the recipe, the model, the rows, the sizes and the folder."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from dataclasses import dataclass

from accelerate import PartialState

from compressor.block_masks.attention_timer import find_attention_extras
from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.run import Recipe
from compressor.config.sections import EngineConfig
from compressor.model_folder import example_feeds, example_inputs
from compressor.model_folder.example_inputs import token_limit
from compressor.results import VariantName
from compressor.run import run_notes
from compressor.run.beyond_served import prove_beyond
from compressor.run.distillation.distill import distillation_of
from compressor.run.engine_choice.product_times import ProductTimes
from compressor.run.load import load_model, read_rows, with_row_layout
from compressor.run.plan_source import load_plan
from compressor.run.products import ExportedGraph, LoadedModel, RunSizes, SelectedPlan, ShrunkGraph, Variant
from compressor.run.proof_lengths import longest_text
from compressor.run.run_log import RunLog
from compressor.run.sizes import work_out_sizes
from compressor.run.variant import build_variant, cpu_fallback, export_graph, shrink_graph
from compressor.targets import DEFAULT_TARGET
from compressor.tasks import Data
from compressor.training.distillation import Distillation
from compressor.workdir import WorkDir
from graph_passes import Plan

_COPIES = 4
"""Minimum number of graphs of the model's size that are on the disk at the same time."""


@dataclass(frozen=True)
class RunContext:
    """What the stages of a run share.

    Attributes:
        recipe: what to do.
        built: the recipe by which engines are built: for the CPU where this machine lacks the target.
        model: the model.
        data: the rows; None: none are configured.
        followed: the plan to follow; None: a plan is learned.
        distillation: the loss of the distillation, with the model as it was loaded as its teacher; None: there is none.
        sizes: lengths, batch sizes and cases of the proofs.
        selector: selects masks, and times the forms of masked attention.
        work: the folder of the run.
        log: receives stages and notes.
        state: the processes of the run.
    """

    recipe: Recipe
    built: Recipe
    model: LoadedModel
    data: Data | None
    followed: SelectedPlan | None
    distillation: Distillation | None
    sizes: RunSizes
    selector: MaskSelector
    work: WorkDir
    log: RunLog
    state: PartialState

    @functools.cached_property
    def product_times(self) -> ProductTimes:
        """Times of single products, at the sizes that the run times."""
        sizes = itertools.product(self.recipe.measure.batch, self.sizes.lengths)
        return ProductTimes([example_feeds(self.model.folder, batch, seq) for batch, seq in sizes], self.log)

    @property
    def saves_dense(self) -> bool:
        """Whether the output folder gets the dense graph: on request, and where the machine lacks the target."""
        return self.model.missing is not None or self.recipe.output.save_dense

    def export(self, name: VariantName, plan: Plan, *, template: ExportedGraph | None = None) -> ExportedGraph:
        """Export one variant as a reference graph into the scratch folder."""
        with self.log.stage(f"{name}: exporting the graph"):
            file = self.work.scratch / f"{name}.reference.onnx"
            folder, sizes, config = self.model.folder, self.sizes, self.built.export
            exported = export_graph(name, folder, plan, config, sizes.cases, file, template=template)
            if name == "dense" and sizes.beyond:
                exported, notes = prove_beyond(folder, exported, sizes.beyond, config, longest_text(sizes.cases))
                self.log.add_notes(notes)
            return exported

    def shrink(
        self,
        reference: ExportedGraph,
        *,
        name: VariantName | None = None,
        lower: Collection[str] = (),
        drop_unread: bool = False,
    ) -> ShrunkGraph:
        """Shrink one variant; the compressed one goes into the output folder.

        Args:
            reference: its reference graph.
            name: its name, where it is not that of the reference graph.
            lower: masked sites that become block-sparse attention.
            drop_unread: whether positions that no output depends on are not computed.
        """
        name = name or reference.name
        folder = self.work.result if name == "compressed" else self.work.scratch / name
        folder.mkdir(exist_ok=True)
        with self.log.stage(f"{name}: shrinking the graph"):
            file = folder / "model.onnx"
            return shrink_graph(reference, self.sizes.cases, file, name=name, lower=lower, drop_unread=drop_unread)

    def build(self, graph: ShrunkGraph, config: EngineConfig) -> Variant:
        """Build the engine of one variant."""
        with self.log.stage(f"{graph.name}: building the engine"):
            return build_variant(graph, config, self.sizes.build, self.sizes.cases)


def load_context(recipe: Recipe, work: WorkDir, log: RunLog, state: PartialState) -> RunContext:
    """Load the model, the rows and the plan to follow, and work out the sizes.

    Args:
        recipe: what to do.
        work: the folder of the run, in which disk space is reserved.
        log: receives stages and notes.
        state: the processes of the run.
    """
    with log.stage("loading the model"):
        model = load_model(recipe)
        work.reserve(_COPIES * sum(weight.nbytes for weight in model.folder.model.state_dict().values()))
    built = recipe if model.missing is None else cpu_fallback(recipe)
    if model.missing is not None:
        log.add_notes([run_notes.missing_target_note(model.missing)])
    data = None
    if recipe.rows.available:
        with log.stage("reading the rows"):
            data = read_rows(recipe, model)
            model = with_row_layout(model, data)
    distillation = distillation_of(recipe, model, data) if recipe.distills and data is not None else None
    followed = load_plan(recipe, model)
    log.add_notes(model.folder.notes)
    log.add_notes(data.notes if data else ())
    log.add_notes(run_notes.unused_field_notes(recipe, token_limit(model.folder.model), learns=followed is None))
    log.add_notes(run_notes.order_notes(recipe))
    sizes = work_out_sizes(recipe, model, data, followed)
    selector = _mask_selector(recipe, model, sizes)
    return RunContext(recipe, built, model, data, followed, distillation, sizes, selector, work, log, state)


def timed_recipe(recipe: Recipe) -> Recipe:
    """The recipe that attention is timed with: single attentions are timed only with ONNX Runtime."""
    return recipe if recipe.engine.target == DEFAULT_TARGET else cpu_fallback(recipe)


def _mask_selector(recipe: Recipe, model: LoadedModel, sizes: RunSizes) -> MaskSelector:
    """The selector of masks, which times the forms of masked attention at the sizes of the run."""
    extras = {}
    if sizes.mask_reach is not None:
        extras = find_attention_extras(model.folder.model, example_inputs(model.folder, 2, 8))
    lengths = [seq for seq in sizes.lengths if seq is not None]
    return MaskSelector(timed_recipe(recipe), lengths, sizes.longest_row, extras)
