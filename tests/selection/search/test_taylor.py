"""Removal by importance: the ranking, the steps, and importance by loss."""

from __future__ import annotations

import math
from itertools import pairwise

from compressor.selection.search.taylor import TaylorOptions, TaylorSearch, rank_heads
from tests.selection.tables import TableEvaluator, additive


def test_by_loss_ranks_by_the_cost_of_a_single_head() -> None:
    evaluator = additive([3.0, 1, 10, 4, 5, 9, 2, 6, 8, 7])
    steps = list(TaylorSearch(TaylorOptions(by="loss")).choose(evaluator, 5, math.inf))
    removed = [next(iter(before.kept - after.kept)) for before, after in pairwise(steps)]
    assert removed == [("a", 1), ("b", 1), ("a", 0), ("a", 3), ("a", 4)]
    assert not evaluator.scored
    assert evaluator.count == 1 + 10 + 4  # all heads, all but one head, and the steps after the first


def test_importance_is_compared_within_the_norm_of_a_site() -> None:
    # Norms 5 and 0.5: (a, 0) is 0.6 and (b, 1) is 0.8 of its site.
    importance = {("a", 0): 3.0, ("a", 1): 4.0, ("b", 0): 0.3, ("b", 1): 0.4}
    kept, heads = frozenset(importance), tuple(importance)
    plain = rank_heads(importance, kept, heads, normalize=False)
    normalized = rank_heads(importance, kept, heads, normalize=True)
    assert plain == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    assert normalized == [("b", 0), ("a", 0), ("b", 1), ("a", 1)]


def test_removed_heads_do_not_count_in_the_norm() -> None:
    importance = {("a", 0): 3.0, ("a", 1): 400.0, ("b", 0): 0.3, ("b", 1): 0.4}
    kept = frozenset(importance) - {("a", 1)}
    assert rank_heads(importance, kept, tuple(importance), normalize=True) == [("b", 0), ("b", 1), ("a", 0)]


def test_a_site_without_importance_scores_zero() -> None:
    importance = {("a", 0): 0.0, ("a", 1): 0.0, ("b", 0): 0.1, ("b", 1): 0.2}
    ranking = rank_heads(importance, frozenset(importance), tuple(importance), normalize=True)
    assert ranking == [("a", 1), ("a", 0), ("b", 0), ("b", 1)]


def test_a_tenth_is_removed_per_step_and_the_others_are_scored_again() -> None:
    importance = {("a", head): float(head + 1) for head in range(20)}
    evaluator = TableEvaluator(importance)
    steps = list(TaylorSearch().choose(evaluator, 15, math.inf))
    assert [len(step.kept) for step in steps] == [20, 18, 16, 15]
    assert [len(kept) for kept in evaluator.scored] == [20, 18, 16]
    assert steps[-1].kept == frozenset(("a", head) for head in range(5, 20))


def test_without_rescoring_importance_is_measured_once() -> None:
    evaluator = TableEvaluator({("a", head): float(head + 1) for head in range(20)})
    steps = list(TaylorSearch(TaylorOptions(rescore=False)).choose(evaluator, 15, math.inf))
    assert steps[-1].kept == frozenset(("a", head) for head in range(5, 20))
    assert len(evaluator.scored) == 1
