"""Cost tables of a run: counted, or measured on this machine and kept for later runs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel

from compressor.environment import COMPARABLE_FIELDS, INSTRUCTIONS, machine
from compressor.measure import paired_times
from compressor.measure.costs import CostTable
from compressor.results import Note, NoteCode, size_label
from compressor.run.pruning.count_costs import count_costs
from compressor.run.pruning.measure_times import (
    MEASURED_SHARES,
    SECONDS_OF_WHOLE,
    Size,
    keep_counts,
    measure_times,
)
from compressor.run.pruning.plan_engines import PlanEngines
from compressor.run.run_log import RunLog
from compressor.store import Json, Store, Stored, digest, version_of, versioned
from compressor.targets import TARGETS, Engine, target
from compressor.targets.base import Feeds
from compressor.targets.machine import user_cache
from compressor.units import PrunableGroup

_SECONDS_OF_PLAN = 8.0
"""Time spent on each engine when the engine of a plan is timed, at each size."""
_TABLES, _TIMES = Json[list[CostTable]](list[CostTable]), Json[list[float]](list[float])
_COSTS = "costs-"
"""Prefix of the names of cost tables in the cache of the user."""
_OUTDATED_BY = ("measured shares", "machine", "device", "runtime")
"""Fields of the key that replace a stored table when they change; tables that differ in others are kept beside it."""
_NAMED_TABLES = 3
"""Maximum number of stored tables that a note names."""
_DRIFT = 0.25
"""Change of the whole model's time relative to dense from which on a stored table no longer holds."""


@dataclass(frozen=True)
class CostSource:
    """Gives the cost tables of one model, engine and machine.

    Attributes:
        model: the model; only its structure matters.
        groups: the groups.
        engines: builds the engine of a plan.
        dense: the runtime's own engine of the whole model.
        inputs: one batch of inputs for each size.
        log: receives stages and notes.
    """

    model: PreTrainedModel
    groups: Sequence[PrunableGroup]
    engines: PlanEngines
    dense: Engine
    inputs: Mapping[Size, Feeds]
    log: RunLog
    _rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False, repr=False)

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
        key, store, measure = self.key(), _cache(), functools.partial(self._measure, macs)
        name = _COSTS + digest({name: value for name, value in key.items() if name not in _OUTDATED_BY})[:16]
        rescaled: list[CostTable] = []

        def holds(tables: list[CostTable]) -> bool:
            now = self._rescaled(tables)
            drift = max(
                abs(current.whole / current.dense * table.dense / table.whole - 1)
                for current, table in zip(now, tables, strict=True)
            )
            is_current = drift <= _DRIFT
            text = "is that of an earlier run; times of the whole model were measured again"
            if is_current:
                rescaled.extend(now)
            else:
                text = f"is measured again: relative to dense, the time of the whole model has changed by {drift:.0%}"
            code = NoteCode.COSTS_REUSED if is_current else NoteCode.COSTS_REMEASURED
            self.log.add_notes([Note(code=code, text=f"the cost table in {store.path / name} {text}")])
            return is_current

        def note_unwritable(error: OSError) -> None:
            text = f"the cost table could not be stored ({error}); the next run measures it again"
            self.log.add_notes([Note(code=NoteCode.COSTS_NOT_STORED, text=text)])

        if not store.holds(name, key, measure) and (others := stored_costs(self.model, self.groups)[:_NAMED_TABLES]):
            described = "; of another ".join(_differences(stored, key) for stored in others)
            text = f"the cost table is measured, because those stored for this model are of another {described}"
            self.log.add_notes([Note(code=NoteCode.COSTS_REMEASURED, text=text)])
        tables = store.memo(name, key, measure, _TABLES, accept=holds, on_unwritable=note_unwritable)
        return rescaled or tables

    @versioned(
        1, "compressor.measure.costs", "compressor.run.pruning.measure_times", "compressor.run.pruning.plan_engines"
    )
    def _measure(self, macs: CostTable, work: Path) -> list[CostTable]:
        """Tables that are measured now; the times of the first plans may be in a folder of unfinished work."""
        with self.log.stage(f"timing the cost of units ({self.engines.choice.label})") as on_progress:
            unpruned, parts = (self.engines.whole, self.dense), Store(work, version=version_of(self._measure))
            return measure_times(self.engines, self.groups, macs, unpruned, self.inputs, parts, on_progress)

    def time_tables_once(self, macs: CostTable, store: Store) -> list[CostTable]:
        """`time_tables`, measured once in a run: with other times another plan would fit the budget.

        Args:
            macs: multiply-accumulates, by which equal groups are recognized.
            store: keeps the times until the run has its plan.
        """

        def note(_: object) -> bool:
            text = "the times of units and plans are those that the interrupted run measured"
            self.log.add_notes([Note(code=NoteCode.RESUMED, text=text)])
            return True

        return store.memo("times", self.key(), lambda _: self.time_tables(macs), _TABLES, accept=note)

    def time_plan_once(self, counts: Mapping[str, int], tables: Sequence[CostTable], store: Store) -> list[float]:
        """`time_plan`, measured once in a run for each plan."""
        name, inputs = f"plan-{digest(dict(counts))[:16]}", {**self.key(), "counts": dict(counts)}
        return store.memo(name, inputs, lambda _: self.time_plan(counts, tables), _TIMES)

    def time_plan(self, counts: Mapping[str, int], tables: Sequence[CostTable]) -> list[float]:
        """Milliseconds of a call of the engine of a plan at the size of each table.

        The engine takes turns with that of the whole model and with dense, as in the last measurement of a run: which
        engines it follows can change the time of a small one. Its time is given relative to the whole model in the same
        precision, which a disturbance of the machine slows down more alike than dense.

        Args:
            counts: name of the group -> number of units that the plan keeps; the others keep all.
            tables: tables of times.
        """
        with self.log.stage(f"timing the plan, round {next(self._rounds)}"):
            engine = self.engines.build(keep_counts(self.engines.reference.plan, self.groups, counts))
            times = []
            for table in tables:
                feeds = self.inputs[table.batch, table.seq]
                whole, _, seconds = paired_times([self.engines.whole, self.dense, engine], feeds, 3 * _SECONDS_OF_PLAN)
                times.append(table.whole * seconds / whole)
            self.engines.discard(engine)
        return times

    def _rescaled(self, tables: Sequence[CostTable]) -> list[CostTable]:
        """Stored tables with the times of the whole model as they are now, and savings in proportion."""
        rescaled = []
        with self.log.stage("timing the whole model"):
            for table in tables:
                feeds = self.inputs[table.batch, table.seq]
                seconds = paired_times([self.engines.whole, self.dense], feeds, 2 * SECONDS_OF_WHOLE)
                whole, dense = (1e3 * value for value in seconds)
                rescaled.append(table.scaled(whole / table.whole).model_copy(update={"dense": dense}))
        return rescaled

    def key(self) -> dict[str, str]:
        """Everything that times depend on."""
        facts, runtime = machine(), self.dense.session.get("runtime")
        versions = [facts.get(package) for name in TARGETS for package in target(name).packages]
        return {
            "structure": _structure(self.model, self.groups),
            "engine": f"{self.engines.choice.label}, unread positions dropped: {self.engines.drop_unread}",
            "products in fp32": json.dumps(self.engines.choice.in_float),
            "graph": self.engines.reference_form,
            "size": json.dumps([list(self.inputs), self.engines.options.shapes]),
            "device": self.dense.host,
            **_measurement(facts),
            "runtime": json.dumps([runtime, *versions]),
        }


def stored_costs(model: PreTrainedModel, groups: Sequence[PrunableGroup]) -> list[Stored]:
    """The stored tables of models of the same structure, newest first, of whatever engine, size and machine."""
    structure = _structure(model, groups)
    return [stored for stored in _cache().stored(f"{_COSTS}*") if stored.inputs.get("structure") == structure]


def latest_tables(model: PreTrainedModel, groups: Sequence[PrunableGroup]) -> list[CostTable] | None:
    """The tables of a model that were measured last on this machine, of whatever engine and size; None: there are none.

    Times are as they were then, with the runtime of then.
    """
    here = _measurement(machine())
    for stored in stored_costs(model, groups):
        with contextlib.suppress(OSError, ValueError):  # of another version
            if here.items() <= stored.inputs.items():
                return _TABLES.load(stored.folder)
    return None


def _cache() -> Store:
    """Cost tables of all runs of the user."""
    return Store(user_cache(), is_shared=True)


def _structure(model: PreTrainedModel, groups: Sequence[PrunableGroup]) -> str:
    """What times depend on of a model: its configuration and units, not its weights."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name != "_name_or_path"}
    units = [(group.name, group.units, group.step, group.parts) for group in groups]
    return json.dumps([type(model).__name__, config, units], sort_keys=True, default=str)


def _measurement(facts: Mapping[str, str]) -> dict[str, str]:
    """How and on which machine times are measured."""
    return {
        "measured shares": json.dumps(MEASURED_SHARES),
        "machine": json.dumps({name: facts.get(name) for name in (*COMPARABLE_FIELDS, *INSTRUCTIONS)}),
    }


def _differences(stored: Stored, key: Mapping[str, str]) -> str:
    """The fields of the key in which stored tables differ: `engine (ort fp32) and size (batch 1, length 128)`."""
    sizes = json.loads(stored.inputs.get("size", "[[]]"))[0]
    sizes = "; ".join(size_label(batch, seq) for batch, seq in sizes)
    values = {"engine": f" ({stored.inputs.get('engine')})", "size": f" ({sizes})"}  # the others are too long to read
    differing = [name for name in key if stored.inputs.get(name) != key[name]] or ["version of the measurement"]
    return " and ".join(f"{name}{values.get(name, '')}" for name in differing)
