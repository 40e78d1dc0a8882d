"""Times of plans: cost tables that are fitted to the times of some engines, and kept for later runs on this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from compressor.environment import COMPARABLE_FIELDS, INSTRUCTIONS, machine
from compressor.measure import paired_ratios, paired_times
from compressor.measure.costs import CostTable, GroupCosts, fit_times, with_curve
from compressor.progress import ProgressCallback, RunLog
from compressor.pruning.costs import Counts, PlanBuilder, count_costs, keep_counts
from compressor.results import Note, NoteCode, Size, size_label
from compressor.store import Json, Store, Stored, digest, version_of, versioned
from compressor.targets import TARGETS, Engine, target
from compressor.targets.base import Feeds
from compressor.targets.machine import user_cache
from compressor.units import PrunableGroup
from graph_passes import Plan

Share = tuple[float, float]
"""Time of a plan as a share of the whole model's, and its standard error."""
Requests = Mapping[Size, Mapping[Size, float]]
"""Size of a request of a model that generates -> size of each of its calls -> how often it makes the call."""
_SHARES = Json[list[tuple[Share, ...]]](list[tuple[Share, ...]])
_TABLES, _TIMES = Json[list[CostTable]](list[CostTable]), Json[list[float]](list[float])
"""Files of shares, of cost tables and of the times of a plan."""
_TIMED_SHARES = (0.0, 1 / 48, 1 / 12, 1 / 6, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Shares of the units of groups whose engines are timed; between them times are nearly linear."""
_SHARES_OF_FEW = (0.0, 1 / 2)
"""Shares of the units of groups that account for a small share of the multiply-accumulates."""
_SMALL_SHARE = 0.05
"""Share of the multiply-accumulates below which the engines of a group are timed at few numbers of units."""
_NEGLIGIBLE_SHARE = 0.01
"""Share of the multiply-accumulates below which no engine is timed: costs are in proportion to multiply-accumulates."""
_SHARES_OF_MIXED = tuple(np.geomspace(1 / 16, 7 / 8, 8)[[0, 2, 4, 6, 1, 3, 5, 7]].tolist())
"""Mean shares of the units in plans in which every group keeps another number. The first four, which are timed together
with the plan that keeps nothing, suffice for a curve."""
_SPREAD = 0.7
"""Standard deviation of the logarithm of the shares of groups in such a plan."""
_MEASURED_SHARES = (_TIMED_SHARES, _SHARES_OF_FEW, _SHARES_OF_MIXED, (_NEGLIGIBLE_SHARE, _SPREAD))
"""Everything that a table of times is measured at."""
_TIMED_TOGETHER = 5
"""Engines that are timed in turn, besides the whole model's."""
ENGINE_SECONDS = 0.75
"""Time spent on each engine at each size; at least four rounds."""
WHOLE_SECONDS = 3.0
"""Time spent on each of the engines of the whole model."""
PLAN_SECONDS = 8.0
"""Time spent on each engine when the engine of a plan is timed, at each size."""
_COSTS = "costs-"
"""Prefix of the names of cost tables in the cache of the user."""
_OUTDATED_BY = ("measured shares", "machine", "device", "runtime")
"""Fields of the key that replace a stored table when they change; tables that differ in others are kept beside it."""
_NAMED_TABLES = 3
"""Maximum number of stored tables that a note names."""
_DRIFT = 0.25
"""Change of the whole model's time relative to dense from which on a stored table no longer holds."""


class OutOfTimeError(Exception):
    """A measurement would take longer than it may; `tables` are fitted to what was measured of it."""

    def __init__(self, tables: list[CostTable]) -> None:
        super().__init__("the measurement of times would take too long")
        self.tables = tables


def equal_groups(groups: Sequence[PrunableGroup], table: CostTable) -> list[list[PrunableGroup]]:
    """Groups that cost the same: of one type and size, and with equal multiply-accumulates a unit."""
    classes: dict[tuple[object, ...], list[PrunableGroup]] = {}
    for group in groups:
        share = round(table.saving(group.name, 0) / table.whole, 4)
        classes.setdefault((group.type, group.units, group.width, group.multiple, share), []).append(group)
    return list(classes.values())


def measured_counts(group: PrunableGroup, share: float) -> tuple[int, ...]:
    """Numbers of units of a group at which engines are timed, ascending, without all of them."""
    grid = group.counts[:-1]
    shares = _TIMED_SHARES if share >= _SMALL_SHARE else _SHARES_OF_FEW
    nearest = {grid[min(round(part * len(grid)), len(grid) - 1)] for part in shares}
    if group.units // group.multiple <= 12 and share >= _SMALL_SHARE:
        nearest = {count for number, count in enumerate(grid) if number % 2 == 0 or number == 1}
    if group.parts > 1:
        nearest.add(group.multiple)  # below it keys and values go too
    return tuple(sorted(nearest))


def timed_plans(classes: Sequence[Sequence[PrunableGroup]], shares: Sequence[float]) -> list[Counts]:
    """Numbers of units of the plans whose engines are timed.

    In most plans the groups of one class alone differ: many units are removed from the whole model, and few are left of
    a model that keeps nothing else. A cost is thus measured in engines that do not take much longer than it. Classes
    that account for a negligible share are left as the others are.

    The first plan keeps nothing.

    Args:
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
        shares = (mean * rng.lognormal(0.0, _SPREAD, len(groups))).clip(0.0, 1.0).tolist()
        drawn = zip(groups, shares, strict=True)
        plans.append({group.name: group.counts[round(share * (len(group.counts) - 1))] for group, share in drawn})
    return plans


def _proportional_rows(
    classes: Sequence[Sequence[PrunableGroup]], whole: float, costs: Sequence[float]
) -> tuple[GroupCosts, ...]:
    """Rows in which costs are in proportion to the share of the multiply-accumulates that a group of each class has."""
    rows = []
    for members, cost in zip(classes, costs, strict=True):
        counts = (*measured_counts(members[0], len(members) * cost), members[0].units)
        savings = tuple(whole * cost * (1 - count / counts[-1]) for count in counts)
        names = tuple(group.name for group in members)
        rows.append(GroupCosts(groups=names, type=members[0].type, counts=counts, savings=savings))
    return tuple(rows)


@dataclass(frozen=True)
class CostSource:
    """Gives the cost tables of one model, engine and machine.

    Attributes:
        structure: what times depend on of the model (`ModelAccess.structure_with`).
        dense: the runtime's own engine of the whole model.
        inputs: one batch of inputs for each size.
        seconds: time that the measurement of cost tables may take; in less they are fitted to few plans, for this run.
        requests: size of each request of a model that generates -> how often it makes each call in `inputs`.
        counted: batch sizes and lengths at which multiply-accumulates are counted; None: those of `inputs`.
        further: give further tables of counts, from the plan that keeps every unit, the groups and a callback.
    """

    structure: str
    groups: Sequence[PrunableGroup]
    engines: PlanBuilder
    dense: Engine
    inputs: Mapping[Size, Feeds]
    log: RunLog
    seconds: float = math.inf
    requests: Requests = field(default_factory=dict)
    counted: Sequence[Size] | None = None
    further: Sequence[Callable[[Plan, Sequence[PrunableGroup], ProgressCallback], CostTable]] = ()
    _attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False, repr=False)

    def count_tables(self) -> list[CostTable]:
        """Parameters, multiply-accumulates at each size, and what else is counted."""
        sizes = [size[:2] for size in (self.inputs if self.counted is None else self.counted)]
        with self.log.stage("counting the cost of units") as on_progress:
            graph_of, plan = self.engines.float_graph, self.engines.plan
            tables = count_costs(graph_of, plan, self.groups, sizes, on_progress)
            return [*tables, *(count(plan, self.groups, on_progress) for count in self.further)]

    def time_tables(self, macs: CostTable) -> list[CostTable]:
        """Times at each size: those of an earlier run on this machine, or measured now."""
        key, store, measure = self.key(), _cache(), partial(self._measure, macs)
        name = _COSTS + digest({name: value for name, value in key.items() if name not in _OUTDATED_BY})[:16]
        rescaled: list[CostTable] = []

        def holds(tables: list[CostTable]) -> bool:
            now = self._rescaled(tables)
            # The calls of a request have no other engine to compare them with than each other.
            alone = self.dense is self.engines.whole
            before, after = (
                [row.whole / (rows[0].whole if alone else row.dense) for row in rows] for rows in (tables, now)
            )
            drift = max(abs(second / first - 1) for first, second in zip(before, after, strict=True))
            if drift <= _DRIFT:
                code = NoteCode.COSTS_REUSED
                text = "is that of an earlier run; times of the whole model were measured again"
                rescaled.extend(now)
            else:
                code = NoteCode.COSTS_REMEASURED
                text = f"is measured again: relative to dense, the time of the whole model has changed by {drift:.0%}"
            self._note(code, f"the cost table in {store.path / name} {text}")
            return drift <= _DRIFT

        def note_unwritable(error: OSError) -> None:
            text = f"the cost table could not be stored ({error}); the next run measures it again"
            self._note(NoteCode.COSTS_NOT_STORED, text)

        if not store.holds(name, key, measure) and (known := stored_costs(self.structure)[:_NAMED_TABLES]):
            described = "; of another ".join(_differences(stored, key) for stored in known)
            text = f"the cost table is measured, because those stored for this model are of another {described}"
            self._note(NoteCode.COSTS_REMEASURED, text)
        try:
            tables = store.memo(name, key, measure, _TABLES, accept=holds, on_unwritable=note_unwritable)
        except OutOfTimeError as late:
            text = (
                "little time is left, so engines of few plans were timed, and groups of units are taken to cost"
                " time in proportion to their multiply-accumulates"
            )
            self._note(NoteCode.TIME_LIMITED, text)
            return late.tables
        return rescaled or tables

    def _note(self, code: NoteCode, text: str) -> None:
        self.log.add_notes([Note(code=code, text=text)])

    @versioned(
        3,
        *("compressor.measure.costs", "compressor.pruning.costs", "graph_passes.passes.fuse_for_ort"),
        *("compressor.generation.workload", "compressor.generation.deliver"),
    )
    def _measure(self, macs: CostTable, work: Path) -> list[CostTable]:
        """Tables that are measured now; the times of the first plans may be in a folder of unfinished work."""
        with self.log.stage(f"timing the cost of units ({self.engines.label})") as on_progress:
            return self.measured_tables(macs, Store(work, version=version_of(self._measure)), on_progress)

    def measured_tables(self, macs: CostTable, store: Store, on_progress: ProgressCallback) -> list[CostTable]:
        """Tables of times at each size and of each request, fitted to the times of engines of some plans.

        Costs are fitted to plans in which one class of groups differs (`fit_times`), and the curve to plans in which
        every group keeps another share (`with_curve`). Engines are timed in turn with that of the whole model, so that
        disturbances of the machine affect both. An interrupted measurement goes on from what the store keeps.

        Raises:
            OutOfTimeError: it would take longer than `seconds`.
        """
        classes = equal_groups(self.groups, macs)
        counted = [macs.saving(members[0].name, 0) / macs.whole for members in classes]
        of_classes = [len(members) * cost for members, cost in zip(classes, counted, strict=True)]
        empty, *alike = timed_plans(classes, of_classes)
        mixed = [empty, *mixed_plans(self.groups)]
        fitted = [number for number, share in enumerate(of_classes) if share >= _NEGLIGIBLE_SHARE]
        plans = [*mixed, *alike]
        shares = self._time_plans(plans, store, on_progress)
        is_late = len(shares) < len(plans)
        measured = dict[Size, tuple[np.ndarray, np.ndarray]]()
        for number, (size, feeds) in enumerate(self.inputs.items()):
            whole, dense = 1e3 * np.array(paired_times((self.engines.whole, self.dense), feeds, 2 * WHOLE_SECONDS))
            times, errors = np.moveaxis(whole * np.array([by_size[number] for by_size in shares]), 1, 0)
            measured[size] = np.array([whole, dense, *times]), errors
        for size, calls in self.requests.items():
            times = np.sum([count * measured[call][0] for call, count in calls.items()], axis=0)
            measured[size] = times, np.hypot.reduce([count * measured[call][1] for call, count in calls.items()])
        tables = []
        for size, (times, errors) in measured.items():
            whole, dense, least, *group_times = times.tolist()
            table = CostTable(
                unit="ms",
                engine=self.engines.label,
                **size._asdict(),
                dense=dense,
                whole=whole,
                rows=_proportional_rows(classes, whole, counted),
            )
            together, alone = group_times[: len(mixed) - 1], group_times[len(mixed) - 1 :]
            if not is_late:
                points = zip([empty, *alike], [least, *alone], strict=True)
                table = fit_times(table, list(points), fitted, [errors[0], *errors[len(mixed) :]])
            tables.append(with_curve(table, least, list(zip(mixed[1:], together, strict=False))))
        if is_late:
            raise OutOfTimeError(tables)
        return tables

    def _time_plans(
        self, plans: Sequence[Counts], store: Store, on_progress: ProgressCallback
    ) -> list[tuple[Share, ...]]:
        """The time of each plan at each size, as a share of the whole model's, and its standard error.

        Where those of all plans would take longer than `seconds`, they are those of the first ones: at least of those
        that are timed together first.
        """
        deadline = time.perf_counter() + self.seconds

        def time_together(together: Sequence[Counts], _: Path) -> list[tuple[Share, ...]]:
            built = [self.engines.build(keep_counts(self.engines.plan, self.groups, counts)) for counts in together]
            seconds = ENGINE_SECONDS * (len(built) + 1)
            timed = [paired_ratios([self.engines.whole, *built], feeds, seconds) for feeds in self.inputs.values()]
            for engine in built:
                self.engines.discard(engine)
            return list(zip(*timed, strict=True))

        shares: list[tuple[Share, ...]] = []
        for start in range(0, len(plans), _TIMED_TOGETHER):
            on_progress(start, len(plans))
            began = time.perf_counter()
            measure = partial(time_together, plans[start : start + _TIMED_TOGETHER])
            # Where times cannot be stored, an interrupted measurement begins again.
            timed = store.memo(f"plans-{start}", {}, measure, _SHARES, on_unwritable=lambda _: None)
            shares.extend(timed)
            now, left = time.perf_counter(), len(plans) - len(shares)
            if now + left * (now - began) / len(timed) > deadline:
                break
        on_progress(len(plans), len(plans))
        return shares

    def time_plan(self, counts: Mapping[str, int], tables: Sequence[CostTable]) -> list[float]:
        """Milliseconds of a call of the engine of a plan at the size of each table.

        The engine takes turns with that of the whole model and with dense, as in the last measurement of a run: which
        engines it follows can change the time of a small one. Its time is given relative to the whole model in the same
        precision, which a disturbance of the machine slows down more alike than dense.
        """
        with self.log.stage(f"timing the plan, attempt {next(self._attempts)}"):
            engine = self.engines.build(keep_counts(self.engines.plan, self.groups, counts))
            both = [self.engines.whole, self.dense, engine]
            seconds = self._seconds(both, tables, 3 * PLAN_SECONDS)
            self.engines.discard(engine)
        return [table.whole * times[2] / times[0] for table, times in zip(tables, seconds, strict=True)]

    def _seconds(self, engines: Sequence[Engine], tables: Sequence[CostTable], seconds: float) -> list[np.ndarray]:
        """Seconds of a call or request by each engine at the size of each table, in turn for about `seconds` a call."""
        calls = [self.requests.get(table.size, {table.size: 1.0}) for table in tables]
        timed = {
            size: np.array(paired_times(engines, self.inputs[size], seconds))
            for size in dict.fromkeys(itertools.chain.from_iterable(calls))
        }
        return [np.sum([count * timed[size] for size, count in parts.items()], axis=0) for parts in calls]

    def _rescaled(self, tables: Sequence[CostTable]) -> list[CostTable]:
        """Stored tables with the times of the whole model as they are now, and savings in proportion."""
        rescaled = []
        with self.log.stage("timing the whole model"):
            seconds = self._seconds([self.engines.whole, self.dense], tables, 2 * WHOLE_SECONDS)
            for table, (whole, dense) in zip(tables, (1e3 * times for times in seconds), strict=True):
                rescaled.append(table.scaled(float(whole) / table.whole).model_copy(update={"dense": float(dense)}))
        return rescaled

    def key(self) -> dict[str, str]:
        """Everything that times depend on."""
        facts, runtime = machine(), self.dense.session.get("runtime")
        versions = [facts.get(package) for name in TARGETS for package in target(name).packages]
        return {
            "structure": self.structure,
            **self.engines.facts,
            "size": json.dumps([list(self.inputs), self.engines.shapes]),
            "device": self.dense.host,
            **_measurement(facts),
            "runtime": json.dumps([runtime, *versions]),
        }


def stored_costs(structure: str) -> list[Stored]:
    """The stored tables of a structure (`structure_with`), newest first, of whatever engine, size and machine."""
    return [stored for stored in _cache().stored(f"{_COSTS}*") if stored.inputs.get("structure") == structure]


def latest_tables(structure: str) -> list[CostTable] | None:
    """The tables of a structure that were measured last on this machine, of whatever engine and size, if there are any.

    Times are as they were then, with the runtime of then.
    """
    here = _measurement(machine())
    for stored in stored_costs(structure):
        with contextlib.suppress(OSError, ValueError):  # of another version
            if here.items() <= stored.inputs.items():
                return _TABLES.load(stored.folder)
    return None


def _cache() -> Store:
    """Cost tables of all runs of the user."""
    return Store(user_cache(), is_shared=True)


def _measurement(facts: Mapping[str, str]) -> dict[str, str]:
    """How and on which machine times are measured."""
    return {
        "measured shares": json.dumps(_MEASURED_SHARES),
        "machine": json.dumps({name: facts.get(name) for name in (*COMPARABLE_FIELDS, *INSTRUCTIONS)}),
    }


def _differences(stored: Stored, key: Mapping[str, str]) -> str:
    """The fields of the key in which stored tables differ: `engine (ort fp32) and size (batch 1, length 128)`."""
    sizes = json.loads(stored.inputs.get("size", "[[]]"))[0]
    sizes = "; ".join(size_label(*size) for size in sizes)
    values = {"engine": f" ({stored.inputs.get('engine')})", "size": f" ({sizes})"}  # the others are too long to read
    differing = [name for name in key if stored.inputs.get(name) != key[name]] or ["version of the measurement"]
    return " and ".join(f"{name}{values.get(name, '')}" for name in differing)


@dataclass(frozen=True)
class KeptTimes:
    """Cost tables and times of plans, measured once in a run: with other times another plan would fit the budget.

    The store keeps them until the run has its plan.
    """

    costs: CostSource
    store: Store

    def time_tables(self, macs: CostTable) -> list[CostTable]:
        """Times at each size."""

        def note(_: object) -> bool:
            text = "the times of units and plans are those that the interrupted run measured"
            self.costs.log.add_notes([Note(code=NoteCode.RESUMED, text=text)])
            return True

        key = self.costs.key()
        name = f"times-{digest(key)[:16]}"  # attempts may be for several engines
        return self.store.memo(name, key, lambda _: self.costs.time_tables(macs), _TABLES, accept=note)

    def time_plan(self, counts: Mapping[str, int], tables: Sequence[CostTable]) -> list[float]:
        """Milliseconds of a call of the engine of a plan at the size of each table; see `CostSource.time_plan`."""
        name, inputs = f"plan-{digest(dict(counts))[:16]}", {**self.costs.key(), "counts": dict(counts)}
        return self.store.memo(name, inputs, lambda _: self.costs.time_plan(counts, tables), _TIMES)
