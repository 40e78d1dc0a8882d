"""Refits in order: which calls are read, and the weights of groups that keep nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from compressor.progress import ignore_progress
from compressor.selection.pruners.layerwise.in_order import DenseSums
from compressor.selection.pruners.reconstruct.choice import choices_of, gather_grams
from compressor.selection.pruners.reconstruct.output_sensitivity import sensitivity_of
from compressor.selection.pruners.reconstruct.refit_in_order import Damping, refit_in_order
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight
from tests.selection.pruners.pruning import family_inputs


class RecordedSums(DenseSums):
    """Records the linears whose sums are read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: list[str] = []

    def of(self, linears: Sequence[str]) -> Iterator[Mapping[str, list[Tensor]]]:
        self.read += linears
        yield from super().of(linears)


@pytest.mark.parametrize(("family", "has_bias"), [("llama", False), ("bert", True)])
def test_calls_of_a_group_without_inputs_and_bias_are_not_read(family: str, has_bias: bool, tmp_path: Path) -> None:
    inputs = family_inputs(family, tmp_path)
    model, groups, batches = inputs.model, inputs.groups, inputs.statistics
    linears = [str(group.linear) for group in groups]
    sensitivity = sensitivity_of(model, batches, linears, inputs.outputs, 0)
    grams = gather_grams(model, groups, batches, sensitivity.weights, ignore_progress)
    choices = list(choices_of(model, groups, grams, sensitivity.metrics, 0.01).values())
    counts = {group.name: group.counts[number % 2] for number, group in enumerate(groups)}
    sums, feeders = RecordedSums.of_copy(model, linears, batches), dict.fromkeys(linears, ())

    used = refit_in_order(
        model, choices, counts, batches, sensitivity.weights, sums, feeders, ignore_progress, ridge=0.2
    )

    kept = [str(group.linear) for group in groups if counts[group.name]]
    assert 0 < len(kept) < len(linears)
    assert sums.read == (linears if has_bias else kept)
    for group in groups:
        linear = linear_of(model, group)
        assert (linear.bias is not None) == has_bias
        assert bool(linear_weight(linear).count_nonzero()) == (counts[group.name] > 0)
        assert used[group.name] == Damping(0.01, 0.2)
