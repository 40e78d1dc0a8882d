"""Measure the times of a cost table by building the engines of some plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from compressor.measure import paired_ratios, paired_times
from compressor.measure.costs import CostTable, GroupCosts, fit_times, with_curve
from compressor.progress import ProgressCallback
from compressor.run.pruning.plan_engines import PlanEngines
from compressor.store import Json, Store
from compressor.targets import Engine
from compressor.targets.base import Feeds
from compressor.units import PrunableGroup
from graph_passes import Plan

Size = tuple[int, int | None]
"""Batch size, and length in tokens; None: the model has one size."""
Share = tuple[float, float]
"""Time of a plan as a share of the whole model's, and its standard error."""
_SHARES = Json[list[tuple[Share, ...]]](list[tuple[Share, ...]])
Counts = dict[str, int]
"""Name of the group -> number of units."""
_TIMED_SHARES = (0.0, 1 / 48, 1 / 12, 1 / 6, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Shares of the units of groups whose engines are timed; between them times are nearly linear."""
_SHARES_OF_FEW = (0.0, 1 / 2)
"""Shares of the units of groups that account for a small share of the multiply-accumulates."""
_SMALL_SHARE = 0.05
"""Share of the multiply-accumulates below which the engines of a group are timed at few numbers of units."""
_NEGLIGIBLE_SHARE = 0.01
"""Share of the multiply-accumulates below which no engine is timed: costs are in proportion to multiply-accumulates."""
_SHARES_OF_MIXED = tuple(np.geomspace(1 / 16, 7 / 8, 8).tolist())
"""Mean shares of the units in plans in which every group keeps another number."""
_SPREAD = 0.7
"""Standard deviation of the logarithm of the shares of groups in such a plan."""
MEASURED_SHARES = (_TIMED_SHARES, _SHARES_OF_FEW, _SHARES_OF_MIXED, (_NEGLIGIBLE_SHARE, _SPREAD))
"""Everything that a table of times is measured at."""
_TIMED_TOGETHER = 5
"""Engines that are timed in turn, besides the whole model's."""
_SECONDS = 0.75
"""Time spent on each engine at each size; at least four rounds."""
SECONDS_OF_WHOLE = 3.0
"""Time spent on each of the engines of the whole model."""


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
    shares = _TIMED_SHARES if share >= _SMALL_SHARE else _SHARES_OF_FEW
    nearest = {grid[min(round(part * len(grid)), len(grid) - 1)] for part in shares}
    if group.units // group.step <= 12 and share >= _SMALL_SHARE:
        nearest = {count for number, count in enumerate(grid) if number % 2 == 0 or number == 1}
    if group.parts > 1:
        nearest.add(group.step)  # below it keys and values go too
    return tuple(sorted(nearest))


def timed_plans(classes: Sequence[Sequence[PrunableGroup]], shares: Sequence[float]) -> list[Counts]:
    """Numbers of units of the plans whose engines are timed.

    In most plans the groups of one class alone differ: many units are removed from the whole model, and few are left of
    a model that keeps nothing else. A cost is thus measured in engines that do not take much longer than it. Classes
    that account for a negligible share are left as the others are.

    The first plan keeps nothing.

    Args:
        classes: groups that cost the same.
        shares: share of the multiply-accumulates of the model that the groups of each class account for together.
    """
    full = {group.name: group.units for members in classes for group in members}
    empty = dict.fromkeys(full, 0)
    plans = [empty]
    for members, share in zip(classes, shares, strict=True):
        if share < _NEGLIGIBLE_SHARE:
            continue
        units = members[0].units
        for count in (*measured_counts(members[0], share), units):
            counts = dict.fromkeys((group.name for group in members), count)
            if count == 0 or units / 2 < count < units:
                plans.append({**full, **counts})
            if count == units or 0 < count <= units / 2:
                plans.append({**empty, **counts})
    return [plan for number, plan in enumerate(plans) if plan != full and plan not in plans[:number]]


def mixed_plans(groups: Sequence[PrunableGroup]) -> list[Counts]:
    """Numbers of units of plans in which every group keeps another share, as in those that are chosen."""
    rng = np.random.default_rng(0)
    plans = []
    for mean in _SHARES_OF_MIXED:
        shares = (mean * rng.lognormal(0.0, _SPREAD, len(groups))).clip(0.0, 1.0)
        plans.append(
            {
                group.name: group.counts[round(share * (len(group.counts) - 1))]
                for group, share in zip(groups, shares.tolist(), strict=True)
            }
        )
    return plans


def measure_times(
    engines: PlanEngines,
    groups: Sequence[PrunableGroup],
    macs_table: CostTable,
    unpruned: tuple[Engine, Engine],
    inputs: Mapping[Size, Feeds],
    store: Store,
    on_progress: ProgressCallback,
) -> list[CostTable]:
    """Tables of times at each size, fitted to the times of engines of some plans.

    Costs are fitted to plans in which one class of groups differs (`fit_times`), and the curve to plans in which every
    group keeps another share (`with_curve`). Engines are timed in turn with that of the whole model, so that
    disturbances of the machine affect both.

    Args:
        engines: builds the engine of a plan.
        groups: the groups.
        macs_table: multiply-accumulates of the groups, by which equal groups are recognized.
        unpruned: engines of the whole model: as plans are built, and the runtime's own.
        inputs: one batch of inputs for each size.
        store: keeps what is measured, from which an interrupted measurement goes on.
        on_progress: called with (engines, all engines).
    """
    classes = equal_groups(groups, macs_table)
    counted = [macs_table.saving(members[0].name, 0) / macs_table.whole for members in classes]
    of_classes = [len(members) * cost for members, cost in zip(classes, counted, strict=True)]
    plans = timed_plans(classes, of_classes)
    fitted = [number for number, share in enumerate(of_classes) if share >= _NEGLIGIBLE_SHARE]
    mixed = mixed_plans(groups)
    shares = _time_plans(engines, groups, [*plans, *mixed], unpruned[0], inputs, store, on_progress)
    tables = []
    for number, (size, feeds) in enumerate(inputs.items()):
        whole, dense = (1e3 * seconds for seconds in paired_times(unpruned, feeds, 2 * SECONDS_OF_WHOLE))
        times, errors = (whole * np.array([by_size[number] for by_size in shares]).T).tolist()
        table = CostTable(
            unit="ms",
            engine=engines.choice.label,
            batch=size[0],
            seq=size[1],
            dense=dense,
            whole=whole,
            rows=_proportional_rows(classes, whole, counted),
        )
        alone, together = times[: len(plans)], times[len(plans) :]
        table = fit_times(table, list(zip(plans, alone, strict=True)), fitted, errors[: len(plans)])
        tables.append(with_curve(table, alone[0], list(zip(mixed, together, strict=True))))
    return tables


def _proportional_rows(
    classes: Sequence[Sequence[PrunableGroup]], whole: float, costs: Sequence[float]
) -> tuple[GroupCosts, ...]:
    """Rows in which costs are in proportion to the multiply-accumulates, with the numbers of units that are timed.

    Args:
        classes: groups that cost the same.
        whole: the time of the whole model.
        costs: share of the multiply-accumulates of the model that a group of each class accounts for.
    """
    rows = []
    for members, cost in zip(classes, costs, strict=True):
        counts = (*measured_counts(members[0], len(members) * cost), members[0].units)
        savings = tuple(whole * cost * (1 - count / counts[-1]) for count in counts)
        names = tuple(group.name for group in members)
        rows.append(GroupCosts(groups=names, type=members[0].type, counts=counts, savings=savings))
    return tuple(rows)


def _time_plans(
    engines: PlanEngines,
    groups: Sequence[PrunableGroup],
    plans: Sequence[Counts],
    whole: Engine,
    inputs: Mapping[Size, Feeds],
    store: Store,
    on_progress: ProgressCallback,
) -> list[tuple[Share, ...]]:
    """The time of each plan at each size, as a share of the whole model's, and its standard error."""

    def time_together(together: Sequence[Counts], _: Path) -> list[tuple[Share, ...]]:
        built = [engines.build(keep_counts(engines.reference.plan, groups, counts)) for counts in together]
        timed = [paired_ratios([whole, *built], feeds, _SECONDS * (len(built) + 1)) for feeds in inputs.values()]
        for engine in built:
            engines.discard(engine)
        return list(zip(*timed, strict=True))

    shares: list[tuple[Share, ...]] = []
    for start in range(0, len(plans), _TIMED_TOGETHER):
        on_progress(start, len(plans))
        measure = partial(time_together, plans[start : start + _TIMED_TOGETHER])
        # Where times cannot be stored, an interrupted measurement begins again.
        timed = store.memo(f"plans-{start}", {}, measure, _SHARES, on_unwritable=lambda _: None)
        shares.extend(timed)
    on_progress(len(plans), len(plans))
    return shares
