"""A* pruning: the paper's figure 7, and the lazy variant."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.results import NoteCode
from compressor.selection.search import Head
from compressor.selection.search.astar import AStarOptions, AStarSearch
from tests.selection.search.test_search import costs, pairs
from tests.selection.tables import HEADS, TableEvaluator, additive

GRID = tuple((str(layer), head) for layer in range(3) for head in range(3))
FIRST = [15.0, 9, 5, 12, 8, 10, 13, 7, 11]
LAZY, PAPER = AStarSearch(AStarOptions(variant="lazy")), AStarSearch()


def grid(*matrices: Sequence[float | None]) -> TableEvaluator:
    """Figure 7: the cost matrix of each iteration; None: a head that must not be evaluated."""
    removed_in_order = [("0", 2), ("2", 1)]

    def metric(kept: frozenset[Head]) -> float:
        removed = set(GRID) - kept
        if not removed:
            return 100.0
        (candidate,) = removed - set(removed_in_order[: len(removed) - 1])
        cost = matrices[len(removed) - 1][GRID.index(candidate)]
        assert cost is not None, "an eliminated head was evaluated"
        return 100 - cost

    return TableEvaluator(dict.fromkeys(GRID, 0.0), metric)


def test_first_iteration_of_figure_7() -> None:
    step = list(AStarSearch().choose(grid(FIRST, [100.0] * 9), None, 20))[1]
    assert frozenset(GRID) - step.kept == {("0", 2)}
    assert step.values["budget_left"] == 15
    assert step.kept - step.eliminated == {("2", 1), ("1", 1), ("0", 1), ("1", 2)}
    assert len(step.eliminated) == 4
    assert step.costs == dict(zip(GRID, FIRST, strict=True))
    assert step.values["searches"] == 9


def test_second_iteration_of_figure_7() -> None:
    second = [None, 12.0, None, None, 10.0, 10.0, None, 8.0, None]
    steps = list(AStarSearch().choose(grid(FIRST, second, [100.0] * 9), None, 20))
    assert frozenset(GRID) - steps[2].kept == {("0", 2), ("2", 1)}
    assert steps[2].values["budget_left"] == 12
    assert steps[2].kept - steps[2].eliminated == {("0", 1), ("1", 1), ("1", 2)}
    assert steps[2].values["candidates"] == 3
    assert sum(step.values.get("searches", 0) for step in steps[:3]) == 13
    # Figure 6, taken literally, subtracts 8 from the remaining 15.
    search = AStarSearch(AStarOptions(variant="literal"))
    assert list(search.choose(grid(FIRST, second, [100.0] * 9), None, 20))[2].values["budget_left"] == 7


def test_every_head_that_improves_the_metric_is_removed() -> None:
    evaluator = TableEvaluator(dict.fromkeys(GRID, 0.0), lambda kept: 100 - len(kept))
    steps = list(AStarSearch().choose(evaluator, None, 20))
    assert steps[-1].kept == frozenset()
    assert sum(step.values.get("searches", 0) for step in steps) == 45
    assert all(step.values["budget_left"] == 20 for step in steps)


def test_no_head_that_costs_the_budget_is_removed() -> None:
    evaluator = TableEvaluator(dict.fromkeys(GRID, 0.0), lambda kept: 100 - 20 * (len(kept) < 9))
    steps = list(AStarSearch().choose(evaluator, None, 20))
    assert steps[-1].kept == frozenset(GRID)
    assert sum(step.values.get("searches", 0) for step in steps) == 9
    assert [note.code for note in steps[-1].notes] == [NoteCode.NOTHING_REMOVED]
    assert min(steps[-1].costs.values()) == 20


def test_a_budget_of_zero_removes_nothing() -> None:
    steps = list(AStarSearch().choose(additive([0.0] * 10), None, 0))
    assert [step.kept for step in steps] == [frozenset(HEADS)]
    assert [note.code for note in steps[-1].notes] == [NoteCode.NOTHING_REMOVED]


def subsets(search: AStarSearch, evaluator: TableEvaluator, keep: int | None, budget: float) -> list[frozenset[Head]]:
    """The different subsets of the steps of a search, in order."""
    return list(dict.fromkeys(step.kept for step in search.choose(evaluator, keep, budget)))


@settings(max_examples=50, deadline=None)
@given(costs=costs, budget=st.integers(1, 80))
def test_lazy_equals_paper_if_costs_add_up(costs: list[float], budget: int) -> None:
    steps = list(LAZY.choose(additive(costs), None, budget))
    assert list(dict.fromkeys(step.kept for step in steps)) == subsets(PAPER, additive(costs), None, budget)
    assert not any(step.values.get("fell") for step in steps)
    assert NoteCode.COSTS_DECREASED not in [note.code for step in steps for note in step.notes]


@settings(max_examples=40, deadline=None)
@given(costs=costs, pair_costs=pairs, keep=st.integers(0, len(HEADS)) | st.none())
def test_lazy_equals_paper_if_costs_only_grow_and_nothing_is_eliminated(
    costs: list[float], pair_costs: dict[tuple[int, int], float], keep: int | None
) -> None:
    lazy, paper = additive(costs, pair_costs), additive(costs, pair_costs)
    assert subsets(LAZY, lazy, keep, 1e6) == subsets(PAPER, paper, keep, 1e6)
    assert lazy.count <= paper.count


@settings(max_examples=50, deadline=None)
@given(costs=costs, pair_costs=pairs, budget=st.integers(1, 80))
def test_lazy_equals_paper_as_long_as_both_eliminated_the_same_heads(
    costs: list[float], pair_costs: dict[tuple[int, int], float], budget: int
) -> None:
    """Costs only grow. The budget holds in any case."""
    lazy, paper = (list(search.choose(additive(costs, pair_costs), None, budget)) for search in (LAZY, PAPER))
    for step, paper_step in zip(lazy, paper, strict=False):
        assert step.kept == paper_step.kept
        if step.eliminated != paper_step.eliminated:
            break
    assert all(100 - step.values["metric"] < budget for step in lazy)


def test_lazy_may_remove_other_heads_than_paper_after_an_elimination() -> None:
    """Without a2, a0 costs 3 more: `paper` eliminates it, `lazy` still counts its last cost and removes it later."""
    costs, pair_costs = [1.0, 0, 0, 5, 2, 3, 5, 4, 0, 1], {(4, 9): 4.0, (0, 2): 3.0}
    lazy, paper = (subsets(search, additive(costs, pair_costs), None, 6)[-1] for search in (LAZY, PAPER))
    assert paper - lazy == {("a", 0)}
    assert lazy < paper


def test_lazy_evaluates_only_candidates_for_the_cheapest() -> None:
    """Nine heads cost nothing and are removed by one evaluation each; the tenth is eliminated at once."""
    lazy, paper = additive([0.0] * 9 + [5.0]), additive([0.0] * 9 + [5.0])
    for search, evaluator in ((LAZY, lazy), (PAPER, paper)):
        assert len(subsets(search, evaluator, None, 1)[-1]) == 1
    assert (lazy.count, paper.count) == (19, 47)


def test_lazy_notes_that_costs_decreased() -> None:
    evaluator = additive([1.0, 5, 5, 5, 5, 5, 5, 5, 5, 5], {(0, 1): -4.0})
    last = list(LAZY.choose(evaluator, 5, math.inf))[-1]
    assert last.values["fell"] == 1
    assert [note.code for note in last.notes] == [NoteCode.COSTS_DECREASED]
