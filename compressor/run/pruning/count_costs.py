"""Count the parameters and multiply-accumulates of a cost table in the graphs of some plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

import graph_passes
from compressor.errors import ErrorCode, InputError
from compressor.measure import macs
from compressor.measure.costs import CostTable, GroupCosts
from compressor.measure.macs import uncounted_product
from compressor.progress import ProgressCallback
from compressor.run.pruning.measure_times import Size, keep_counts
from compressor.units import PrunableGroup
from graph_passes import Plan


def count_costs(
    graph_of: Callable[[Plan], ir.Model],
    plan: Plan,
    groups: Sequence[PrunableGroup],
    sizes: Sequence[Size],
    on_progress: ProgressCallback,
) -> list[CostTable]:
    """Tables of parameters, and of multiply-accumulates at each size, by counting those of graphs.

    Both are taken as linear in the number of units, so one graph a group is counted; see `_counted_savings` for the
    exception. A group that keeps nothing can also lose its norm, so its saving at zero units is a lower bound.

    Args:
        graph_of: gives the graph of a plan, in floats.
        plan: the plan that keeps every unit.
        groups: the groups.
        sizes: the sizes.
        on_progress: called with (groups, all groups).

    Raises:
        InputError: the shapes of a product are unknown.
    """
    whole = graph_of(plan)
    for batch, seq in sizes:
        if (product := uncounted_product(whole, batch, seq or 1)) is not None:
            raise InputError(
                f"{product}: the shapes of this product depend on the rows, so that its multiply-accumulates cannot be"
                " counted, which a budget needs; choose a number of heads (--keep)",
                code=ErrorCode.UNSUPPORTED_MODEL,
                product=product,
            )
    totals = _counts(whole, sizes)
    savings = {}
    for number, group in enumerate(groups):
        on_progress(number, len(groups))
        savings[group.name] = _counted_savings(graph_of, plan, group, totals, sizes)
    on_progress(len(groups), len(groups))
    labels = [("parameters", 0, None), *(("macs", batch, seq) for batch, seq in sizes)]
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
                    savings=tuple(saved[number] for saved in savings[group.name].values()),
                )
                for group in groups
            ),
        )
        for number, ((unit, batch, seq), total) in enumerate(zip(labels, totals, strict=True))
    ]


def _counted_savings(
    graph_of: Callable[[Plan], ir.Model],
    plan: Plan,
    group: PrunableGroup,
    totals: Sequence[float],
    sizes: Sequence[Size],
) -> dict[int, list[float]]:
    """Number of units -> what a group saves of each total, at the numbers between which savings are linear.

    A group of several parts saves more with its last units: the keys and values that all of its query heads share go
    with these.
    """

    def saved(count: int) -> list[float]:
        counts = _counts(graph_of(keep_counts(plan, [group], {group.name: count})), sizes)
        return [a - b for a, b in zip(totals, counts, strict=True)]

    middle = group.counts[(len(group.counts) - 1) // 2]  # below all units, even where these are a single bundle
    slopes = [saving / (group.units - middle) for saving in saved(middle)]
    first = 0 if group.parts == 1 else group.step
    savings = {count: [slope * (group.units - count) for slope in slopes] for count in (first, group.units)}
    return savings if first == 0 else {0: saved(0), **savings}


def _counts(model: ir.Model, sizes: Sequence[Size]) -> list[float]:
    """Parameters, and multiply-accumulates at each size."""
    counts = [macs(model, batch, seq or 1) or 0 for batch, seq in sizes]
    return [float(graph_passes.count_parameters(model)), *map(float, counts)]
