"""What plans of a model that generates cost: the time of its calls, and the bytes that a token adds to its caches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir

import graph_passes
from compressor.generation.deliver import CachedGraphs, build_plan, dense_engines, shrink_whole
from compressor.generation.workload import CachedEngine, Workload
from compressor.measure.costs import CostTable
from compressor.progress import ProgressCallback, RunLog
from compressor.pruning.costs import PlanEngines, count_tables
from compressor.pruning.measure import CostSource
from compressor.results import Size
from compressor.targets import target
from compressor.targets.caches import DECODER
from compressor.units import PrunableGroup
from graph_passes import Plan
from graph_passes.flow.caches import bytes_per_token


@dataclass(kw_only=True)
class RequestEngines(PlanEngines):
    """Builds the engines with caches of any plan of a model that generates, to time their calls.

    Attributes:
        cached: the graphs of the whole model.
        workload: the requests whose calls are timed.
    """

    cached: CachedGraphs
    workload: Workload
    _whole_engine: CachedEngine | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, texts: PlanEngines, cached: CachedGraphs, workload: Workload) -> RequestEngines:
        """The engines with caches beside those that read whole texts."""
        return cls(
            reference=texts.reference,
            choice=texts.choice,
            options=texts.options,
            row=texts.row,
            drop_unread=texts.drop_unread,
            scratch=texts.scratch,
            cached=cached,
            workload=workload,
        )

    def source(
        self,
        structure: str,
        groups: Sequence[PrunableGroup],
        texts: Sequence[Size],
        log: RunLog,
        *,
        counts_cache: bool = False,
    ) -> CostSource:
        """What plans cost in requests.

        Args:
            structure: what times depend on of the model.
            groups: the groups.
            texts: sizes of whole texts, at which multiply-accumulates are counted.
            log: receives stages and notes.
            counts_cache: whether the bytes that a token adds to the caches are counted too.
        """
        inputs = self.workload.feeds(self.cached.folder, self.whole.sessions.vocabulary)
        further = [partial(count_cache, self.cached)] if counts_cache else []
        requests = self.workload.requests
        return CostSource(
            structure, groups, self, self.whole, inputs, log, requests=requests, counted=texts, further=further
        )

    @property
    def reference_form(self) -> str:
        """Opset and numbers of operators of the graphs, which depend on how they were exported, and the new tokens."""
        graphs = [graph_passes.load(self.cached.folder / name) for name in self.cached.files]
        forms = [[graph.opset_imports, Counter(node.op_type for node in graph.graph)] for graph in graphs]
        return json.dumps([forms, self.workload.new_tokens], sort_keys=True, default=str)

    def build(self, plan: Plan) -> CachedEngine:
        """The engines of a plan, in a folder of their own."""
        folder = self.scratch / f"plan{next(self._numbers)}"
        folder.mkdir(parents=True)
        config = self.choice.config
        return build_plan(self.cached, plan, target(config.target), self.workload, folder, config.threads)

    @property
    def whole(self) -> CachedEngine:
        """The engines of the whole model, built when they are needed."""
        if self._whole_engine is None:
            config = self.choice.config
            runtime = target(config.target)
            self._whole_engine = dense_engines(self.cached, runtime, self.workload, config.threads)
        return self._whole_engine

    def release(self) -> None:
        """Do nothing: the engines of the whole model are also those that requests are compared with."""


def count_cache(
    cached: CachedGraphs, plan: Plan, groups: Sequence[PrunableGroup], on_progress: ProgressCallback
) -> CostTable:
    """The table of the bytes that a token adds to the caches, by counting those of graphs.

    Args:
        cached: the graphs of the whole model.
        plan: the plan that keeps every unit.
        groups: the groups.
        on_progress: called with (groups, all groups).
    """

    def decoder(pruned: Plan) -> ir.Model:
        return shrink_whole(cached, pruned)[DECODER]

    (table,) = count_tables(decoder, plan, groups, {("cache", 0, None): bytes_per_token}, on_progress)
    return table
