"""Neurons in reports: counts beside those of heads, and a bar for each feed-forward."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from compressor.report import summary, verdict
from compressor.report.html import neuron_map, render
from compressor.report.verdict import UnitCount, keeps_all_units, unit_counts
from compressor.results import Report
from graph_passes import Plan
from graph_passes.plan import NeuronPlan
from tests.report import reports

NEURONS = (1536, 0, 512, 1024, 256, 512)
"""Neurons kept in each layer, of 1,536."""


def plan_with_neurons(kept: tuple[int, ...] = NEURONS, heads: Plan | None = None) -> Plan:
    """Heads and neurons of a BERT of six layers."""
    heads = heads or reports.bert_plan(31)
    neurons = [
        NeuronPlan(f"bert.encoder.layer.{layer}.output.dense", 1536, tuple(range(count)))
        for layer, count in enumerate(kept)
    ]
    return Plan(groups=(*heads.sites, *neurons), method="reconstruct")


def report(**fields: Any) -> Report:
    return reports.report(**{"plan": plan_with_neurons(), **fields})


def test_units_are_counted_by_type() -> None:
    assert unit_counts(plan_with_neurons()) == [UnitCount("heads", 72, 31), UnitCount("neurons", 9216, 3840)]
    assert unit_counts(reports.bert_plan()) == [UnitCount("heads", 72, 36)]


@pytest.mark.parametrize(
    ("heads_kept", "neurons_kept", "expected"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_nothing_is_removed_only_if_neurons_stay_too(heads_kept: bool, neurons_kept: bool, expected: bool) -> None:
    heads = reports.dense(reports.bert_plan()) if heads_kept else reports.bert_plan()
    plan = plan_with_neurons((1536,) * 6 if neurons_kept else NEURONS, heads)
    assert keeps_all_units(plan) is expected
    facts = reports.engine(10)
    warning = verdict(plan=plan, dense=facts, compressed=facts).partition(":")[0]
    assert ("Nothing was dropped" in warning) is expected


def test_the_verdict_counts_heads_and_neurons() -> None:
    assert report().verdict.startswith("31 of 72 heads and 3,840 of 9,216 neurons kept, 7.8% fewer parameters")
    heads = reports.dense(reports.bert_plan())
    assert report(plan=plan_with_neurons(heads=heads)).verdict.startswith("All 72 heads and 3,840 of 9,216 neurons")


def test_the_summary_has_a_row_for_each_type() -> None:
    buffer = io.StringIO()
    Console(width=120, file=buffer).print(summary(report()))
    rows = {cells[0]: cells[1:4] for line in buffer.getvalue().splitlines() if (cells := line.split())}
    assert rows["heads"] == ["72", "31", "−56.9%"]
    assert rows["neurons"] == ["9,216", "3,840", "−58.3%"]


def test_a_bar_shows_the_share_of_each_feed_forward() -> None:
    bars = neuron_map(plan_with_neurons())
    assert bars is not None
    assert (bars["pattern"], bars["kept"], bars["neurons"]) == ("bert.encoder.layer.*.output.dense", 3840, 9216)
    labelled = [(str(layer), kept) for layer, kept in enumerate(NEURONS)]
    assert [(label, len(group.kept)) for label, group in bars["rows"]] == labelled
    assert neuron_map(reports.bert_plan()) is None


def test_the_page_shows_neurons_only_where_the_plan_lists_them() -> None:
    page = render(report())
    assert re.findall(r'<b style="width: ([0-9.]+)%"', page) == ["100.0", "0.0", "33.3", "66.7", "16.7", "33.3"]
    assert "1,024/1,536" in page
    assert "neuron" not in render(reports.report()).lower()


def test_one_feed_forward_keeps_its_whole_name() -> None:
    plan = Plan(groups=(NeuronPlan("layer.0.wo", 8, (0,)),))
    bars = neuron_map(plan)
    assert bars is not None
    assert [label for label, _ in bars["rows"]] == ["layer.0.wo"]
    assert neuron_map(plan.replace_groups([replace(plan.feed_forwards[0], kept=(), scale=())])) != bars
