"""What the steps and stages of a run share: the settings, the model, the rows, the sizes and the folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from accelerate import PartialState

from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.run import Recipe
from compressor.config.sections import EngineConfig
from compressor.config.steps import Step
from compressor.results import VariantName
from compressor.run.beyond_served import prove_beyond
from compressor.run.engine_choice.product_times import ProductTimes
from compressor.run.products import ExportedGraph, LoadedModel, RunSizes, SelectedPlan, ShrunkGraph, Variant
from compressor.run.proof_lengths import longest_text
from compressor.run.run_log import RunLog
from compressor.run.variant import build_variant, export_graph, shrink_graph
from compressor.tasks import Data
from compressor.workdir import WorkDir
from graph_passes import Plan


@dataclass(frozen=True)
class RunInputs:
    """What a run reads.

    Attributes:
        recipe: the settings of the run.
        steps: what it does to the model, in order.
        model: the model.
        data: the rows; None: none are configured.
        followed: the plan that the first step follows; None: none is followed.
    """

    recipe: Recipe
    steps: tuple[Step, ...]
    model: LoadedModel
    data: Data | None
    followed: SelectedPlan | None

    @property
    def rows(self) -> Data:
        """The rows, which every step but `Follow` needs."""
        assert self.data is not None
        return self.data


@dataclass(frozen=True)
class RunContext(RunInputs):
    """What the steps and stages of a run share.

    Attributes:
        built: the recipe by which engines are built: for the CPU where this machine lacks the target.
        sizes: lengths, batch sizes and cases of the proofs.
        selector: selects masks, and times the forms of masked attention.
        work: the folder of the run.
        log: receives stages and notes.
        state: the processes of the run.
        product_times: times of single matmuls, at the sizes that the run times.
    """

    built: Recipe
    sizes: RunSizes
    selector: MaskSelector
    work: WorkDir
    log: RunLog
    state: PartialState
    product_times: ProductTimes

    def without_notes(self) -> RunContext:
        """The run with a log of its own for notes, which the report does not show."""
        return replace(self, log=self.log.without_notes())

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
