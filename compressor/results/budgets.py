"""Budgets, and where the cost of a model goes."""

from __future__ import annotations

from typing import Literal

from compressor.results.rows import Row

CostUnit = Literal["ms", "macs", "parameters", "heads"]
"""Milliseconds of a call, or counts of multiply-accumulates, parameters or heads."""
WHOLE_MODEL = "whole model"
"""Label of a cost that depends on no size."""


class BudgetRow(Row):
    """One bound on the cost of the plan, and the cost of the plan.

    `requested` is the bound; None where the metric bounds the plan, whose cost is shown against its prediction. `batch`
    and `seq` are the size at which it holds; both are None for a count of the whole model, and in reports of earlier
    versions. `label` is the size in words, or `whole model`. `predicted` is the cost of the plan by the cost table, and
    `dense` that of the dense engine. `reached` is the cost of the engine: for times, `dense` over the speed of the
    delivered engine that was timed in turn with dense, with the interval from `low` to `high`; where the machine has no
    such engine, the time of one that was built while units were allocated.
    """

    label: str
    batch: int | None = None
    seq: int | None = None
    unit: CostUnit
    requested: float | None
    predicted: float
    reached: float
    dense: float
    met: bool = True
    low: float | None = None
    high: float | None = None


class CostShare(Row):
    """What one type of layer costs before and after pruning, by the cost table.

    `batch` and `seq` are the size, as in `BudgetRow`, and `label` is the size in words. `type` is the type of layer:
    `rest` is what no group of units accounts for, such as embeddings, normalizations and the output. The rows of one
    label and unit add up to the cost of the whole model.
    """

    label: str
    batch: int | None = None
    seq: int | None = None
    unit: CostUnit
    type: Literal["attention", "feed-forward", "rest"]
    before: float
    after: float
