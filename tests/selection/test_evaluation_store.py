"""Stored evaluations: an interrupted search measures nothing twice, and searches that share a file lose nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from compressor.selection.measure_subsets import Measurement, Measurer, SubsetMeasurer
from compressor.selection.search import Head
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from tests.selection import tiny
from tests.selection.test_subset_evaluator import BATCH_SIZE, evaluator_of, fast_and_plain

always = partial(ModelSubsetEvaluator.store_in, seconds=0.0, write_share=0.0)
"""Use a file that is written after every measurement."""


class NoMeasurer:
    """A measurer that fails if anything is measured."""

    def measure(self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None) -> Measurement:
        raise AssertionError("measured")


def test_an_interrupted_search_measures_nothing_twice(tmp_path: Path) -> None:
    model = tiny.classifier()
    first, second = evaluator_of(model), evaluator_of(model, measurer=NoMeasurer())
    all_heads = frozenset(first.heads)

    def search(evaluator: ModelSubsetEvaluator) -> list[float]:
        always(evaluator, tmp_path / "store" / "evaluations.npz")
        return [evaluator.evaluate(all_heads), *evaluator.evaluate_without(all_heads, evaluator.heads[:3])]

    assert search(first) == search(second)
    assert (second.count, second.forwards) == (first.count, first.forwards)
    for kept in (all_heads, all_heads - {first.heads[0]}):
        np.testing.assert_array_equal(first.statistics(kept), second.statistics(kept))


def test_the_cost_of_a_subset_counts_for_every_search_that_evaluates_it(tmp_path: Path) -> None:
    """Counts equal those of a search without a file, in any order; subsets of other searches do not count."""
    model = tiny.classifier()
    without_file, longer, shorter = (evaluator_of(model) for _ in range(3))
    all_heads = frozenset(without_file.heads)
    for evaluator, bases in ((without_file, 1), (longer, 2), (shorter, 1)):
        if evaluator is not without_file:
            always(evaluator, tmp_path / "evaluations.npz")
        for base in (all_heads, all_heads - {evaluator.heads[0]})[:bases]:
            evaluator.evaluate_without(base, evaluator.heads[1:4])
    assert shorter.forwards == without_file.forwards < longer.forwards
    assert shorter.count == without_file.count == 3


def test_searches_that_share_a_file_keep_the_evaluations_of_each_other(tmp_path: Path) -> None:
    model = tiny.classifier()
    first, second, third = evaluator_of(model), evaluator_of(model), evaluator_of(model, measurer=NoMeasurer())
    all_heads = frozenset(first.heads)
    for evaluator in (first, second):
        always(evaluator, tmp_path / "evaluations.npz")
    first.evaluate(all_heads)
    second.evaluate(all_heads - {first.heads[0]})
    always(third, tmp_path / "evaluations.npz")
    third.evaluate_all([all_heads, all_heads - {first.heads[0]}])


class InterruptedMeasurer:
    """A measurer that Ctrl-C ends in its second call."""

    def __init__(self, measurer: Measurer) -> None:
        self.calls, self._measurer = 0, measurer

    def measure(self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None) -> Measurement:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return self._measurer.measure(subsets, base)


def test_an_interruption_loses_few_of_many_subsets(tmp_path: Path) -> None:
    """Also where a search evaluates all of them at once, as random subsets are."""
    model, data = tiny.classifier(), tiny.data()
    whole = SubsetMeasurer(model, tiny.sites_of(model), data.task, data.eval, BATCH_SIZE)
    evaluator = evaluator_of(model, measurer=InterruptedMeasurer(whole))
    subsets = [frozenset(chosen) for chosen in itertools.combinations(evaluator.heads, 3)]
    evaluator.store_in(tmp_path / "evaluations.npz")
    with pytest.raises(KeyboardInterrupt), evaluator.stored_on_interrupt():
        evaluator.evaluate_all(subsets)
    with np.load(tmp_path / "evaluations.npz") as file:
        assert 0 < len(file["kept"]) < len(subsets)
    resumed, uninterrupted = evaluator_of(model), evaluator_of(model)
    resumed.store_in(tmp_path / "evaluations.npz")
    assert resumed.evaluate_all(subsets) == uninterrupted.evaluate_all(subsets)
    assert (resumed.count, resumed.forwards) == (uninterrupted.count, uninterrupted.forwards)


def test_files_are_written_at_intervals(tmp_path: Path) -> None:
    evaluator = evaluator_of(tiny.classifier())
    evaluator.store_in(tmp_path / "evaluations.npz", seconds=3600.0)
    evaluator.evaluate(frozenset(evaluator.heads))
    assert not (tmp_path / "evaluations.npz").exists()


def test_evaluations_of_other_rows_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.npz"
    kept, statistics = np.ones((1, tiny.HEADS), bool), np.zeros((1, 11, 2))
    np.savez(path, kept=kept, statistics=statistics, forwards=np.ones(1))
    fast, plain = fast_and_plain()
    fast.store_in(path)
    assert fast.evaluate(frozenset(fast.heads)) == plain.evaluate(frozenset(plain.heads))


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive"])
def test_a_damaged_file_is_ignored(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "evaluations.npz").write_bytes(content)
    fast, plain = fast_and_plain()
    fast.store_in(tmp_path / "evaluations.npz")
    assert fast.evaluate(frozenset(fast.heads)) == plain.evaluate(frozenset(plain.heads))
