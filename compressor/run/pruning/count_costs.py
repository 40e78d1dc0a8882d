"""Count the parameters and multiply-accumulates of a cost table in the graphs of some plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

import graph_passes
from compressor.errors import ErrorCode, InputError
from compressor.measure import macs
from compressor.measure.costs import CostTable, GroupCosts
from compressor.measure.macs import uncounted_node
from compressor.progress import ProgressCallback
from compressor.run.pruning.measure_times import Counts, Size, keep_counts
from compressor.units import PrunableGroup
from graph_passes import Plan

Savings = dict[int, np.ndarray]
"""Number of units -> what a group saves of each total, at the numbers between which savings are linear."""


def count_costs(
    graph_of: Callable[[Plan], ir.Model],
    plan: Plan,
    groups: Sequence[PrunableGroup],
    sizes: Sequence[Size],
    on_progress: ProgressCallback,
) -> list[CostTable]:
    """Tables of parameters, and of multiply-accumulates at each size, by counting those of graphs.

    Both are taken as linear in the number of units; see `_GraphCounts.savings` for the exception. A group that keeps
    nothing can also lose its norm, so its saving at zero units is a lower bound.

    Args:
        graph_of: gives the graph of a plan, in floats.
        plan: the plan that keeps every unit.
        groups: the groups.
        sizes: the sizes.
        on_progress: called with (groups, all groups).

    Raises:
        InputError: the shapes of a product are unknown.
    """
    graphs = _GraphCounts(graph_of, plan, groups, sizes)
    for batch, seq in sizes:
        if (product := uncounted_node(graphs.whole, batch, seq or 1)) is not None:
            raise InputError(
                f"{product}: the shapes of this product depend on the rows, so that its multiply-accumulates cannot be"
                " counted, which a budget needs; choose a number of heads (--keep)",
                code=ErrorCode.UNSUPPORTED_MODEL,
                product=product,
            )
    counted = _representatives(groups)
    savings: dict[str, Savings] = {}

    def count(group: PrunableGroup) -> None:
        if group.name not in savings:
            on_progress(len(savings), len(groups))
            savings[group.name] = graphs.savings(group)

    for group in counted.values():
        count(group)
    tables = _tables(graphs, {group.name: savings[counted[group.name].name] for group in groups})
    if len(savings) < len(groups) and not _agree(tables, graphs):
        for group in groups:
            count(group)
        tables = _tables(graphs, savings)
    on_progress(len(groups), len(groups))
    return tables


@dataclass(frozen=True)
class _GraphCounts:
    """Counts parameters, and multiply-accumulates at each size, in the graphs of plans."""

    graph_of: Callable[[Plan], ir.Model]
    plan: Plan
    groups: Sequence[PrunableGroup]
    sizes: Sequence[Size]

    @cached_property
    def whole(self) -> ir.Model:
        """The graph of the whole model."""
        return self.graph_of(self.plan)

    @cached_property
    def totals(self) -> np.ndarray:
        """What the whole model costs."""
        return self._count(self.whole)

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
        first = 0 if group.parts == 1 else group.step
        savings = {count: slopes * (group.units - count) for count in (first, group.units)}
        return savings if first == 0 else {0: self.saved({group.name: 0}), **savings}

    def _count(self, model: ir.Model) -> np.ndarray:
        counts = [macs(model, batch, seq or 1) or 0 for batch, seq in self.sizes]
        return np.array([graph_passes.count_parameters(model), *counts], float)


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


def _agree(tables: Sequence[CostTable], graphs: _GraphCounts) -> bool:
    """Whether tables give the counts of a graph in which every group keeps another number of units."""
    counts = {group.name: group.counts[1:-1] for group in graphs.groups}
    drawn = {name: numbers[index % len(numbers)] for index, (name, numbers) in enumerate(counts.items()) if numbers}
    return np.allclose([table.cost(drawn) for table in tables], graphs.totals - graphs.saved(drawn), rtol=1e-9)


def _tables(graphs: _GraphCounts, savings: Mapping[str, Savings]) -> list[CostTable]:
    """A table of each total.

    Args:
        graphs: counts the whole model.
        savings: name of the group -> its savings.
    """
    labels = [("parameters", 0, None), *(("macs", batch, seq) for batch, seq in graphs.sizes)]
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
                for group in graphs.groups
            ),
        )
        for number, ((unit, batch, seq), total) in enumerate(zip(labels, graphs.totals.tolist(), strict=True))
    ]
