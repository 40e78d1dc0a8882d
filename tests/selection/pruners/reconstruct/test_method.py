"""Refits in order: which sums are read, and the weights of groups that keep nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.pruners.layerwise.refit import RefitSums
from compressor.selection.pruners.layerwise.torch_network import TorchNetwork
from compressor.selection.pruners.reconstruct.method import Damping, RefitSet, SumsOfLinears, choices_of, refit_in_order
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight
from tests.selection.pruners.pruning import family_inputs


class RecordedNetwork(TorchNetwork):
    """Has no feeders, and records the linears whose sums are read."""

    read: tuple[str, ...] = ()

    def feeders(self, linear: str) -> tuple[str, ...]:
        return ()

    def sums_in_order(self, sets: Sequence[RefitSet], on_progress: ProgressCallback) -> Iterator[SumsOfLinears]:
        for part, sums in zip(sets, super().sums_in_order(sets, on_progress), strict=True):

            def recorded(part: RefitSet = part, sums: SumsOfLinears = sums) -> Mapping[str, RefitSums]:
                self.read += part.linears
                return sums()

            yield recorded


@pytest.mark.parametrize(("family", "has_bias"), [("llama", False), ("bert", True)])
def test_calls_of_a_group_without_inputs_and_bias_are_not_read(family: str, has_bias: bool, tmp_path: Path) -> None:
    inputs = family_inputs(family, tmp_path)
    model, groups = inputs.model, inputs.groups
    linears, network = [str(group.linear) for group in groups], RecordedNetwork(inputs)
    metrics = network.weigh(linears, ignore_progress)
    choices = list(choices_of(network, groups, network.grams(linears, ignore_progress), metrics, 0.01).values())
    counts = {group.name: group.counts[number % 2] for number, group in enumerate(groups)}

    used = refit_in_order(network, choices, counts, ignore_progress, ridge=0.2)

    kept = [str(group.linear) for group in groups if counts[group.name]]
    assert 0 < len(kept) < len(linears)
    assert network.read == tuple(linears if has_bias else kept)
    for group in groups:
        linear = linear_of(model, group)
        assert (linear.bias is not None) == has_bias
        assert bool(linear_weight(linear).count_nonzero()) == (counts[group.name] > 0)
        assert used[group.name] == Damping(0.01, 0.2)
