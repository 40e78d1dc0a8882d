"""What plans of a model that generates cost: the time of its calls, and the bytes that a token adds to its caches."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

import graph_passes
from compressor.generation.deliver import CachedGraphs, build_plan, dense_engines, shrink_whole
from compressor.generation.workload import CachedEngine, Workload
from compressor.measure.costs import CostTable
from compressor.progress import ProgressCallback, RunLog
from compressor.pruning.costs import PlanBuilder, PlanEngines, count_tables
from compressor.pruning.measure import CostSource
from compressor.results import Size
from compressor.targets import target
from compressor.targets.base import WeightPrecision
from compressor.targets.caches import DECODER
from compressor.units import PrunableGroup
from graph_passes import Plan
from graph_passes.flow.caches import bytes_per_token


@dataclass
class RequestEngines(PlanBuilder):
    """Builds the engines with caches of any plan of a model that generates, to time their calls.

    Attributes:
        texts: builds the engines that read whole texts.
        cached: the graphs of the whole model.
        workload: the requests whose calls are timed.
        weights: the precision of the decoder's weights; None: floats.
    """

    texts: PlanEngines
    cached: CachedGraphs
    workload: Workload
    weights: WeightPrecision | None = None

    def __post_init__(self) -> None:
        self.plan, self.label, self.shapes = self.texts.plan, self.texts.label, self.texts.shapes
        if self.weights is not None:
            self.label = f"{self.texts.choice.config.target} {self.weights}"

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
            texts: sizes of whole texts, at which multiply-accumulates are counted.
            counts_cache: whether the bytes that a token adds to the caches are counted too.
        """
        dense = self._engines_of_whole(None)  # budgets refer to floats
        inputs = self.workload.feeds(self.cached.folder, dense.sessions.vocabulary)
        further = [partial(count_cache, self.cached)] if counts_cache else []
        requests = self.workload.requests
        return CostSource(
            structure, groups, self, dense, inputs, log, requests=requests, counted=texts, further=further
        )

    @property
    def facts(self) -> dict[str, str]:
        """As of whole texts, but for the graphs, whose times depend on the new tokens; see `PlanBuilder.facts`."""
        graphs = [graph_passes.load(self.cached.folder / name) for name in self.cached.files]
        forms = [[graph.opset_imports, Counter(node.op_type for node in graph.graph)] for graph in graphs]
        graph = json.dumps([forms, self.workload.new_tokens], sort_keys=True, default=str)
        return self.texts.facts | {"graph": graph} | ({} if self.weights is None else {"weights": self.weights})

    def build(self, plan: Plan) -> CachedEngine:
        """See `PlanBuilder.build`."""
        folder, config = self.texts.new_folder(), self.texts.choice.config
        runtime = target(config.target)
        return build_plan(self.cached, plan, runtime, self.workload, folder, config.threads, self.weights)

    @functools.cached_property
    def whole(self) -> CachedEngine:
        """See `PlanBuilder.whole`."""
        return self._engines_of_whole(self.weights)

    def _engines_of_whole(self, weights: WeightPrecision | None) -> CachedEngine:
        config = self.texts.choice.config
        return dense_engines(self.cached, target(config.target), self.workload, config.threads, weights)

    def float_graph(self, plan: Plan) -> ir.Model:
        """See `PlanBuilder.float_graph`."""
        return self.texts.float_graph(plan)

    def release(self) -> None:
        """Keep the engines: requests are compared with those of the whole model."""


def count_cache(
    cached: CachedGraphs, plan: Plan, groups: Sequence[PrunableGroup], on_progress: ProgressCallback
) -> CostTable:
    """The table of the bytes that a token adds to the caches, by counting those of graphs."""

    def decoder(pruned: Plan) -> ir.Model:
        return shrink_whole(cached, pruned)[DECODER]

    (table,) = count_tables(decoder, plan, groups, {("cache", 0, None): bytes_per_token}, on_progress)
    return table
