"""Cost tables of a run: counted, or measured on this machine and kept for later runs."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from compressor.environment import COMPARABLE_FIELDS, INSTRUCTIONS, machine
from compressor.measure import paired_times
from compressor.measure.costs import CostTable, StoredTables, load_tables, read_tables, save_tables
from compressor.progress import RunLog
from compressor.results import Note, NoteCode
from compressor.run.pruning.count_costs import count_costs
from compressor.run.pruning.measure_times import (
    MEASURED_SHARES,
    SECONDS_OF_WHOLE,
    Size,
    keep_counts,
    measure_times,
)
from compressor.run.pruning.partial_shares import PartialShares
from compressor.run.pruning.plan_engines import PlanEngines
from compressor.targets import TARGETS, Engine, target
from compressor.targets.base import Feeds
from compressor.targets.machine import user_cache
from compressor.units import PrunableGroup

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
        elif others := stored_tables(self.model, self.groups)[:_NAMED_FILES]:
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


def stored_tables(model: PreTrainedModel, groups: Sequence[PrunableGroup]) -> list[StoredTables]:
    """The stored tables of models of the same structure, newest first, of whatever engine, size and machine."""
    files = [file for file in user_cache().glob("costs-*.json") if not file.name.endswith(_PARTIAL)]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    structure = _structure(model, groups)
    return [stored for stored in map(read_tables, files) if stored and stored.key.get("structure") == structure]


def latest_tables(model: PreTrainedModel, groups: Sequence[PrunableGroup]) -> StoredTables | None:
    """The tables of a model that were measured last on this machine, of whatever engine and size; None: there are none.

    Times are as they were then, with the runtime of then.
    """
    here = _measurement(machine())
    return next((stored for stored in stored_tables(model, groups) if here.items() <= stored.key.items()), None)


def _structure(model: PreTrainedModel, groups: Sequence[PrunableGroup]) -> str:
    """What times depend on of a model: its configuration and units, not its weights."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name != "_name_or_path"}
    units = [(group.name, group.units, group.step, group.parts) for group in groups]
    return json.dumps([type(model).__name__, config, units], sort_keys=True, default=str)


def _measurement(facts: Mapping[str, str]) -> dict[str, str]:
    """How and on which machine times are measured."""
    return {
        "measured shares": json.dumps(MEASURED_SHARES),
        "form of engines": _FORM,
        "machine": json.dumps({name: facts.get(name) for name in (*COMPARABLE_FIELDS, *INSTRUCTIONS)}),
    }


def _differences(stored: StoredTables, key: Mapping[str, str]) -> str:
    """The fields of the key in which stored tables differ: `engine (ort fp32) and size (batch 1, length 128)`."""
    sizes = "; ".join(table.size_label for table in stored.tables)
    values = {"engine": f" ({stored.key.get('engine')})", "size": f" ({sizes})"}  # the others are too long to read
    return " and ".join(f"{name}{values.get(name, '')}" for name in key if stored.key.get(name) != key[name])
