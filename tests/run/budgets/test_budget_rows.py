"""Rows of the report on budgets: what was requested, predicted and reached, and where the cost goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.measure.costs import CostTable, GroupCosts
from compressor.model_folder.access import access_of
from compressor.pruning.allocate import Allocation, Constraint
from compressor.results import BudgetRow, CostShare, Latency, NoteCode, Speed
from compressor.run.plan_source import PlanFiles
from compressor.run.steps.base import PLAN
from compressor.run.steps.units import budget_rows, cost_shares, delivered_rows, predicted_rows
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Store
from graph_passes import Plan, SitePlan
from graph_passes.plan import NeuronPlan
from tests import folders
from tests.report.reports import speed as speed_of

TABLE = CostTable(
    unit="ms",
    engine="ort fp32",
    batch=8,
    seq=128,
    dense=12.0,
    whole=10.0,
    rows=(
        GroupCosts(groups=("attention", "late"), type="heads", counts=(0, 2, 4), savings=(2.0, 1.0, 0.0)),
        GroupCosts(groups=("dense",), type="neurons", counts=(0, 8), savings=(4.0, 0.0)),
    ),
)
COUNTS = {"attention": 2, "late": 0, "dense": 4}


def plan() -> Plan:
    sites = [SitePlan(name, "bidirectional", 4, 4, 8, tuple(range(COUNTS[name]))) for name in ("attention", "late")]
    return Plan(groups=(*sites, NeuronPlan("dense", 8, tuple(range(4)))))


@pytest.mark.parametrize(("reached", "met"), [(5.0, True), (5.09, True), (5.2, False)])
def test_a_row_compares_the_plan_with_its_budget(reached: float, met: bool) -> None:
    allocation = Allocation(COUNTS, (TABLE.cost(COUNTS),), (reached,))
    (row,) = budget_rows([Constraint(TABLE, 5.0)], allocation)
    fields = {"requested": 5.0, "predicted": 5.0, "reached": reached, "dense": 12.0, "met": met}
    assert row == BudgetRow(label="batch 8, length 128", batch=8, seq=128, unit="ms", **fields)


def test_a_speed_that_is_void_meets_no_budget() -> None:
    (row,) = budget_rows([Constraint(TABLE, 5.0)], Allocation(COUNTS, (5.0,), (6.0,)))
    speed = speed_of(8, 128, 12.0, 4.0)
    assert delivered_rows([row], [speed])[0][0].met
    assert delivered_rows([row], [speed.model_copy(update={"void": "other settings"})])[0] == (row,)


def test_a_plan_without_a_budget_is_compared_with_its_prediction() -> None:
    (row,) = predicted_rows([TABLE], COUNTS)
    assert (row.unit, row.batch, row.seq, row.requested) == ("ms", 8, 128, None)
    assert (row.predicted, row.dense) == (TABLE.cost(COUNTS), TABLE.dense)


def test_a_count_of_the_whole_model_has_no_size() -> None:
    table = TABLE.model_copy(update={"unit": "parameters", "batch": 0, "seq": None})
    (row,) = budget_rows([Constraint(table, 5.0)], Allocation(COUNTS, (5.0,), (5.0,)))
    assert (row.label, row.batch, row.seq, row.unit) == ("whole model", None, None, "parameters")


def test_costs_of_types_add_up_to_the_table() -> None:
    shares = cost_shares([TABLE], plan())
    assert [(row.type, row.before, row.after) for row in shares] == [
        ("attention", 4.0, 1.0),
        ("feed-forward", 4.0, 2.0),
        ("rest", 2.0, 2.0),
    ]
    assert sum(row.before for row in shares) == TABLE.whole
    assert sum(row.after for row in shares) == TABLE.cost(COUNTS)


def test_costs_of_types_add_up_to_the_time_of_a_plan_where_times_do_not_add_up() -> None:
    table = TABLE.model_copy(update={"curve": ((2.0, 2.0), (6.0, 7.0), (10.0, 10.0))})
    shares = cost_shares([table], plan())
    assert sum(row.before for row in shares) == table.whole
    assert sum(row.after for row in shares) == pytest.approx(table.cost(COUNTS))
    assert table.cost(COUNTS) != TABLE.cost(COUNTS)


def test_no_cost_is_negative_where_savings_exceed_the_whole() -> None:
    table = TABLE.model_copy(update={"whole": 7.0, "curve": ((-1.0, 0.5), (3.0, 4.0), (7.0, 7.0))})
    shares = cost_shares([table], plan())
    assert all(row.before >= 0 and row.after >= 0 for row in shares)
    assert (shares[-1].type, shares[-1].before) == ("rest", 0.5)
    assert sum(row.before for row in shares) == pytest.approx(table.whole)


def test_a_resumed_run_keeps_its_rows(tmp_path: Path) -> None:
    rows = budget_rows([Constraint(TABLE, 5.0)], Allocation(COUNTS, (5.0,), (4.9,)))
    shares: tuple[CostShare, ...] = cost_shares([TABLE], plan())
    selected = SelectedPlan(plan(), trained=True, budget=rows, costs=shares)
    model = access_of(folders.bert())
    store = Store(tmp_path, version=1)
    store.memo(PLAN, {}, lambda _: selected, PlanFiles(model))
    assert store.load(PLAN, PlanFiles(model)) == selected


@pytest.mark.parametrize(("ratio", "met"), [(2.0, True), (1.97, True), (1.9, False)])
def test_what_is_delivered_decides_whether_a_time_is_met(ratio: float, met: bool) -> None:
    size = {"label": "batch 1, length 128", "batch": 1, "seq": 128}
    timed = BudgetRow(**size, unit="ms", requested=2.0, predicted=1.9, reached=1.95, dense=4.0)
    counted = BudgetRow(label="whole model", unit="parameters", requested=6e6, predicted=5e6, reached=5e6, dense=1e7)
    latency = Latency(p50=4.0, p90=4.0, p99=4.0, throughput=1.0, samples=(4.0,))
    speed = Speed(
        batch=1,
        seq=128,
        dense=latency,
        compressed=latency,
        ratio=ratio,
        low=ratio - 0.1,
        high=ratio + 0.1,
        confidence=0.95,
    )
    (row, unchanged), notes = delivered_rows((timed, counted), [speed])
    assert unchanged == counted
    assert (row.met, row.reached) == (met, pytest.approx(4.0 / ratio))
    assert row.low is not None
    assert row.high is not None
    assert row.low < row.reached < row.high
    assert [note.code for note in notes] == ([] if met else [NoteCode.BUDGET_MISSED])
    slower = speed.model_copy(update={"dense": latency.model_copy(update={"p50": 12.0})})
    assert NoteCode.TIMES_DRIFTED in {note.code for note in delivered_rows((timed,), [slower])[1]}
    unbounded = timed.model_copy(update={"requested": None})
    (row,), notes = delivered_rows((unbounded,), [speed])
    assert (row.met, row.predicted, row.reached, notes) == (True, 1.9, pytest.approx(4.0 / ratio), [])
    assert delivered_rows((unbounded,), []) == ((), [])
