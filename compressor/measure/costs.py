"""Cost tables: what a group of units costs at each number of units that is kept, and what a plan costs in all."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from scipy.optimize import isotonic_regression

from compressor.results import CostUnit, size_label
from compressor.results.budgets import WHOLE_MODEL
from graph_passes.files import write_text

CLIFF = 1.05
"""Ratio of times from which on a larger number of units that is faster than a smaller one is called a cliff."""
_ERRORS_OF_CLIFF = 4.0
"""Multiple of its standard error that such a difference has to exceed."""


class GroupCosts(BaseModel):
    """Costs of equal groups at some numbers of units.

    Attributes:
        groups: names of the groups that share the row.
        type: `heads` or `neurons`.
        counts: numbers of units that were measured, ascending; the last one is all.
        savings: what one of the groups saves at each number, against all of its units; the last one is zero.
        errors: standard error of the difference between the savings at each number and at the next larger one; empty:
            they are exact.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: tuple[str, ...]
    type: str
    counts: tuple[int, ...]
    savings: tuple[float, ...]
    errors: tuple[float, ...] = ()

    @functools.cached_property
    def _smoothed(self) -> tuple[float, ...]:
        """The closest savings that never grow with the number of units: fewer units are no slower, but for noise."""
        smoothed = isotonic_regression(self.savings, increasing=False).x
        return tuple(float(saving - smoothed[-1]) for saving in smoothed)

    def saving(self, count: int) -> float:
        """The saving at any number of units, without noise: between two that were measured it is linear."""
        return float(np.interp(count, self.counts, self._smoothed))

    def with_savings(self, savings: Sequence[float], errors: Sequence[float] = ()) -> GroupCosts:
        """The row with other savings, and their errors."""
        # A copy would keep the smoothed savings of this row, which are cached.
        fields = {"groups": self.groups, "type": self.type, "counts": self.counts}
        return GroupCosts(**fields, savings=tuple(savings), errors=tuple(errors))

    def scaled(self, factor: float) -> GroupCosts:
        """The row with all savings multiplied by a factor."""
        savings, errors = ([factor * value for value in values] for values in (self.savings, self.errors))
        return self.with_savings(savings, errors)

    @property
    def cliffs(self) -> tuple[int, ...]:
        """Numbers of units that cost more than the next larger number that was measured, beyond noise."""
        excess = np.diff(self.savings)
        errors = np.array(self.errors) if self.errors else np.zeros_like(excess)
        least = np.maximum((CLIFF - 1) * max(self.savings), _ERRORS_OF_CLIFF * errors)
        return tuple(count for count, is_cliff in zip(self.counts, excess > least, strict=False) if is_cliff)


class CostTable(BaseModel):
    """What plans of one model cost, in one unit and at one size.

    Costs add up: a plan costs what the whole model costs, less the saving of each group. Times of operators that run
    side by side or share a cache add up only nearly, so a table of times has a curve from the sum to the time that
    plans with this sum take.

    Attributes:
        unit: `ms` for times; `macs`, `parameters` or `heads` for counts.
        engine: target, precision and form of the engine, e.g. `openvino int8 portable`; empty for counts.
        batch: rows in a call; 0 for counts that do not depend on it.
        seq: length in tokens; None: the model has one size.
        dense: cost of the runtime's own engine of the whole model, which ratios refer to.
        whole: cost with every unit, in the form that plans are measured in.
        rows: the groups.
        curve: sum of costs and cost of plans in which every group keeps another share, as fitted to engines, both
            ascending; empty where sums are exact.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: CostUnit
    engine: str = ""
    batch: int = 0
    seq: int | None = None
    dense: float
    whole: float
    rows: tuple[GroupCosts, ...]
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def least(self) -> float:
        """Cost of a plan that keeps nothing: no budget below it can be met."""
        return self.at_sum(self.least_sum)

    @property
    def least_sum(self) -> float:
        """Sum of the costs of a plan that keeps nothing."""
        return self.whole - sum(len(row.groups) * row.saving(0) for row in self.rows)

    @property
    def size_label(self) -> str:
        """The size that the costs are of: `batch 1, length 128`, or `whole model` for counts that have none."""
        return size_label(self.batch, self.seq) if self.batch else WHOLE_MODEL

    def saving(self, group: str, count: int) -> float:
        """What a group saves at a number of units, against all of them, in the unit of the table.

        Raises:
            KeyError: no row has the group.
        """
        row = next((row for row in self.rows if group in row.groups), None)
        if row is None:
            raise KeyError(group)
        return row.saving(count)

    def sum_of(self, counts: Mapping[str, int]) -> float:
        """Sum of the costs of a plan, from the number of kept units of each group; those not named keep all."""
        return self.whole - sum(self.saving(group, count) for group, count in counts.items())

    def cost(self, counts: Mapping[str, int]) -> float:
        """Cost of a plan, from the number of kept units of each group; groups that are not named keep all."""
        return self.at_sum(self.sum_of(counts))

    def at_sum(self, total: float) -> float:
        """Cost of a plan whose costs have this sum: linear between the points of the curve."""
        return total if not self.curve else _interpolated(total, self.curve)

    def sum_at(self, cost: float) -> float:
        """The sum of costs at which a plan has this cost; the inverse of `at_sum`."""
        return cost if not self.curve else _interpolated(cost, [(after, before) for before, after in self.curve])

    def with_fixed(self, counts: Mapping[str, int]) -> CostTable:
        """The table of a model whose groups of these names keep these numbers of units, and save nothing more.

        Args:
            counts: name of the group -> number of units. Groups that have no row are ignored.
        """
        rows = []
        for row in self.rows:
            free, fixed = (tuple(name for name in row.groups if (name in counts) is fix) for fix in (False, True))
            if free:
                rows.append(row.model_copy(update={"groups": free}))
            if fixed:
                rows.append(row.with_savings([0.0] * len(row.counts)).model_copy(update={"groups": fixed}))
        known = {name: counts[name] for row in self.rows for name in row.groups if name in counts}
        return self.model_copy(update={"whole": self.sum_of(known), "rows": tuple(rows)})

    def scaled(self, factor: float) -> CostTable:
        """The table with all costs but that of dense multiplied by a factor."""
        rows = tuple(row.scaled(factor) for row in self.rows)
        curve = tuple((factor * total, factor * cost) for total, cost in self.curve)
        return self.model_copy(update={"whole": factor * self.whole, "rows": rows, "curve": curve})

    def share_of(self, kind: str) -> float:
        """Share of the cost of the whole model that the groups of a type account for."""
        saved = sum(len(row.groups) * row.saving(0) for row in self.rows if row.type == kind)
        return saved / self.whole


def _interpolated(value: float, points: Sequence[tuple[float, float]]) -> float:
    """The second coordinate at a value of the first; beyond the ends it grows as the value does."""
    first, second = zip(*points, strict=True)
    inside = min(max(value, first[0]), first[-1])
    return float(np.interp(inside, first, second)) + value - inside


class StoredTables(BaseModel):
    """Cost tables in a file, with everything that they depend on.

    Attributes:
        key: the model's structure, the engine, its settings, the sizes and the machine.
        tables: one table for each size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: Mapping[str, str]
    tables: tuple[CostTable, ...]


def load_tables(path: Path, key: Mapping[str, str]) -> tuple[tuple[CostTable, ...], tuple[str, ...]]:
    """Tables that were stored, and the fields of the key that differ; no tables where any differs, or without a file.

    A file that cannot be read counts as none.
    """
    stored = read_tables(path)
    if stored is None:
        return (), ()
    differing = tuple(name for name in key if stored.key.get(name) != key[name])
    return (stored.tables if not differing else ()), differing


def read_tables(path: Path) -> StoredTables | None:
    """The content of a file of tables; None: it cannot be read."""
    try:
        return StoredTables.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def save_tables(path: Path, key: Mapping[str, str], tables: Sequence[CostTable]) -> None:
    """Store tables; the file appears completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = StoredTables(key=dict(key), tables=tuple(tables)).model_dump_json(indent=1)
    write_text(path, content)
