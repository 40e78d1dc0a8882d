"""A model of PyTorch as a refit sees it: its modules are observed by hooks, layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from compressor.progress import ProgressCallback
from compressor.selection.pruners.base import PruningInputs
from compressor.selection.pruners.layerwise.curves import PartialKL
from compressor.selection.pruners.layerwise.feeders import feeders_of
from compressor.selection.pruners.layerwise.gram import Gram
from compressor.selection.pruners.layerwise.in_order import DenseSums, TargetedCall, calls_in_order
from compressor.selection.pruners.layerwise.linear_inputs import TokenWeights, collect_inputs, count_tokens
from compressor.selection.pruners.layerwise.output_sensitivity import sensitivity_of
from compressor.selection.pruners.layerwise.refit import RefitSums
from compressor.selection.pruners.network import Divergence, LinearWeights, RefitSet, SumsOfLinears
from compressor.training.precision import native_autocast
from compressor.units.layers import linear_at, linear_sizes, linear_weight


class TorchNetwork:
    """A model of PyTorch with its batches; see `Network`.

    Sums are accumulated on the device of the model. Forwards that measure losses run in bfloat16 where the machine
    computes it natively.

    Args:
        inputs: the model, its groups and its batches.
    """

    def __init__(self, inputs: PruningInputs) -> None:
        self._inputs, self._model = inputs, inputs.model
        self._weights: Sequence[TokenWeights] = ()
        self._ends = {str(group.linear): group.name for group in inputs.groups}

    @property
    def rows(self) -> int:
        return sum(len(next(iter(batch.values()))) for batch in self._inputs.statistics)

    @property
    def token_weights(self) -> Sequence[TokenWeights]:
        """The weights of the tokens of each batch; known after `weigh`."""
        return self._weights

    @property
    def calls_once(self) -> bool:
        return all(len(calls) == 1 for calls in self._weights[0].values())

    def linear(self, path: str) -> LinearWeights:
        linear = linear_at(self._model, path)
        bias = None if linear.bias is None else linear.bias.detach().double().cpu().numpy().copy()
        weight = linear_weight(linear).detach()
        return LinearWeights(weight.to(torch.promote_types(weight.dtype, torch.float32)).cpu().numpy().copy(), bias)

    @torch.no_grad()
    def set_linear(self, path: str, weights: LinearWeights) -> None:
        linear = linear_at(self._model, path)
        linear_weight(linear).copy_(torch.from_numpy(weights.weight))
        if weights.bias is not None:
            linear.bias.copy_(torch.from_numpy(weights.bias))

    def count_tokens(self, linears: Sequence[str]) -> dict[str, int]:
        return count_tokens(self._model, self._inputs.statistics, linears)

    def weigh(self, linears: Sequence[str], on_progress: ProgressCallback) -> Mapping[str, np.ndarray]:
        inputs = self._inputs
        sensitivity = sensitivity_of(self._model, inputs.statistics, linears, inputs.outputs, inputs.seed, on_progress)
        self._weights = sensitivity.weights
        return sensitivity.metrics

    def grams(self, linears: Sequence[str], on_progress: ProgressCallback) -> dict[str, Gram]:
        sums = {name: self._sums(name, has_targets=False) for name in linears}
        batches = self._inputs.statistics
        for number, (batch, weights) in enumerate(zip(batches, self._weights, strict=True)):
            on_progress(number, len(batches))
            observe = lambda name, inputs, scales: sums[name].add(inputs, weights=scales)  # noqa: E731
            collect_inputs(self._model, batch, list(linears), observe, weights)
        on_progress(len(batches), len(batches))
        return {name: sums.pop(name).gram for name in linears}  # the sums are freed one after another

    def divergence(self) -> Divergence:
        def mean(linear: str, weights: LinearWeights) -> float:
            bias = None if weights.bias is None else torch.from_numpy(weights.bias)
            with native_autocast(self._model.device, self._model.dtype):
                return partial.mean(linear, torch.from_numpy(weights.weight), bias)

        with native_autocast(self._model.device, self._model.dtype):
            partial = PartialKL(self._model, self._inputs.held_out, self._inputs.outputs)
        return mean

    def feeders(self, linear: str) -> tuple[str, ...]:
        return self._feeders[linear]

    def sums_in_order(self, sets: Sequence[RefitSet], on_progress: ProgressCallback) -> Iterator[SumsOfLinears]:
        linear_sets, batches = [part.linears for part in sets], self._inputs.statistics
        calls_of_sets = calls_in_order(self._model, linear_sets, batches, self._dense_sums, on_progress)
        for part, calls in zip(sets, calls_of_sets, strict=True):
            yield functools.partial(self._sums_of, part, calls)

    def _sums_of(self, part: RefitSet, calls: Iterator[TargetedCall]) -> Mapping[str, RefitSums]:
        columns = None if part.columns is None else torch.from_numpy(part.columns)
        inputs = None if columns is None else len(columns)
        sums = {name: self._sums(name, inputs, has_targets=True) for name in part.linears}
        for call in calls:
            scales, values = None, call.inputs
            if part.weighted_by is not None:
                scales = self._weights[call.batch][part.weighted_by][call.number].to(call.mask.device)[call.mask]
            if columns is not None:
                values = values[:, columns.to(values.device)]
            sums[call.linear].add(values, call.targets, scales)
        return sums

    def _sums(self, path: str, inputs: int | None = None, *, has_targets: bool) -> RefitSums:
        """Sums without tokens for all inputs of a linear, or for a number of them."""
        linear = linear_at(self._model, path)
        every, outputs = linear_sizes(linear)
        name = self._ends.get(path, path) if has_targets else path
        count = every if inputs is None else inputs
        return RefitSums(count, outputs if has_targets else None, has_ones=linear.bias is not None, name=name)

    @functools.cached_property
    def _dense_sums(self) -> DenseSums:
        """The activations of the dense model that refits restore; computed before the first one."""
        linears = [name for end in self._ends for name in (*self._feeders[end], end)]
        return DenseSums.of_copy(
            self._model, linears, self._inputs.statistics, unsummed=set(linears) - self._ends.keys()
        )

    @functools.cached_property
    def _feeders(self) -> dict[str, tuple[str, ...]]:
        """The linears that feed the linear of each group."""
        return feeders_of(self._model, list(self._ends), self._inputs.statistics[0])
