"""Engines of plans whose weights do not matter: what a plan costs depends on its counts alone."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir

import graph_passes
from compressor.engines.build import ExportedGraph, build_engine
from compressor.engines.choices import Choice
from compressor.engines.matmul_times import MatmulTimes
from compressor.engines.quantize import quantize_as
from compressor.targets import BuildOptions, Engine
from compressor.targets.base import Feeds
from graph_passes import Plan
from graph_passes.passes import CleanUp, DropUnreadPositions, InsertProductGates, Normalize
from graph_passes.passes.insert_product_gates import products_of_groups
from graph_passes.passes.split_skip_norms import FUSED_NORM


@dataclass
class PlanEngines:
    """Builds the engine of any plan of one model, to time it.

    The graph of the whole model is written once, quantized where the engine is, and plans are carried out on it:
    quantizing a graph takes far longer than building its engine.

    Attributes:
        reference: the reference graph of the whole model, with a gate for each group.
        choice: target, precision and form of the engine.
        options: sizes and settings of the engine.
        row: an example row, from which the ranges of activations are taken; only where `choice` is quantized.
        drop_unread: whether positions that no output depends on are dropped.
        scratch: folder for graphs and engines.
        quantized: the quantized graph of the whole model, where there is one already; None: it is made when needed.
        unpruned: the engine of the whole model, where there is one already; None: it is built when needed.
        matmul_times: times of single products; only where `choice` mixes int8 and floats.
    """

    reference: ExportedGraph
    choice: Choice
    options: BuildOptions
    row: Feeds
    drop_unread: bool
    scratch: Path
    quantized: Path | None = None
    unpruned: Engine | None = None
    matmul_times: MatmulTimes | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False)
    _engine: Engine | None = field(default=None, init=False, repr=False)

    @property
    def reference_form(self) -> str:
        """Opset and numbers of operators of the reference graph, which depend on how it was exported."""
        graph = graph_passes.load(self.reference.path)
        return json.dumps([graph.opset_imports, Counter(node.op_type for node in graph.graph)], sort_keys=True)

    def graph(self, plan: Plan) -> ir.Model:
        """The graph of a plan, with the products and the positions of the graph of the whole model.

        Where a plan removes the last attentions, even fewer positions are read. They are still computed, because
        the cost of a group would otherwise depend on what is left of the others.
        """
        path, products = self._whole
        model = graph_passes.load(path)
        Normalize()(model)
        InsertProductGates(plan, products)(model)
        return graph_passes.shrink(model, plan).model

    def float_graph(self, plan: Plan) -> ir.Model:
        """The graph of a plan in floats, with the positions that are read."""
        return float_graph(self.reference.path, plan, drop_unread=self.drop_unread)

    def build(self, plan: Plan) -> Engine:
        """The engine of a plan, in a folder of its own, with normalizations in the form of the whole model's.

        The engine that is delivered has the form that is faster for it alone.
        """
        split_norms = FUSED_NORM not in self.whole.kernels
        return self._build(plan, replace(self.options, split_norms=split_norms, free_axes=False))

    @property
    def whole(self) -> Engine:
        """The engine of the whole model, built when it is needed."""
        if self.unpruned is not None:
            return self.unpruned
        if self._engine is None:
            self._engine = self._build(self.reference.plan, self.options)
        return self._engine

    def release(self) -> None:
        """Free the memory of the engine of the whole model, which is built again when it is needed."""
        if self._engine is not None:
            self.discard(self._engine)
            self._engine = None

    def _build(self, plan: Plan, options: BuildOptions) -> Engine:
        folder = self.scratch / f"plan{next(self._numbers)}"
        folder.mkdir(parents=True)
        graph = folder / "model.onnx"
        graph_passes.save(self.graph(plan), graph)
        config = self.choice.config
        if self.choice.mixes and self.matmul_times is not None:
            config, options = self.matmul_times.mixed(self.choice, graph, options, exact=False)
        return build_engine(graph, folder, config, options)

    def discard(self, engine: Engine) -> None:
        """Remove the files of an engine."""
        shutil.rmtree(engine.path.parent, ignore_errors=True)

    @functools.cached_property
    def _whole(self) -> tuple[Path, Mapping[str, tuple[str, ...]]]:
        """The graph of the whole model, in floats or quantized, and the products of each group."""
        gated = graph_passes.load(self.reference.path)
        Normalize()(gated)
        products = products_of_groups(gated)
        if self.quantized is not None:
            return self.quantized, products
        self.scratch.mkdir(parents=True, exist_ok=True)
        path = self.scratch / "whole.onnx"
        graph_passes.save(self.float_graph(self.reference.plan), path)
        if self.choice.quantized_graph is not None:
            path = quantize_as(self.choice.quantized_graph, path, [self.row]).path
        return path, products


def float_graph(reference: Path, plan: Plan, *, drop_unread: bool) -> ir.Model:
    """The graph of a plan in floats.

    Args:
        reference: the reference graph of the whole model, with a gate for each group.
        plan: the plan.
        drop_unread: whether positions that no output depends on are dropped.
    """
    shrunk = graph_passes.shrink(graph_passes.load(reference), plan).model
    if drop_unread:
        DropUnreadPositions()(shrunk)
        CleanUp()(shrunk)
    return shrunk
