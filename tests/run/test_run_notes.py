"""Notes of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compressor.engines.build import ShrunkGraph
from compressor.engines.score import score_notes
from compressor.measure.costs import CostTable, GroupCosts
from compressor.pruning.allocate import Allocation, Constraint, budget_notes
from compressor.results import Latency, Note, NoteCode, Score, Speed
from compressor.run import run_notes
from compressor.run.plan_source import selection_notes
from compressor.selection.plan_and_curves import SelectedPlan
from graph_passes import BlockMask, Plan, Refusal, SitePlan


@pytest.mark.parametrize(
    ("method", "codes"),
    [
        ("dsp", [NoteCode.TRAINED_ALONG]),
        ("reconstruct", [NoteCode.WEIGHTS_CHANGED]),
        ("dsp+reconstruct", [NoteCode.WEIGHTS_CHANGED, NoteCode.TRAINED_ALONG]),
        ("astar+reconstruct", [NoteCode.WEIGHTS_CHANGED]),
    ],
)
def test_weights_that_were_trained_or_adjusted_are_noted(method: str, codes: list[NoteCode]) -> None:
    plan = Plan(sites=(SitePlan("a", "bidirectional", 2, 2, 4, (0,)),), method=method)
    folder: Any = SimpleNamespace(config=None, task="sequence-classification", kind="model folder")
    data: Any = SimpleNamespace(test=["a row"])
    notes = selection_notes(folder, SelectedPlan(plan, (), trained=True), data)
    assert [note.code for note in notes] == codes


@pytest.mark.parametrize(("method", "codes"), [("magnitude", [NoteCode.WEIGHTS_CHANGED]), (None, [])])
def test_units_are_not_said_to_be_selected_by_a_distillation(method: str | None, codes: list[NoteCode]) -> None:
    plan = Plan(sites=(SitePlan("a", "bidirectional", 2, 2, 4, (0,)),), method=method)
    folder: Any = SimpleNamespace(config=None, task="sequence-classification", kind="model folder")
    data: Any = SimpleNamespace(test=["a row"])
    distilled = SelectedPlan(plan, (), trained=True, notes=(Note(code=NoteCode.DISTILLED, text="1 step"),))
    notes = list(selection_notes(folder, distilled, data))
    assert [note.code for note in notes] == codes
    assert all("unchanged, and then distilled" in note.text for note in notes)


@pytest.mark.parametrize(
    ("lengths", "maximum", "shorter"),
    [((16, None), None, ""), ((8, 16, 12), None, "8, 12"), ((8, 12), 12, "8"), ((24,), 40, "")],
)
def test_masks_longer_than_the_measured_lengths_are_noted(
    lengths: tuple[int | None, ...], maximum: int | None, shorter: str
) -> None:
    whole = Plan(sites=(SitePlan("a", "bidirectional", 2, 2, 4, (0, 1)),))
    masked = whole.masked({"a": BlockMask(np.ones((2, 2, 2), np.bool_), 8)})
    notes = list(run_notes.mask_notes(masked, lengths, maximum))
    assert [note.code for note in notes] == ([NoteCode.MASKS_LONGER] if shorter else [])
    assert all(f"at length {shorter} only" in note.text for note in notes)
    assert not list(run_notes.mask_notes(whole, lengths, maximum))


@pytest.mark.parametrize(
    ("fields", "cost", "numbers"),
    [
        ({"unit": "macs", "batch": 1, "seq": 128}, 1e9, ("batch 1, length 128: 154M multiply-", "154M reached (15.4%")),
        ({"unit": "parameters"}, 1e9, ("154M parameters allowed", "154M reached (15.4%")),
        ({"unit": "heads"}, 1e3, ("154 heads allowed", "154 reached (15.4%")),
        ({"unit": "ms", "batch": 8}, 1e5, ("batch 8: 15400 ms allowed", "15400 ms reached (15.4%", "15400 ms)")),
    ],
)
def test_budgets_are_noted_in_the_numbers_of_the_report(
    fields: dict[str, Any], cost: float, numbers: tuple[str, ...]
) -> None:
    constraint = Constraint(CostTable(dense=cost, whole=cost, rows=(), **fields), 0.154 * cost)
    (note,) = budget_notes([constraint], Allocation({}, (0.154 * cost,), (0.154 * cost,)))
    assert note.code is NoteCode.BUDGET_MET
    assert note.text.startswith(numbers[0])
    assert all(number in note.text for number in numbers)
    assert "e+" not in note.text


def test_a_budget_that_one_size_exceeds_does_not_keep_everything() -> None:
    row = GroupCosts(groups=("a",), type="neurons", counts=(0, 32), savings=(0.5, 0.0))
    small, large = (CostTable(unit="ms", batch=batch, seq=8, dense=5, whole=batch, rows=(row,)) for batch in (1, 8))
    constraints, counts = [Constraint(small, 7.6), Constraint(large, 7.6)], {"a": 4}
    costs = small.cost(counts), large.cost(counts)
    codes = {note.code for note in budget_notes(constraints, Allocation(counts, costs, costs))}
    assert codes == {NoteCode.BUDGET_MET}
    whole = small.whole, large.whole
    (first, *_) = budget_notes(constraints, Allocation({"a": 32}, whole, whole))
    assert first.code is NoteCode.BUDGET_ABOVE_DENSE
    assert all(f"{table.whole:g}" in first.text for table in (small, large))
    loose = [Constraint(table, 1000.0) for table in (small, large)]
    notes = list(budget_notes(loose, Allocation({"a": 32}, whole, whole)))
    assert not any("bounds the plan" in note.text for note in notes)


@pytest.mark.parametrize(
    ("low", "high", "void", "uncertain"),
    [(2.0, 2.9, None, False), (2.0, 3.1, None, True), (2.0, 3.1, "nothing was fused", False)],
)
def test_speeds_with_a_wide_interval_are_noted(low: float, high: float, void: str | None, uncertain: bool) -> None:
    times = Latency(p50=4.0, p90=4.0, p99=4.0, throughput=1.0, samples=(4.0,))
    speed = Speed(batch=8, seq=None, dense=times, compressed=times, ratio=2.5, low=low, high=high, void=void)
    assert [note.code for note in run_notes.speed_notes([speed])] == [NoteCode.SPEED_UNCERTAIN] * uncertain


@pytest.mark.parametrize("later", [1.0, 3.0, 4.0, 5.0, 12.0])
def test_a_speed_is_uncertain_where_its_engine_takes_another_time_beside_another_one(later: float) -> None:
    def speed(milliseconds: float) -> Speed:
        times = Latency(p50=milliseconds, p90=4.0, p99=4.0, throughput=1.0, samples=(4.0,))
        return Speed(batch=8, seq=128, dense=times, compressed=times, ratio=2.5, low=2.4, high=2.6)

    notes = list(run_notes.speed_notes([speed(4.0)], [speed(later)]))
    assert [note.code for note in notes] == [NoteCode.SPEED_UNCERTAIN] * (later in (1.0, 12.0))


@pytest.mark.parametrize(
    ("dense", "constant", "changed", "expected"),
    [
        (0.9, 0.6, True, []),
        (0.6, 0.6, True, [NoteCode.DENSE_UNINFORMED]),
        (0.9, 0.6, False, [NoteCode.ANSWERS_UNCHANGED]),
        (0.9, None, False, []),
    ],
)
def test_what_a_metric_cannot_show_is_noted(
    dense: float, constant: float | None, changed: bool, expected: list[NoteCode]
) -> None:
    fields = {"metric": "accuracy", "split": "test", "rows": 10, "difference": 0.0, "low": 0.0, "high": 0.0}
    score = Score(dense=dense, compressed=0.9, **fields)
    before = np.zeros((10, 2))
    after = before + [[float(changed), 0.0]] * 10
    assert [note.code for note in score_notes(score, before, after, constant)] == expected


def test_heads_without_blocks_are_named() -> None:
    requested = Plan(sites=(SitePlan("a", "bidirectional", 3, 3, 4, (0, 1, 2)),))
    carried_out = Plan(sites=(SitePlan("a", "bidirectional", 3, 3, 4, (1,)),))
    (note,) = run_notes.emptied_head_notes(requested, carried_out)
    assert note.code is NoteCode.HEADS_EMPTIED
    assert "a 0, 2" in note.text
    assert not list(run_notes.emptied_head_notes(requested, requested))


def test_norms_that_read_dropped_heads_are_noted() -> None:
    norm = Refusal(frozenset(("a",)), "ReduceMean", "node", "needs every unit")
    plan = Plan(sites=(SitePlan("a", "causal", 2, 2, 4, (0,)),))
    graph = ShrunkGraph("compressed", plan, Path("model.onnx"), (), shared=(norm,))
    (note,) = run_notes.graph_notes(graph)
    assert note.code is NoteCode.NORM_OVER_ALL_HEADS
    assert "ReduceMean" in note.text
    assert not list(run_notes.graph_notes(replace(graph, shared=())))
