"""What the steps and stages of a run share: the settings, the model, the rows, the sizes and the folder."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.config.run import Recipe
from compressor.config.steps import Blocks, Step, Within, part_of
from compressor.engines.build import ExportedGraph, ShrunkGraph, drops_unread, shrink_graph
from compressor.engines.export import export_graph
from compressor.engines.matmul_times import MatmulTimes
from compressor.engines.prove import Case, longest_text
from compressor.engines.score import EvaluationScorer
from compressor.engines.trials import EngineTrials
from compressor.model_folder import ModelFolder
from compressor.processes import RunProcesses
from compressor.progress import RunLog
from compressor.results import MissingTarget, Size, VariantName
from compressor.run.stages import Stages
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.targets import BuildOptions
from compressor.targets.base import Feeds
from compressor.tasks import Data
from compressor.units import PrunableGroup, Site
from compressor.workdir import WorkDir
from graph_passes import Plan

if TYPE_CHECKING:
    from compressor.block_masks.mask_selector import MaskSelector
    from compressor.generation.workload import Workload

_CANDIDATES_SHARE = 0.3
"""Share of the minutes of a run after which no further candidate for its engine is tried."""


@dataclass(frozen=True)
class LoadedModel:
    """The model of a run.

    Attributes:
        folder: the model with its tokenizer or processor.
        sites: its attention sites, in call order.
        groups: the groups of units that plans of the run list, in call order: of heads, and of neurons where any may be
            removed.
        missing: the requested target, if this machine lacks what it needs; None otherwise.
    """

    folder: ModelFolder
    sites: tuple[Site, ...]
    groups: tuple[PrunableGroup, ...] = ()
    missing: MissingTarget | None = None


@dataclass(frozen=True)
class RunSizes:
    """Every size that a run needs, worked out before anything is built.

    Attributes:
        lengths: lengths to time, in tokens; `(None,)` for a model of images or sound, which have one size.
        cases: inputs of the proofs.
        mask_reach: positions that the masks of the plan cover, or will cover; None without masks.
        longest_row: length at which a mask counts most: the longest row, at most `mask_reach`; None without masks.
        build: sizes and settings of the engines.
        beyond: lengths after which the model may compute something else, and which no case exceeds.
        workload: the requests that a model that generates is timed at; None: it is not exported with caches.
    """

    lengths: tuple[int | None, ...]
    cases: tuple[Case, ...]
    mask_reach: int | None
    longest_row: int | None
    build: BuildOptions
    beyond: tuple[int, ...] = ()
    workload: Workload | None = None


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
    def blocks(self) -> Blocks | None:
        """The options by which a step masks blocks of attention maps; None: no step masks any."""
        return part_of(self.steps, Blocks)

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
        selector: selects masks, and times the forms of masked attention; None: no mask is selected or followed.
        work: the folder of the run.
        log: receives stages and notes.
        state: the processes of the run.
        timed_inputs: inputs at every size that the run times, by batch size and length.
        matmul_times: times of single products, at these sizes.
    """

    built: Recipe
    sizes: RunSizes
    selector: MaskSelector | None
    work: WorkDir
    log: RunLog
    state: RunProcesses
    timed_inputs: Mapping[Size, Feeds]
    matmul_times: MatmulTimes

    @property
    def saves_dense(self) -> bool:
        """Whether the output folder gets the dense graph: on request, and where the machine lacks the target."""
        return self.model.missing is not None or self.recipe.output.save_dense

    @property
    def stages(self) -> Stages:
        """What the last stages of the run read."""
        sizes, scratch = self.sizes, self.work.scratch
        return Stages(self.built, self.data, sizes.cases, sizes.build, self.timed_inputs, scratch, self.log)

    def export(self, name: VariantName, plan: Plan, *, template: ExportedGraph | None = None) -> ExportedGraph:
        """Export one variant as a reference graph into the scratch folder."""
        with self.log.stage(f"{name}: exporting the graph"):
            parts = "" if template is None or template.name != name else ".pruned"  # beside that of every unit
            file = self.work.scratch / f"{name}{parts}.reference.onnx"
            folder, sizes, config = self.model.folder, self.sizes, self.built.export
            exported = export_graph(name, folder, plan, config, sizes.cases, file, template=template)
            if name == "dense" and sizes.beyond:
                from compressor.run.proof_lengths import prove_beyond  # which runs a module of PyTorch

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
        """Shrink one variant, whose masked sites in `lower` become block-sparse attention.

        The compressed variant goes into the output folder.
        """
        name = name or reference.name
        folder = self.work.result if name == "compressed" else self.work.scratch / name
        folder.mkdir(exist_ok=True)
        with self.log.stage(f"{name}: shrinking the graph"):
            file = folder / "model.onnx"
            return shrink_graph(reference, self.sizes.cases, file, name=name, lower=lower, drop_unread=drop_unread)

    def compress_graph(self, reference: ExportedGraph, plan: Plan, lower: Collection[str] = frozenset()) -> ShrunkGraph:
        """The graph without the units that a plan drops: that of the whole model, with the model's present weights."""
        gated = self.export("compressed", plan, template=reference)
        return self.shrink(gated, lower=lower, drop_unread=drops_unread(self.recipe.export, self.recipe.engine))

    def engine_trials(self, graph: ShrunkGraph, scorer: EvaluationScorer, scratch: Path) -> EngineTrials:
        """What candidates for the engine of a graph are built, scored and timed with, in a folder for all of them."""
        within = part_of(self.steps, Within)
        minutes = (within and within.minutes) or math.inf
        return EngineTrials(
            graph=graph,
            scorer=scorer,
            config=self.built.engine,
            options=self.sizes.build,
            cases=self.sizes.cases,
            inputs=self.timed_inputs,
            seconds=self.built.measure.seconds,
            matmul_times=self.matmul_times,
            scratch=scratch,
            log=self.log,
            deadline=self.log.start + 60 * _CANDIDATES_SHARE * minutes,
        )
