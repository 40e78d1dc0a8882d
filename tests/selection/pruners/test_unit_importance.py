"""Pruning by the magnitude of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.progress import ignore_progress
from compressor.selection.pruners.unit_importance import MagnitudePruner
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight
from tests.selection.pruners.pruning import (
    are_equal,
    check_dropped_units_have_no_effect,
    check_kept_counts,
    check_labels_are_not_read,
    family_inputs,
    ranked,
    result_of,
)
from tests.unchanged import unchanged

FAMILIES = [pytest.param("bert", marks=pytest.mark.zoo), pytest.param("gpt2", marks=pytest.mark.zoo), "llama", "t5"]


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_units_are_kept_as_requested_and_dropped_ones_have_no_effect(family: str, tmp_path: Path) -> None:
    inputs = family_inputs(family, tmp_path)
    with unchanged(inputs.model):
        check_kept_counts(pruner := ranked(MagnitudePruner, inputs))
    check_dropped_units_have_no_effect(pruner)


def test_neither_rows_nor_the_seed_matter(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    expected = result_of(MagnitudePruner, inputs)
    assert are_equal(result_of(MagnitudePruner, replace(inputs, seed=1, statistics=[], held_out=[])), expected)
    check_labels_are_not_read(MagnitudePruner, "bert", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_shares_of_the_squared_norm(family: str, tmp_path: Path) -> None:
    pruner = ranked(MagnitudePruner, family_inputs(family, tmp_path))
    losses = pruner.losses(ignore_progress)
    for group in pruner.inputs.groups:
        curve, weight = losses[group.name], linear_weight(linear_of(pruner.inputs.model, group)).detach().numpy()
        columns = weight.reshape(len(weight), group.units, group.width)
        assert tuple(curve) == group.counts
        for count, loss in curve.items():
            dropped = sorted(set(range(group.units)) - set(pruner.kept(group, count)))
            assert loss == pytest.approx(np.square(columns[:, dropped]).sum() / np.square(columns).sum(), rel=1e-5)
        assert list(curve.values()) == sorted(curve.values(), reverse=True)
        assert curve[group.units] == 0


def test_units_with_the_smallest_columns_go_first(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    for group in inputs.groups:
        columns = linear_weight(linear_of(inputs.model, group)).unflatten(1, (group.units, group.width))
        with torch.no_grad():
            columns[:, 2] = 0
            columns[:, 0] *= 1e-3
    pruner = ranked(MagnitudePruner, inputs)
    for group in inputs.groups:
        assert set(range(group.units)) - set(pruner.kept(group, group.units - 1)) == {2}
        assert set(range(group.units)) - set(pruner.kept(group, group.units - 2)) == {0, 2}


def test_a_linear_of_zeros_loses_nothing(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    with torch.no_grad():
        linear_of(inputs.model, inputs.groups[0]).weight.zero_()
    curve = ranked(MagnitudePruner, inputs).losses(ignore_progress)[inputs.groups[0].name]
    assert set(curve.values()) == {0.0}


def test_remaining_weights_keep_their_values(tmp_path: Path) -> None:
    inputs = family_inputs("gpt2", tmp_path)
    group = inputs.groups[1]
    before = linear_weight(linear_of(inputs.model, group)).detach().clone()
    pruner = ranked(MagnitudePruner, inputs)
    pruner.finish({each.name: each.units // 2 for each in inputs.groups}, ignore_progress)
    kept = list(pruner.kept(group, group.units // 2))
    assert torch.equal(linear_weight(linear_of(inputs.model, group))[:, kept], before[:, kept])
