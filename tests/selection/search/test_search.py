"""Properties of every search, against tables of costs; local, global and random search."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.config.methods import METHODS, SEARCH_METHODS
from compressor.errors import ErrorCode, UsageError
from compressor.results import NoteCode
from compressor.selection.options import read_options
from compressor.selection.search import Search
from compressor.selection.search.astar import AStarOptions, AStarSearch
from compressor.selection.search.greedy import GreedyByIndexSearch, GreedySearch
from compressor.selection.search.random_subsets import RandomOptions, RandomSearch
from compressor.selection.search.taylor import TaylorOptions, TaylorSearch
from tests.faults import fails_with
from tests.selection.tables import HEADS, ReversedEvaluator, TableEvaluator, additive

costs = st.lists(st.integers(0, 8).map(float), min_size=len(HEADS), max_size=len(HEADS))
numbers = st.integers(0, len(HEADS) - 1)
pairs = st.dictionaries(
    st.tuples(numbers, numbers).filter(lambda pair: pair[0] < pair[1]), st.integers(0, 40).map(float)
)
SEARCHES: dict[str, Callable[[], Search]] = {
    **{name: METHODS[name].load() for name in SEARCH_METHODS},
    "astar literal": lambda: AStarSearch(AStarOptions(variant="literal")),
    "astar lazy": lambda: AStarSearch(AStarOptions(variant="lazy")),
    "taylor by loss": lambda: TaylorSearch(TaylorOptions(by="loss")),
}


@pytest.mark.parametrize("name", SEARCHES)
@settings(max_examples=15, deadline=None)
@given(costs=costs, pair_costs=pairs, keep=st.integers(0, len(HEADS)))
def test_ends_with_exactly_k(
    name: str, costs: list[float], pair_costs: dict[tuple[int, int], float], keep: int
) -> None:
    steps = list(SEARCHES[name]().choose(additive(costs, pair_costs), keep, math.inf))
    assert steps[0].kept == frozenset(HEADS)
    assert len(steps[-1].kept) == (keep + keep % 2 if name == "global" else keep)  # an index has a head of each site
    assert all(after.kept < before.kept for before, after in pairwise(steps))
    expected = [NoteCode.MORE_HEADS_KEPT] if name == "global" and keep % 2 else []
    assert [note.code for note in steps[-1].notes] == expected


@pytest.mark.parametrize("name", SEARCHES)
@settings(max_examples=15, deadline=None)
@given(costs=costs, pair_costs=pairs, budget=st.integers(0, 60))
def test_stays_within_the_budget(
    name: str, costs: list[float], pair_costs: dict[tuple[int, int], float], budget: int
) -> None:
    evaluator = additive(costs, pair_costs)
    steps = list(SEARCHES[name]().choose(evaluator, None, budget))
    assert all(after.kept <= before.kept for before, after in pairwise(steps))
    assert all(100 - evaluator.evaluate(step.kept) <= budget for step in steps)
    removes = len(steps[-1].kept) < len(HEADS)
    assert removes or NoteCode.NOTHING_REMOVED in [note.code for note in steps[-1].notes]


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize(("keep", "budget"), [(4, math.inf), (None, 20.0)])
def test_the_order_of_evaluation_does_not_matter(name: str, keep: int | None, budget: float) -> None:
    costs, pair_costs = [3.0, 1, 1, 4, 0, 0, 2, 1, 3, 1], {(1, 2): 5.0, (4, 5): 3.0}
    runs = [
        SEARCHES[name]().choose(additive(costs, pair_costs, kind), keep, budget)
        for kind in (TableEvaluator, ReversedEvaluator)
    ]
    assert [step.kept for step in runs[0]] == [step.kept for step in runs[1]]


def test_local_continues_to_the_last_head_that_fits() -> None:
    evaluator = additive([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    steps = list(GreedySearch().choose(evaluator, None, 6))
    assert frozenset(HEADS) - steps[-1].kept == {("a", 0), ("a", 1), ("a", 2)}


def test_the_note_names_the_cheapest_head_if_none_is_removed() -> None:
    steps = list(GreedySearch().choose(additive([3.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]), None, 1))
    (note,) = steps[-1].notes
    assert note.code is NoteCode.NOTHING_REMOVED
    assert note.text == ("no head was removed: head 1 of a costs least, 2 of the metric, and 1 is allowed (--max-drop)")


def test_global_removes_the_cheapest_index_of_every_site() -> None:
    steps = list(GreedyByIndexSearch().choose(additive([1.0, 2, 3, 4, 5, 9, 2, 3, 4, 5]), 7, math.inf))
    assert [sorted(a.kept - b.kept) for a, b in pairwise(steps)] == [[("a", 1), ("b", 1)]]
    assert len(steps[-1].kept) == 8


def test_random_depends_on_its_seed() -> None:
    costs = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    searches = [RandomSearch(RandomOptions(trials=5, seed=seed)) for seed in (1, 1, 2)]
    kept = [list(search.choose(additive(costs), 5, math.inf))[-1].kept for search in searches]
    assert kept[0] == kept[1] != kept[2]


def test_random_evaluates_each_trial_once() -> None:
    evaluator = additive([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    list(RandomSearch(RandomOptions(trials=7)).choose(evaluator, 5, math.inf))
    assert evaluator.count <= 8


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [(RandomOptions, "trials", 0), (RandomOptions, "seed", -1), (TaylorOptions, "share", 0)],
)
def test_options_out_of_range_are_refused(model: Any, field: str, value: float) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field=field, value=value):
        read_options("search", {field: value}, model)
