"""Budgets in reports: a row for each bound, and tables of where the cost goes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from compressor.report import load, summary, write
from compressor.report.budgets import budget_lines, budget_table, cost_lines, cost_tables
from compressor.report.html import render
from compressor.results import BudgetRow, CostShare, Report
from tests.report import reports

BUDGET = (
    BudgetRow(label="batch 1, length 128", unit="ms", requested=2.0, predicted=1.9, reached=1.95, dense=4.0),
    BudgetRow(label="whole model", unit="parameters", requested=6e6, predicted=7e6, reached=7e6, dense=1e7, met=False),
)
COSTS = tuple(
    CostShare(label="batch 1, length 128", unit="ms", type=kind, before=before, after=after)
    for kind, before, after in (("attention", 1.0, 0.25), ("feed-forward", 2.0, 0.75), ("rest", 1.0, 1.0))
)


def report() -> Report:
    return reports.report(budget=BUDGET, costs=COSTS)


def test_a_budget_is_compared_with_what_was_reached() -> None:
    assert budget_table(BUDGET) == [
        ("time, batch 1, length 128", "4.00 ms", "2.00 ms", "1.90 ms", "1.95 ms", "48.8%", "met"),
        ("parameters", "10M", "6M", "7M", "7M", "70.0%", "missed"),
    ]
    assert budget_lines(BUDGET) == [
        "budget, time, batch 1, length 128: 2.00 ms requested, 1.90 ms predicted, 1.95 ms reached: met",
        "budget, parameters: 6M of 10M requested, 7M predicted, 7M reached: missed",
    ]


@pytest.mark.parametrize(
    ("reached", "low", "high", "outcome"),
    [
        *((1.9, 1.8, 1.99, "met"), (1.9, 1.8, 2.1, "met by the median")),
        *((2.3, 1.9, 2.4, "missed by the median"), (2.3, 2.2, 2.4, "missed")),
    ],
)
def test_a_time_whose_interval_includes_the_budget_is_met_or_missed_by_the_median(
    reached: float, low: float, high: float, outcome: str
) -> None:
    row = BUDGET[0].model_copy(update={"reached": reached, "low": low, "high": high, "met": reached < 2.04})
    assert budget_table([row])[0][-1] == outcome


def test_a_prediction_without_a_budget_has_no_outcome() -> None:
    row = BUDGET[0].model_copy(update={"requested": None})
    assert budget_table([row]) == [("time, batch 1, length 128", "4.00 ms", "", "1.90 ms", "1.95 ms", "48.8%", "")]
    assert budget_lines([row]) == ["budget, time, batch 1, length 128: 1.90 ms predicted, 1.95 ms reached"]
    marks = [render(reports.report(budget=rows)).count('<span class="') for rows in ((), (row,), BUDGET[:1])]
    assert marks[0] == marks[1] == marks[2] - 1


def test_costs_have_shares_of_the_whole_and_of_the_plan() -> None:
    ((title, rows),) = cost_tables(COSTS)
    assert title == "Time, batch 1, length 128"
    assert [row[:1] + row[2:5:2] for row in rows] == [
        ("attention", "25.0%", "12.5%"),
        ("feed-forward", "50.0%", "37.5%"),
        ("rest", "25.0%", "50.0%"),
        ("sum", "100.0%", "100.0%"),
    ]
    assert cost_lines(COSTS) == [
        "time, batch 1, length 128: attention 1.00 ms → 0.250 ms, feed-forward 2.00 ms → 0.750 ms, rest 1.00 ms"
    ]


def test_each_size_has_a_table_of_its_own() -> None:
    larger = tuple(row.model_copy(update={"label": "batch 8, length 128"}) for row in COSTS)
    assert len(cost_tables((*COSTS, *larger))) == 2


def test_page_and_summary_show_budgets_only_where_there_are_any() -> None:
    page = render(report())
    assert page.count('id="budget"') == page.count('id="costs"') == 1
    assert 'id="budget"' not in render(reports.report())
    buffer = io.StringIO()
    Console(width=200, file=buffer).print(summary(report()))
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    assert set(lines) >= {*budget_lines(BUDGET), *cost_lines(COSTS)}


@pytest.mark.parametrize("fields", [{"budget": BUDGET, "costs": COSTS}, {"costs": COSTS}])
def test_budgets_are_read_back(fields: dict[str, object], tmp_path: Path) -> None:
    written = reports.report(**fields)
    write(written, tmp_path)
    assert load(tmp_path) == Report.model_validate(written.model_dump())
