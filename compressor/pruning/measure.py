"""Times of plans: cost tables that are fitted to the times of some engines, and kept for later runs on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PreTrainedModel

from compressor.environment import COMPARABLE_FIELDS, INSTRUCTIONS, machine
from compressor.measure import paired_ratios, paired_times
from compressor.measure.costs import (
    CostTable,
    GroupCosts,
    StoredTables,
    fit_times,
    load_tables,
    read_tables,
    save_tables,
    with_curve,
)
from compressor.progress import ProgressCallback, RunLog
from compressor.pruning.costs import Counts, PlanEngines, Size, count_costs, keep_counts
from compressor.results import Note, NoteCode
from compressor.targets import TARGETS, Engine, target
from compressor.targets.base import Feeds
from compressor.targets.machine import user_cache
from compressor.units import PrunableGroup
from graph_passes.files import write_text

Share = tuple[float, float]
"""Time of a plan as a share of the whole model's, and its standard error."""
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
_MEASURED_SHARES = (_TIMED_SHARES, _SHARES_OF_FEW, _SHARES_OF_MIXED, (_NEGLIGIBLE_SHARE, _SPREAD))
"""Everything that a table of times is measured at."""
_TIMED_TOGETHER = 5
"""Engines that are timed in turn, besides the whole model's."""
_SECONDS = 0.75
"""Time spent on each engine at each size; at least four rounds."""
_SECONDS_OF_WHOLE = 3.0
"""Time spent on each of the engines of the whole model."""
_SECONDS_OF_PLAN = 8.0
"""Time spent on each engine when the engine of a plan is timed, at each size."""
_PARTIAL = ".partial.json"
"""Suffix of files with the times of an interrupted measurement."""
_FORM = "4"
"""Number of the form in which graphs are built, called and timed; it grows with every change that tables depend on."""
_OUTDATED_BY = ("measured shares", "form of engines", "machine", "device", "runtime")
"""Fields of the key that replace a stored table when they change; tables that differ in others are kept beside it."""
_NAMED_FILES = 3
"""Maximum number of stored tables that a note names."""
_DRIFT = 0.25
"""Change of the whole model's time relative to dense from which on a stored table no longer holds."""


class StoredContent(BaseModel):
    """The base of such content. A subclass narrows the type of the key and adds what is stored.

    Attributes:
        key: everything that the content depends on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    key: Any

    @classmethod
    def read(cls, path: Path, key: object) -> Self | None:
        """The content of a file; None without a file, or if it is damaged or has another key."""
        try:
            stored = cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None
        return stored if stored.key == key else None


class _StoredShares(StoredContent):
    """The content of the file: its key, and the share of each plan at each size."""

    key: Mapping[str, str]
    shares: tuple[tuple[Share, ...], ...]


@dataclass(frozen=True)
class PartialShares:
    """A file with the shares of the first plans, from which an interrupted measurement goes on.

    Attributes:
        path: the file.
        key: everything that times depend on; a file with another key is not read.
    """

    path: Path
    key: Mapping[str, str]

    def load(self) -> list[tuple[Share, ...]]:
        """The shares of the first plans, at each size; empty without a file, or if it is damaged or has another key."""
        stored = _StoredShares.read(self.path, self.key)
        return [] if stored is None else list(stored.shares)

    def store(self, shares: Sequence[tuple[Share, ...]]) -> None:
        """Replace the file; where it cannot be written, an interrupted measurement begins again."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, _StoredShares(key=self.key, shares=tuple(shares)).model_dump_json())

    def remove(self) -> None:
        """Remove the file, when the table is complete."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def equal_groups(groups: Sequence[PrunableGroup], table: CostTable) -> list[list[PrunableGroup]]:
    """Groups that cost the same: of one type and size, and with equal multiply-accumulates a unit."""
    classes: dict[tuple[object, ...], list[PrunableGroup]] = {}
    for group in groups:
        key = (
            group.type,
            group.units,
            group.width,
            group.multiple,
            round(table.saving(group.name, 0) / table.whole, 4),
        )
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
    partial: PartialShares,
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
        partial: keeps what is measured, from which an interrupted measurement goes on.
        on_progress: called with (engines, all engines).
    """
    classes = equal_groups(groups, macs_table)
    counted = [macs_table.saving(members[0].name, 0) / macs_table.whole for members in classes]
    of_classes = [len(members) * cost for members, cost in zip(classes, counted, strict=True)]
    plans = timed_plans(classes, of_classes)
    fitted = [number for number, share in enumerate(of_classes) if share >= _NEGLIGIBLE_SHARE]
    mixed = mixed_plans(groups)
    shares = _time_plans(engines, groups, [*plans, *mixed], unpruned[0], inputs, partial, on_progress)
    tables = []
    for number, (size, feeds) in enumerate(inputs.items()):
        whole, dense = (1e3 * seconds for seconds in paired_times(unpruned, feeds, 2 * _SECONDS_OF_WHOLE))
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
    partial: PartialShares,
    on_progress: ProgressCallback,
) -> list[tuple[Share, ...]]:
    """The time of each plan at each size, as a share of the whole model's, and its standard error."""
    shares = partial.load()
    for start in range(len(shares), len(plans), _TIMED_TOGETHER):
        on_progress(start, len(plans))
        built = [
            engines.build(keep_counts(engines.reference.plan, groups, counts))
            for counts in plans[start : start + _TIMED_TOGETHER]
        ]
        timed = [paired_ratios([whole, *built], feeds, _SECONDS * (len(built) + 1)) for feeds in inputs.values()]
        for engine in built:
            engines.discard(engine)
        shares += zip(*timed, strict=True)
        partial.store(shares)
    on_progress(len(plans), len(plans))
    return shares


@dataclass(frozen=True)
class CostSource:
    """Gives the cost tables of one model, engine and machine.

    Attributes:
        structure: what times depend on of the model (`structure_of`).
        groups: the groups.
        engines: builds the engine of a plan.
        dense: the runtime's own engine of the whole model.
        inputs: one batch of inputs for each size.
        log: receives stages and notes.
    """

    structure: str
    groups: Sequence[PrunableGroup]
    engines: PlanEngines
    dense: Engine
    inputs: Mapping[Size, Feeds]
    log: RunLog
    _attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False, repr=False)

    def count_tables(self) -> list[CostTable]:
        """Parameters, and multiply-accumulates at each size."""
        with self.log.stage("counting the cost of units") as on_progress:
            graph_of, plan = self.engines.float_graph, self.engines.reference.plan
            return count_costs(graph_of, plan, self.groups, list(self.inputs), on_progress)

    def time_tables(self, macs: CostTable) -> list[CostTable]:
        """Times at each size: those of an earlier run on this machine, or measured now.

        Args:
            macs: multiply-accumulates, by which equal groups are recognized.
        """
        key = self.key()
        named = json.dumps({name: value for name, value in key.items() if name not in _OUTDATED_BY})
        path = user_cache() / f"costs-{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"
        tables, differing = load_tables(path, key)
        if tables:
            rescaled = self._rescaled(tables)
            drift = max(
                abs(now.whole / now.dense * table.dense / table.whole - 1)
                for now, table in zip(rescaled, tables, strict=True)
            )
            if drift <= _DRIFT:
                text = (
                    f"the cost table is that of an earlier run ({path}); times of the whole model were measured again"
                )
                self.log.add_notes([Note(code=NoteCode.COSTS_REUSED, text=text)])
                return rescaled
            text = (
                f"the cost table in {path} is measured again: relative to dense, the time of the whole model has"
                f" changed by {drift:.0%}"
            )
            self.log.add_notes([Note(code=NoteCode.COSTS_REMEASURED, text=text)])
        elif differing:
            text = f"the cost table in {path} is of another {' and '.join(differing)}; it is measured again"
            self.log.add_notes([Note(code=NoteCode.COSTS_REMEASURED, text=text)])
        elif others := stored_tables(self.structure)[:_NAMED_FILES]:
            described = "; of another ".join(_differences(stored, key) for stored in others)
            text = (
                f"the cost table is measured, because those that are stored for this model are of another {described}"
            )
            self.log.add_notes([Note(code=NoteCode.COSTS_REMEASURED, text=text)])
        with self.log.stage(f"timing the cost of units ({self.engines.choice.label})") as on_progress:
            unpruned = self.engines.whole, self.dense
            partial = PartialShares(path.with_suffix(_PARTIAL), key)
            measured = measure_times(self.engines, self.groups, macs, unpruned, self.inputs, partial, on_progress)
        partial.remove()
        try:
            save_tables(path, key, measured)
        except OSError as error:
            text = f"the cost table could not be stored ({error}); the next run measures it again"
            self.log.add_notes([Note(code=NoteCode.COSTS_NOT_STORED, text=text)])
        return measured

    def time_plan(self, counts: Mapping[str, int], tables: Sequence[CostTable]) -> list[float]:
        """Milliseconds of a call of the engine of a plan at the size of each table.

        The engine takes turns with that of the whole model and with dense, as in the last measurement of a run: which
        engines it follows can change the time of a small one. Its time is given relative to the whole model in the same
        precision, which a disturbance of the machine slows down more alike than dense.

        Args:
            counts: name of the group -> number of units that the plan keeps; the others keep all.
            tables: tables of times.
        """
        with self.log.stage(f"timing the plan, attempt {next(self._attempts)}"):
            engine = self.engines.build(keep_counts(self.engines.reference.plan, self.groups, counts))
            times = []
            for table in tables:
                feeds = self.inputs[table.batch, table.seq]
                whole, _, seconds = paired_times([self.engines.whole, self.dense, engine], feeds, 3 * _SECONDS_OF_PLAN)
                times.append(table.whole * seconds / whole)
            self.engines.discard(engine)
        return times

    def release(self) -> None:
        """Free the memory of the engine of the whole model, which is built again when it is needed."""
        self.engines.release()

    def _rescaled(self, tables: Sequence[CostTable]) -> list[CostTable]:
        """Stored tables with the times of the whole model as they are now, and savings in proportion."""
        rescaled = []
        with self.log.stage("timing the whole model"):
            for table in tables:
                feeds = self.inputs[table.batch, table.seq]
                seconds = paired_times([self.engines.whole, self.dense], feeds, 2 * _SECONDS_OF_WHOLE)
                whole, dense = (1e3 * value for value in seconds)
                rescaled.append(table.scaled(whole / table.whole).model_copy(update={"dense": dense}))
        return rescaled

    def key(self) -> dict[str, str]:
        """Everything that times depend on."""
        facts, runtime = machine(), self.dense.session.get("runtime")
        versions = [facts.get(package) for name in TARGETS for package in target(name).packages]
        return {
            "structure": self.structure,
            "engine": f"{self.engines.choice.label}, unread positions dropped: {self.engines.drop_unread}",
            "products in fp32": json.dumps(self.engines.choice.in_float),
            "graph": self.engines.reference_form,
            "size": json.dumps([list(self.inputs), self.engines.options.shapes]),
            "device": self.dense.host,
            **_measurement(facts),
            "runtime": json.dumps([runtime, *versions]),
        }


def stored_tables(structure: str) -> list[StoredTables]:
    """The stored tables of a structure (`structure_of`), newest first, of whatever engine, size and machine."""
    files = [file for file in user_cache().glob("costs-*.json") if not file.name.endswith(_PARTIAL)]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return [stored for stored in map(read_tables, files) if stored and stored.key.get("structure") == structure]


def latest_tables(structure: str) -> StoredTables | None:
    """The tables of a structure that were measured last on this machine, of whatever engine and size, if there are any.

    Times are as they were then, with the runtime of then.
    """
    here = _measurement(machine())
    return next((stored for stored in stored_tables(structure) if here.items() <= stored.key.items()), None)


def structure_of(model: PreTrainedModel, groups: Sequence[PrunableGroup]) -> str:
    """What times depend on of a model: its configuration and units, not its weights."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name != "_name_or_path"}
    units = [(group.name, group.units, group.multiple, group.parts) for group in groups]
    return json.dumps([type(model).__name__, config, units], sort_keys=True, default=str)


def _measurement(facts: Mapping[str, str]) -> dict[str, str]:
    """How and on which machine times are measured."""
    return {
        "measured shares": json.dumps(_MEASURED_SHARES),
        "form of engines": _FORM,
        "machine": json.dumps({name: facts.get(name) for name in (*COMPARABLE_FIELDS, *INSTRUCTIONS)}),
    }


def _differences(stored: StoredTables, key: Mapping[str, str]) -> str:
    """The fields of the key in which stored tables differ: `engine (ort fp32) and size (batch 1, length 128)`."""
    sizes = "; ".join(table.size_label for table in stored.tables)
    values = {"engine": f" ({stored.key.get('engine')})", "size": f" ({sizes})"}  # the others are too long to read
    return " and ".join(f"{name}{values.get(name, '')}" for name in key if stored.key.get(name) != key[name])


class PlanTimes(BaseModel):
    """The times of one plan.

    Attributes:
        counts: name of the group -> number of units that the plan keeps.
        times: milliseconds of a call at the size of each table.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    counts: Mapping[str, int]
    times: tuple[float, ...]


class MeasuredTimes(StoredContent):
    """Everything that a run has measured.

    Attributes:
        key: what the times depend on besides the model (`CostSource.key`).
        tables: one table for each size.
        plans: the plans that were timed, in order.
    """

    key: Mapping[str, str]
    tables: tuple[CostTable, ...]
    plans: tuple[PlanTimes, ...] = ()


@dataclass(frozen=True)
class KeptTimes:
    """Cost tables and times of plans: those that the same run measured before it was interrupted, or measured now.

    Attributes:
        costs: measures them.
        path: file in the folder of what the run learns.
    """

    costs: CostSource
    path: Path

    def time_tables(self, macs: CostTable) -> list[CostTable]:
        """Times at each size.

        Args:
            macs: multiply-accumulates, by which equal groups are recognized.
        """
        if (measured := self._measured()) is not None:
            text = "the times of units and plans are those that the interrupted run measured"
            self.costs.log.add_notes([Note(code=NoteCode.RESUMED, text=text)])
            return list(measured.tables)
        tables = self.costs.time_tables(macs)
        self._write(MeasuredTimes(key=self.costs.key(), tables=tuple(tables)))
        return tables

    def time_plan(self, counts: Mapping[str, int], tables: Sequence[CostTable]) -> list[float]:
        """Milliseconds of a call of the engine of a plan at the size of each table; see `CostSource.time_plan`."""
        measured = self._measured()
        known = () if measured is None else measured.plans
        if (plan := next((plan for plan in known if plan.counts == counts), None)) is not None:
            return list(plan.times)
        times = self.costs.time_plan(counts, tables)
        if measured is not None:
            added = (*known, PlanTimes(counts=dict(counts), times=tuple(times)))
            self._write(measured.model_copy(update={"plans": added}))
        return times

    def _measured(self) -> MeasuredTimes | None:
        """What the file holds of this machine and engine; None: nothing."""
        return MeasuredTimes.read(self.path, self.costs.key())

    def _write(self, measured: MeasuredTimes) -> None:
        write_text(self.path, measured.model_dump_json(indent=1))
