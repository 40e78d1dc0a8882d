"""Measure the cost tables of a model: multiply-accumulates and parameters by counting, times by building engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir
from scipy.optimize import isotonic_regression

import graph_passes
from compressor.measure import macs, paired_times
from compressor.measure.costs import CostTable, GroupCosts
from compressor.progress import ProgressCallback
from compressor.run.plan_engines import PlanEngines
from compressor.targets import Engine
from compressor.targets.base import Feeds
from compressor.units import PrunableGroup
from graph_passes import Plan

Size = tuple[int, int | None]
"""Batch size, and length in tokens; None: the model has one size."""
Case = tuple[int, int]
"""Groups that cost the same, by their number, and the number of units that each of them keeps."""
_SHARES = (0.0, 1 / 48, 1 / 12, 1 / 6, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Shares of the units of groups whose engines are timed; between them times are nearly linear."""
_SHARES_OF_FEW = (0.0, 1 / 2)
"""Shares where a group accounts for little of the multiply-accumulates."""
_LITTLE = 0.05
_NEGLIGIBLE = 0.01
"""Share of the multiply-accumulates below which times are not resolved: costs are in proportion to the former."""
_SHARES_OF_ALL = (0.0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Shares of the units of all groups, at which times are compared with the sums of costs."""
TIMED_SHARES = (_SHARES, _SHARES_OF_FEW, _SHARES_OF_ALL, (_NEGLIGIBLE,))
"""Everything that a table of times is measured at."""
_TIMED_TOGETHER = 5
"""Engines that are timed in turn, besides the whole model's."""
_SECONDS = 0.75
"""Time spent on each engine at each size; at least four rounds."""
_SECONDS_OF_ALL = 3.0
"""Time spent on each engine in which all groups keep the same share, and on those of the whole model."""


def keep_counts(plan: Plan, groups: Sequence[PrunableGroup], counts: Mapping[str, int]) -> Plan:
    """The plan that keeps the first units of some groups, and in a group of several parts the first units of each.

    Args:
        plan: a plan that keeps every unit.
        groups: the groups.
        counts: name of the group -> number of units that are kept; the others keep all.
    """
    return plan.replace_groups(
        dataclasses.replace(plan[group.name], kept=group.first(counts[group.name]), scale=())
        for group in groups
        if group.name in counts
    )


def count_costs(
    engines: PlanEngines, groups: Sequence[PrunableGroup], sizes: Sequence[Size], on_progress: ProgressCallback
) -> list[CostTable]:
    """Tables of parameters, and of multiply-accumulates at each size, by counting those of graphs.

    Both are linear in the number of units, so one graph a group is counted; see `_counted_savings` for the exception.

    Args:
        engines: gives the graph of a plan.
        groups: the groups.
        sizes: the sizes.
        on_progress: called with (groups, all groups).
    """
    plan = engines.reference.plan
    whole = engines.float_graph(plan)
    totals = _counts(whole, sizes)
    savings = {}
    for number, group in enumerate(groups):
        on_progress(number, len(groups))
        savings[group.name] = _counted_savings(engines, group, totals, sizes)
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
    engines: PlanEngines, group: PrunableGroup, totals: Sequence[float], sizes: Sequence[Size]
) -> dict[int, list[float]]:
    """Number of units -> what a group saves of each total, at the numbers between which savings are linear.

    A group of several parts saves more with its last units: the keys and values that all of its query heads share go
    with these.
    """
    plan = engines.reference.plan

    def saved(count: int) -> list[float]:
        counts = _counts(engines.float_graph(keep_counts(plan, [group], {group.name: count})), sizes)
        return [a - b for a, b in zip(totals, counts, strict=True)]

    middle = group.counts[len(group.counts) // 2]
    slopes = [saving / (group.units - middle) for saving in saved(middle)]
    first = 0 if group.parts == 1 else group.step
    savings = {count: [slope * (group.units - count) for slope in slopes] for count in (first, group.units)}
    return savings if first == 0 else {0: saved(0), **savings}


def _counts(model: ir.Model, sizes: Sequence[Size]) -> list[float]:
    """Parameters, and multiply-accumulates at each size."""
    counts = [macs(model, batch, seq or 1) or 0 for batch, seq in sizes]
    return [float(graph_passes.count_parameters(model)), *map(float, counts)]


def equal_groups(groups: Sequence[PrunableGroup], table: CostTable) -> list[list[PrunableGroup]]:
    """Groups that cost the same: of one type and size, and with equal multiply-accumulates a unit."""
    classes: dict[tuple[object, ...], list[PrunableGroup]] = {}
    for group in groups:
        key = (group.type, group.units, group.width, group.step, round(table.saving(group.name, 0) / table.whole, 4))
        classes.setdefault(key, []).append(group)
    return list(classes.values())


def measured_counts(group: PrunableGroup, share: float) -> tuple[int, ...]:
    """Numbers of units of a group at which engines are timed, ascending, without all of them.

    Args:
        group: the group.
        share: its share of the multiply-accumulates of the model.
    """
    grid = group.counts[:-1]
    shares = _SHARES if share >= _LITTLE else _SHARES_OF_FEW
    nearest = {grid[min(round(part * len(grid)), len(grid) - 1)] for part in shares}
    if group.units // group.step <= 12 and share >= _LITTLE:
        nearest = {count for number, count in enumerate(grid) if number % 2 == 0 or number == 1}
    if group.parts > 1:
        nearest.add(group.step)  # below it keys and values go too
    return tuple(sorted(nearest))


def measure_times(
    engines: PlanEngines,
    groups: Sequence[PrunableGroup],
    macs_table: CostTable,
    unpruned: tuple[Engine, Engine],
    inputs: Mapping[Size, Feeds],
    on_progress: ProgressCallback,
) -> list[CostTable]:
    """Tables of times at each size: engines in which all groups that cost the same keep equally many units.

    What a group saves at a number of units is the difference to the engine of the whole model, divided by the number of
    such groups. Engines are timed in turn with that of the whole model, so that disturbances affect both. Then engines
    are timed in which all groups keep the same share, since what groups save together is not exactly the sum: savings
    are scaled so that the sum is right where all are empty, and the curve of the table corrects the rest.

    Args:
        engines: builds the engine of a plan.
        groups: the groups.
        macs_table: multiply-accumulates of the groups, by which equal groups are recognized.
        unpruned: engines of the whole model: as plans are built, and the runtime's own.
        inputs: one batch of inputs for each size.
        on_progress: called with (engines, all engines).
    """
    classes = equal_groups(groups, macs_table)
    counted = {
        number: macs_table.saving(members[0].name, 0) / macs_table.whole for number, members in enumerate(classes)
    }
    cases = []
    for number, members in enumerate(classes):
        share = len(members) * counted[number]
        if share >= _NEGLIGIBLE:
            cases += [(number, count) for count in measured_counts(members[0], share)]
    shares = _time_cases(engines, classes, cases, unpruned[0], inputs, on_progress)
    plans = _plans_of_all(groups)
    tables = []
    timed = _time_together(engines, groups, plans, unpruned, inputs)
    for size, (whole_time, dense_time, *times) in timed.items():
        savings = {(number, 0): whole_time * share for number, share in counted.items()}
        savings |= {case: whole_time * by_size[size] for case, by_size in shares.items()}
        table = _time_table(engines, classes, savings, size, dense=dense_time, whole=whole_time)
        tables.append(with_curve(table, list(zip(plans, times, strict=True))))
    return tables


def with_curve(table: CostTable, points: Sequence[tuple[Mapping[str, int], float]]) -> CostTable:
    """The table with savings and a curve that agree with the times of plans that remove units of all groups.

    Args:
        table: a table of times.
        points: number of units of each group, and milliseconds of the plan, from the plan that keeps nothing upwards.
    """
    saved, least = table.whole - table.least_sum, min(points[0][1], table.whole)
    if saved > 0:
        factor = (table.whole - least) / saved
        table = table.model_copy(update={"rows": tuple(row.scaled(factor) for row in table.rows)})
    sums = [table.least_sum, *(table.sum_of(counts) for counts, _ in points[1:]), table.whole]
    # Noise must not make a plan with more units faster; the ends are measured best.
    times = isotonic_regression([least, *(time for _, time in points[1:]), table.whole]).x.clip(least, table.whole)
    return table.model_copy(update={"curve": tuple(zip(sums, times.tolist(), strict=True))})


def _time_cases(
    engines: PlanEngines,
    classes: Sequence[Sequence[PrunableGroup]],
    cases: Sequence[Case],
    whole: Engine,
    inputs: Mapping[Size, Feeds],
    on_progress: ProgressCallback,
) -> dict[Case, dict[Size, float]]:
    """The share of the whole model's time that one group saves at a number of units, by case and size."""
    plan = engines.reference.plan
    shares: dict[Case, dict[Size, float]] = {case: {} for case in cases}
    for start in range(0, len(cases), _TIMED_TOGETHER):
        on_progress(start, len(cases))
        batch = cases[start : start + _TIMED_TOGETHER]
        built = [
            engines.build(keep_counts(plan, classes[number], {group.name: count for group in classes[number]}))
            for number, count in batch
        ]
        for size, feeds in inputs.items():
            reference, *times = paired_times([whole, *built], feeds, _SECONDS * (len(built) + 1))
            for case, seconds in zip(batch, times, strict=True):
                shares[case][size] = (1 - seconds / reference) / len(classes[case[0]])
        for engine in built:
            engines.discard(engine)
    on_progress(len(cases), len(cases))
    return shares


def _time_table(
    engines: PlanEngines,
    classes: Sequence[Sequence[PrunableGroup]],
    savings: Mapping[Case, float],
    size: Size,
    *,
    dense: float,
    whole: float,
) -> CostTable:
    """The table of one size, from the milliseconds that one group saves in each case."""
    rows = []
    for number, members in enumerate(classes):
        counts = [count for case_class, count in savings if case_class == number]
        times = [savings[number, count] for count in counts]
        rows.append(
            GroupCosts(
                groups=tuple(group.name for group in members),
                type=members[0].type,
                counts=(*counts, members[0].units),
                # An empty group computes nothing, so that what it takes longer by is noise.
                savings=(max(*times, 0.0), *times[1:], 0.0),
            )
        )
    return CostTable(
        unit="ms",
        engine=engines.choice.label,
        batch=size[0],
        seq=size[1],
        dense=dense,
        whole=whole,
        rows=tuple(rows),
    )


def _plans_of_all(groups: Sequence[PrunableGroup]) -> list[dict[str, int]]:
    """Numbers of units at which all groups keep the same share, ascending."""
    return [
        {group.name: group.counts[round(share * (len(group.counts) - 1))] for group in groups}
        for share in _SHARES_OF_ALL
    ]


def _time_together(
    engines: PlanEngines,
    groups: Sequence[PrunableGroup],
    plans: Sequence[Mapping[str, int]],
    unpruned: Sequence[Engine],
    inputs: Mapping[Size, Feeds],
) -> dict[Size, list[float]]:
    """Milliseconds of engines of the whole model and of those of plans at each size, all timed in turn."""
    built = [engines.build(keep_counts(engines.reference.plan, groups, counts)) for counts in plans]
    timed = [*unpruned, *built]
    times = {size: paired_times(timed, feeds, _SECONDS_OF_ALL * len(timed)) for size, feeds in inputs.items()}
    for engine in built:
        engines.discard(engine)
    return {size: [1e3 * value for value in seconds] for size, seconds in times.items()}
