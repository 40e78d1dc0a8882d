"""What all methods under a budget refuse, and which finished parts they read."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import ErrorCode
from compressor.selection.pruners.base import Pruner
from compressor.selection.pruners.fisher import FisherPruner
from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner
from tests.faults import fails_with
from tests.selection.pruners.pruning import (
    PRUNERS,
    are_equal,
    check_dropped_units_have_no_effect,
    check_kept_counts,
    family_inputs,
    pruning_inputs,
    ranked,
    result_of,
)
from tests.selection.tiny import have_same_weights
from tests.zoo import GROUPED

every_pruner = pytest.mark.parametrize("method", PRUNERS.values(), ids=PRUNERS)


@every_pruner
def test_every_registered_method_keeps_its_promises(method: type[Pruner[Any]], tmp_path: Path) -> None:
    pruner = ranked(method, family_inputs("bert", tmp_path))
    check_kept_counts(pruner)
    losses = pruner.losses()
    assert losses.keys() == {group.name for group in pruner.inputs.groups}
    assert all(losses[group.name][group.units] == 0 for group in pruner.inputs.groups)
    check_dropped_units_have_no_effect(pruner)


@pytest.mark.parametrize("method", [pytest.param(FisherPruner, marks=pytest.mark.zoo), ReconstructPruner])
def test_parts_of_other_weights_are_not_read(method: type[Pruner[Any]], tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path / "shared")
    inputs = replace(inputs, groups=inputs.groups[:3])
    result_of(method, inputs)
    changed = copy.deepcopy(inputs.model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.1)
    shared = result_of(method, replace(inputs, model=changed))
    assert are_equal(shared, result_of(method, replace(inputs, model=changed, store=tmp_path / "own")))


@pytest.mark.parametrize(
    "fields",
    [{"statistics": []}, {"held_out": []}, {"outputs": ()}, {"outputs": "logits"}],
    ids=["statistics", "held out", "no outputs", "a text"],
)
def test_inputs_without_batches_or_outputs_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    with fails_with(ErrorCode.INVALID_VALUE, field=next(iter(fields))):
        ReconstructPruner(replace(inputs, **fields))


@every_pruner
def test_counts_of_unknown_or_missing_groups_change_no_weight(method: type[Pruner[Any]], tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    pruner, whole = ranked(method, inputs), copy.deepcopy(inputs.model)
    counts = {group.name: group.units for group in inputs.groups}
    first = inputs.groups[0].name
    for wrong in ({**counts, "nothing": 1}, {name: count for name, count in counts.items() if name != first}):
        with fails_with(ErrorCode.INVALID_VALUE, field="counts"):
            pruner.finish(wrong)
    assert have_same_weights(inputs.model, whole)


@every_pruner
def test_numbers_that_a_group_cannot_keep_are_refused(method: type[Pruner[Any]], tmp_path: Path) -> None:
    model, _ = GROUPED(0)
    pruner = ranked(method, pruning_inputs(model, tmp_path))
    heads = next(group for group in pruner.inputs.groups if group.bundle > 1)
    for count in (-1, heads.units + heads.bundle, heads.bundle - 1):
        with pytest.raises(ValueError, match="units"):
            pruner.kept(heads, count)
