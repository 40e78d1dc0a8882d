"""Query heads that share key/value heads are removed one by one: equally many of each, by every method."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.progress import ignore_progress
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.selection.pruners.fisher import least_costly_bundles
from compressor.selection.pruners.layerwise.refit import Gram
from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner
from compressor.selection.pruners.reconstruct.second_order import reconstruct, removal_order
from compressor.selection.pruners.unit_importance import MagnitudePruner, by_importance
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight
from compressor.units.prunable import LinearWeights, unit_columns
from tests.selection.pruners.pruning import (
    PRUNERS,
    check_dropped_units_have_no_effect,
    check_kept_counts,
    pruning_inputs,
    ranked,
)
from tests.zoo import GROUPED


def grouped_inputs(store: Path) -> PruningInputs:
    return pruning_inputs(GROUPED(0)[0], store, group_by="query")


@pytest.mark.parametrize("method", PRUNERS.values(), ids=PRUNERS)
def test_every_key_value_head_keeps_equally_many_and_dropped_queries_have_no_effect(
    method: type[Pruner[Any]], tmp_path: Path
) -> None:
    pruner = ranked(method, grouped_inputs(tmp_path))
    assert [group.counts for group in pruner.inputs.groups if group.type == "heads"] == [(0, 2, 4, 6, 8)] * 3
    check_kept_counts(pruner)
    check_dropped_units_have_no_effect(pruner)


@pytest.mark.parametrize("method", [MagnitudePruner, ReconstructPruner])
def test_fewer_units_are_among_those_of_more(method: type[Pruner[Any]], tmp_path: Path) -> None:
    pruner = ranked(method, grouped_inputs(tmp_path))
    for group in pruner.inputs.groups:
        kept = [set(pruner.kept(group, count)) for count in group.counts]
        assert all(few < many for few, many in itertools.pairwise(kept))


def test_losses_are_those_of_the_dropped_queries(tmp_path: Path) -> None:
    pruner = ranked(MagnitudePruner, grouped_inputs(tmp_path))
    losses = pruner.losses(ignore_progress)
    for group in pruner.inputs.groups:
        weight = linear_weight(linear_of(pruner.inputs.model, group)).detach().numpy()
        squares = np.square(weight).reshape(len(weight), group.units, group.width).sum((0, 2))
        for count in group.counts:
            dropped = sorted(set(range(group.units)) - set(pruner.kept(group, count)))
            assert losses[group.name][count] == pytest.approx(squares[dropped].sum() / squares.sum(), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_least_important_of_each_part_come_first(seed: int) -> None:
    importance = np.random.default_rng(seed).random(12)
    rounds = by_importance(importance, 3).reshape(4, 3)
    assert (rounds // 4 == [0, 1, 2]).all()
    assert (np.diff(importance[rounds], axis=0) >= 0).all()
    assert by_importance(importance).tolist() == np.argsort(importance).tolist()


@pytest.mark.parametrize("count", [0, 2, 4, 6])
def test_units_are_exchanged_within_their_part(count: int) -> None:
    """Every part drops equally many, at no higher cost than the search begins with."""
    for seed in range(5):
        gradients = np.random.default_rng(seed).standard_normal((20, 6)) + 0.5
        fisher = gradients.T @ gradients

        def cost(units: np.ndarray, fisher: np.ndarray = fisher) -> float:
            return float(fisher[np.ix_(units, units)].sum())

        dropped = least_costly_bundles(gradients, count, 2)
        assert np.bincount(dropped // 3, minlength=2).tolist() == [count // 2] * 2
        assert cost(dropped) <= cost(by_importance(np.diagonal(fisher), 2)[:count]) + 1e-9


@pytest.mark.parametrize("has_ones", [False, True])
@pytest.mark.parametrize("units", [12, 6])
def test_each_removed_unit_costs_least_among_the_parts_that_lost_fewest(units: int, has_ones: bool) -> None:
    random = np.random.default_rng(3)
    rows = random.standard_normal((60, 12)) @ random.standard_normal((12, 12))
    weight, parts, width = random.standard_normal((5, 12)), 3, 12 // units
    columns = np.column_stack([rows, np.ones(60)]) if has_ones else rows
    gram = Gram(columns.T @ columns, has_ones)
    damped = gram.matrix + np.diag(0.01 * gram.damping)
    bias = np.zeros(5) if has_ones else None

    def cost(kept: list[int]) -> float:
        result = reconstruct(LinearWeights(weight, bias), gram, unit_columns(kept, width), damp=0.01)
        change = result.weight - weight
        if result.bias is not None:
            change = np.column_stack([change, result.bias])
        return float(np.vdot(change, change @ damped))

    kept, order, size = list(range(units)), list[int](), units // parts
    while kept:
        remaining = np.bincount([unit // size for unit in kept], minlength=parts)
        candidates = [unit for unit in kept if remaining[unit // size] == remaining.max()]
        order.append(min(candidates, key=lambda unit: cost([rest for rest in kept if rest != unit])))
        kept.remove(order[-1])
    for together in (1, parts):
        assert removal_order(weight, gram, units, together=together, parts=parts, damp=0.01).order == tuple(order)
