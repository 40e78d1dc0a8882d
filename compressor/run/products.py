"""The products of a run's stages, as frozen data; each is made by one stage and read by later ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compressor.config.sections import EngineConfig
from compressor.results import (
    BudgetRow,
    Candidate,
    CertifiedLoss,
    CostShare,
    CurvePoint,
    EngineFacts,
    MissingTarget,
    Note,
    Proof,
    Speed,
    Throughput,
    VariantName,
    loss_of,
)
from compressor.targets import BuildOptions, Engine, target
from compressor.targets.base import Feeds
from graph_passes import Plan, Refusal

if TYPE_CHECKING:  # proofs of graphs need neither PyTorch nor transformers
    from compressor.model_folder import ModelFolder
    from compressor.tasks import Task
    from compressor.units import PrunableGroup, Site


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
class SelectedPlan:
    """A plan and where it came from.

    Attributes:
        plan: one entry a site, with the fingerprint of the weights that it belongs to.
        curves: quantities logged while it was learned.
        trained: whether the model's weights were trained with it.
        notes: notes for the readers of the report.
        budget: the budgets that it meets; empty without one.
        costs: where the cost goes, before and after; empty without a budget.
        certificate: the loss that is certified; None where no certificate was requested.
        engine: label of the engine that units were removed for; empty without a budget.
        weights: folder of the weights that the plan belongs to; None: the model has them.
    """

    plan: Plan
    curves: tuple[CurvePoint, ...] = ()
    trained: bool = False
    notes: tuple[Note, ...] = ()
    budget: tuple[BudgetRow, ...] = ()
    costs: tuple[CostShare, ...] = ()
    certificate: CertifiedLoss | None = None
    engine: str = ""
    weights: Path | None = None


@dataclass(frozen=True)
class Case:
    """One batch of inputs for the proofs.

    Attributes:
        feeds: input name -> array.
        name: description for readers: `batch 2, length 17, padded`.
    """

    feeds: Feeds
    name: str


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
    """

    lengths: tuple[int | None, ...]
    cases: tuple[Case, ...]
    mask_reach: int | None
    longest_row: int | None
    build: BuildOptions
    beyond: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExportedGraph:
    """The reference graph of a plan, which still contains every unit, gated.

    Attributes:
        name: the variant that it belongs to.
        plan: the plan whose gates and masks it holds.
        path: its file.
        proof: gated model = reference graph.
    """

    name: VariantName
    plan: Plan
    path: Path
    proof: Proof


@dataclass(frozen=True)
class ShrunkGraph:
    """The graph without the units that its plan drops.

    Attributes:
        name: the variant that it belongs to.
        plan: the plan as it was carried out, see `graph_passes.Shrunk`.
        path: its file.
        proofs: gated model = reference graph, and reference graph = shrunk graph.
        lowered: masked sites that are block-sparse in the graph.
        dense: masked sites that were to be block-sparse, with the operator that prevents it.
        unused: site -> number of key blocks that are not projected.
        thinned: names of the products that compute only the positions that are read.
        shared: sites whose dropped queries or keys are still computed, because a norm reads all heads; with that norm.
    """

    name: VariantName
    plan: Plan
    path: Path
    proofs: tuple[Proof, ...]
    lowered: tuple[str, ...] = ()
    dense: tuple[Refusal, ...] = ()
    unused: Mapping[str, int] = field(default_factory=dict)
    thinned: tuple[str, ...] = ()
    shared: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One side of the comparison, ready to be scored and timed.

    Attributes:
        graph: the graph that the engine was built from.
        engine: the loaded engine.
        proofs: the proofs of the graph, and shrunk graph = engine.
    """

    graph: ShrunkGraph
    engine: Engine
    proofs: tuple[Proof, ...]

    @property
    def name(self) -> VariantName:
        """`dense`, `rewritten` or `compressed`."""
        return self.graph.name


@dataclass(frozen=True)
class ScoredAnswers:
    """The answers of an engine to the evaluation rows.

    Attributes:
        statistics: sufficient statistics of the metric, `[examples, statistics]`; `[0, 0]` where rows have no labels.
        ids: ids of the answers, `[answers]`; None: those of the task are not compared one by one.
    """

    statistics: np.ndarray
    ids: np.ndarray | None = None


PORTABLE, SYMMETRIC, DYNAMIC = "portable", "symmetric", "dynamic"
"""Forms of an engine in 8 bits: built from the portable or a symmetric quantized graph, or quantized by the target."""

MIXED = "where faster"
"""Part of the label of an engine in 8 bits that computes in floats what is slower in int8."""


@dataclass(frozen=True)
class Choice:
    """The settings of an engine.

    Attributes:
        config: target and precision.
        form: `PORTABLE`, `SYMMETRIC` or `DYNAMIC` for an engine in 8 bits; empty for an engine in floats.
        mixes: whether products stay in floats whose widths are slower in int8 on this machine.
        in_float: names of the products of the quantized graph that were returned to floats, for a proof or the metric.
    """

    config: EngineConfig
    form: str = ""
    in_float: tuple[str, ...] = ()
    mixes: bool = False

    @property
    def row(self) -> Candidate:
        """The row of a table of candidates, without measurements."""
        count = len(self.in_float)
        returned = f"{count} product{'s' if count > 1 else ''} in floats" if count else ""
        form = ", ".join(filter(None, (self.form, MIXED if self.mixes else "", returned)))
        return Candidate(target=self.config.target, precision=self.config.precision, form=form, in_float=self.in_float)

    @property
    def quantized_graph(self) -> str | None:
        """Name of the quantized graph that it is built from; None: it is built from the float graph."""
        if self.form not in (PORTABLE, SYMMETRIC):
            return None
        return target(self.config.target).quantized_graph(self.config.definite_precision)

    @property
    def label(self) -> str:
        """The settings for readers, e.g. `openvino int8 portable`."""
        return self.row.label


@dataclass(frozen=True)
class ChosenEngine:
    """The engine to deliver, and the table that it was chosen from.

    Attributes:
        variant: the engine, in the output folder.
        choice: its settings.
        candidates: every engine that was tried; empty where the recipe names one.
        source: the quantized graph that it was built from; None: a float graph, or the recipe names the engine.
        scored: its answers to the evaluation rows; None: they have no labels, or the recipe names the engine.
        runner_up: an engine that is nearly as fast; None: there is none.
    """

    variant: Variant
    choice: Choice
    candidates: tuple[Candidate, ...] = ()
    source: Path | None = None
    scored: ScoredAnswers | None = None
    runner_up: ChosenEngine | None = None

    def lost(self, task: Task) -> float:
        """What the engine loses of the metric on the evaluation rows, in the metric's unit; negative if it gains."""
        row = next((row for row in self.candidates if row.chosen), None)
        difference = 0.0 if row is None else row.difference or 0.0
        return loss_of(difference, higher_is_better=task.higher_is_better)


@dataclass(frozen=True)
class Measurements:
    """The measurements of both engines.

    Attributes:
        speeds: times at each size.
        facts: sizes, memory and operators of each engine.
        speeds_over_rewritten: times of the rewritten dense engine and the compressed one; empty where they are equal.
        throughputs: rows per second at each size; empty where several callers are impossible.
    """

    speeds: tuple[Speed, ...]
    facts: Mapping[VariantName, EngineFacts]
    speeds_over_rewritten: tuple[Speed, ...] = ()
    throughputs: tuple[Throughput, ...] = ()
