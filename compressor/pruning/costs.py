"""What plans cost: the graph and the engine of a plan, and tables of the parameters and multiply-accumulates that units
account for, which are counted in graphs."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

import graph_passes
from compressor.engines.build import ExportedGraph, build_engine
from compressor.engines.choices import Choice
from compressor.engines.matmul_times import MatmulTimes
from compressor.engines.quantize import quantize_as
from compressor.errors import ErrorCode, InputError
from compressor.measure import macs
from compressor.measure.costs import CostTable, GroupCosts
from compressor.measure.macs import uncounted_node
from compressor.progress import ProgressCallback
from compressor.results import CostUnit
from compressor.targets import BuildOptions, Engine
from compressor.targets.base import Feeds, Shape
from compressor.units import PrunableGroup
from graph_passes import Plan
from graph_passes.passes import CleanUp, DropUnreadPositions, InsertProductGates, Normalize
from graph_passes.passes.insert_product_gates import products_of_groups
from graph_passes.passes.split_skip_norms import FUSED_NORM

Counts = dict[str, int]
"""Name of the group -> number of units."""
Savings = dict[int, np.ndarray]
"""Number of units -> what a group saves of each total, at the numbers between which savings are linear."""


def keep_counts(plan: Plan, groups: Sequence[PrunableGroup], counts: Mapping[str, int]) -> Plan:
    """The plan that keeps the first units of some groups, and in a group of several parts the first units of each.

    Args:
        plan: a plan that keeps every unit.
        groups: the groups.
        counts: name of the group -> number of units that are kept; the others keep all.
    """
    return plan.replace_groups(
        replace(plan[group.name], kept=group.first(counts[group.name]), scale=())
        for group in groups
        if group.name in counts
    )


class PlanBuilder(ABC):
    """Builds the engine of any plan of one model, to time it.

    Attributes:
        plan: the plan that keeps every unit.
        label: target, precision and form of the engines.
        shapes: fixed shapes that engines are compiled for.
    """

    plan: Plan
    label: str
    shapes: Sequence[Shape]

    @property
    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What the times of the engines depend on, besides the structure of the model and the machine, by name."""

    @property
    @abstractmethod
    def whole(self) -> Engine:
        """The engine of the whole model, built when it is needed."""

    @abstractmethod
    def build(self, plan: Plan) -> Engine:
        """The engine of a plan, in a folder of its own."""

    @abstractmethod
    def float_graph(self, plan: Plan) -> ir.Model:
        """The graph of a plan in floats, which reads whole texts, with the positions that are read."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory of engines that are built again when they are needed."""

    def discard(self, engine: Engine) -> None:
        """Remove the files of an engine."""
        shutil.rmtree(engine.path.parent, ignore_errors=True)


@dataclass
class PlanEngines(PlanBuilder):
    """Builds the engine of any plan of one model, which reads whole texts.

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

    def __post_init__(self) -> None:
        self.plan, self.label, self.shapes = self.reference.plan, self.choice.label, self.options.shapes

    @property
    def facts(self) -> dict[str, str]:
        """Form of the engine; opset and numbers of operators of the reference graph; see `PlanBuilder.facts`."""
        graph = graph_passes.load(self.reference.path)
        form = [graph.opset_imports, Counter(node.op_type for node in graph.graph)]
        return {
            "engine": f"{self.label}, unread positions dropped: {self.drop_unread}",
            "products in fp32": json.dumps(self.choice.in_float),
            "graph": json.dumps(form, sort_keys=True),
        }

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
        """See `PlanBuilder.float_graph`."""
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

    def new_folder(self) -> Path:
        """A new folder for the graph and the engine of a plan."""
        folder = self.scratch / f"plan{next(self._numbers)}"
        folder.mkdir(parents=True)
        return folder

    def _build(self, plan: Plan, options: BuildOptions) -> Engine:
        folder = self.new_folder()
        graph = folder / "model.onnx"
        graph_passes.save(self.graph(plan), graph)
        config = self.choice.config
        if self.choice.mixes and self.matmul_times is not None:
            config, options = self.matmul_times.mixed(self.choice, graph, options, exact=False)
        return build_engine(graph, folder, config, options)

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


def count_costs(
    graph_of: Callable[[Plan], ir.Model],
    plan: Plan,
    groups: Sequence[PrunableGroup],
    sizes: Sequence[tuple[int, int | None]],
    on_progress: ProgressCallback,
) -> list[CostTable]:
    """Tables of parameters, and of multiply-accumulates at each size, by counting those of graphs; see `count_tables`.

    Args:
        graph_of: gives the graph of a plan, in floats.
        plan: the plan that keeps every unit.
        groups: the groups.
        sizes: the sizes.
        on_progress: called with (groups, all groups).

    Raises:
        InputError: the shapes of a product are unknown.
    """
    counters: dict[tuple[CostUnit, int, int | None], Callable[[ir.Model], int]]
    counters = {("parameters", 0, None): graph_passes.count_parameters}
    counters |= {("macs", batch, seq): partial(_macs, batch=batch, seq=seq or 1) for batch, seq in sizes}
    return count_tables(graph_of, plan, groups, counters, on_progress)


def _macs(model: ir.Model, batch: int, seq: int) -> int:
    """Multiply-accumulates of a graph; InputError if the shapes of a product are unknown."""
    count = macs(model, batch, seq)
    if count is None:
        product = uncounted_node(model, batch, seq)
        raise InputError(
            f"{product}: the shapes of this product depend on the rows, so its multiply-accumulates cannot be"
            " counted, which a budget needs; choose a number of heads (--keep)",
            code=ErrorCode.UNSUPPORTED_MODEL,
            product=product,
        )
    return count


def count_tables(
    graph_of: Callable[[Plan], ir.Model],
    plan: Plan,
    groups: Sequence[PrunableGroup],
    counters: Mapping[tuple[CostUnit, int, int | None], Callable[[ir.Model], int]],
    on_progress: ProgressCallback,
) -> list[CostTable]:
    """Tables of what is counted in graphs.

    Costs are taken as linear in the number of units; see `_GraphCounts.savings` for the exception. A group that keeps
    nothing can also lose its norm, so its saving at zero units is a lower bound.

    Args:
        graph_of: gives the graph of a plan, in floats.
        plan: the plan that keeps every unit.
        groups: the groups.
        counters: unit, batch size and length of each table -> what counts the cost of a graph.
        on_progress: called with (groups, all groups).
    """
    graphs = _GraphCounts(graph_of, plan, groups, counters)
    counted = _representatives(groups)
    savings: dict[str, Savings] = {}

    def count(group: PrunableGroup) -> None:
        if group.name not in savings:
            on_progress(len(savings), len(groups))
            savings[group.name] = graphs.savings(group)

    for group in counted.values():
        count(group)
    tables = graphs.tables({group.name: savings[counted[group.name].name] for group in groups})
    if len(savings) < len(groups) and not graphs.agree(tables):
        for group in groups:
            count(group)
        tables = graphs.tables(savings)
    on_progress(len(groups), len(groups))
    return tables


@dataclass(frozen=True)
class _GraphCounts:
    """Counts costs in the graphs of plans; see `count_tables` for the attributes."""

    graph_of: Callable[[Plan], ir.Model]
    plan: Plan
    groups: Sequence[PrunableGroup]
    counters: Mapping[tuple[CostUnit, int, int | None], Callable[[ir.Model], int]]

    @functools.cached_property
    def totals(self) -> np.ndarray:
        """What the whole model costs."""
        return self._count(self.graph_of(self.plan))

    def saved(self, counts: Counts) -> np.ndarray:
        """What a plan saves of each total."""
        return self.totals - self._count(self.graph_of(keep_counts(self.plan, self.groups, counts)))

    def savings(self, group: PrunableGroup) -> Savings:
        """What a group saves on its own.

        A group of several parts saves more with its last units: the keys and values that all of its query heads share
        go with these.
        """
        middle = group.counts[(len(group.counts) - 1) // 2]  # below all units, even where these are a single bundle
        slopes = self.saved({group.name: middle}) / (group.units - middle)
        first = 0 if group.parts == 1 else group.multiple
        savings = {count: slopes * (group.units - count) for count in (first, group.units)}
        return savings if first == 0 else {0: self.saved({group.name: 0}), **savings}

    def tables(self, savings: Mapping[str, Savings]) -> list[CostTable]:
        """A table of each total, by the savings of each group."""
        return [
            CostTable(
                unit=unit,
                batch=batch,
                seq=seq,
                dense=total,
                whole=total,
                rows=tuple(
                    GroupCosts(
                        groups=(group.name,),
                        type=group.type,
                        counts=tuple(savings[group.name]),
                        savings=tuple(float(saved[number]) for saved in savings[group.name].values()),
                    )
                    for group in self.groups
                ),
            )
            for number, ((unit, batch, seq), total) in enumerate(zip(self.counters, self.totals.tolist(), strict=True))
        ]

    def agree(self, tables: Sequence[CostTable]) -> bool:
        """Whether tables give the counts of a graph in which every group keeps another number of units."""
        counts = {group.name: group.counts[1:-1] for group in self.groups}
        drawn = {name: numbers[index % len(numbers)] for index, (name, numbers) in enumerate(counts.items()) if numbers}
        return np.allclose([table.cost(drawn) for table in tables], self.totals - self.saved(drawn), rtol=1e-9)

    def _count(self, model: ir.Model) -> np.ndarray:
        return np.array([count(model) for count in self.counters.values()], float)


def _representatives(groups: Sequence[PrunableGroup]) -> dict[str, PrunableGroup]:
    """Name of the group -> the group that is counted for it, since a graph takes long to shrink.

    Groups whose names differ in numbers alone are those of similar layers. The last of them has its own counts: its
    layer may compute fewer positions. Groups of several parts have their own too: layers may share keys and values.
    """
    classes: dict[object, list[PrunableGroup]] = {}
    for group in groups:
        is_linear = group.parts == 1 and len(group.counts) > 2
        pattern = re.sub(r"\d+", "#", group.name) if is_linear else group.name
        classes.setdefault((pattern, group.type, group.counts, group.width), []).append(group)
    return {
        group.name: group if group is members[-1] else members[0] for members in classes.values() for group in members
    }
