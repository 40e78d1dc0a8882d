"""Times that a run measures, kept until it has its plan: with other times another plan would fit the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from compressor.measure.costs import CostTable
from compressor.results import Note, NoteCode
from compressor.run.pruning.cost_tables import CostSource
from compressor.run.pruning.stored_content import StoredContent
from graph_passes.files import write_text


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
class RunTimes:
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
