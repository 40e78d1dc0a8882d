"""Refit the linears of pruned groups, from the first layer to the last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback
from compressor.selection.reconstruct.choice import Batch, GroupChoice, linear_of
from compressor.selection.reconstruct.forward import token_mask
from compressor.selection.reconstruct.layerwise import LayerwiseRun, LinearCall
from compressor.selection.reconstruct.refit import RefitStatistics
from compressor.selection.reconstruct.residual_sum import find_sum
from compressor.selection.reconstruct.statistics import TokenWeights
from compressor.units.layers import Linear, is_linear, linear_sizes, linear_weight

_ROWS_OF_SEARCH = 2
"""Rows on which the sum is searched that a linear's output is added to."""
_KEPT_BYTES = 2 << 30
"""Largest size of the dense model's sums that are kept."""


class DenseSums:
    """The residual stream of the dense model behind the linear of each group, which a refit restores.

    It is `y + R` at each token, y the output of the linear and R what it is added to; y alone where no sum is found.
    All of it is computed in one pass and kept if it fits into memory. Otherwise it is computed layer by layer,
    alongside the refit.

    Args:
        model: the dense model, which must not change while this object is in use.
        linears: module paths of the linears, in the order in which the model calls them.
        batches: calibration inputs `[rows, ...]`.
    """

    def __init__(self, model: PreTrainedModel, linears: Sequence[str], batches: Sequence[Batch]) -> None:
        self._model, self._batches = model, batches
        example = {name: value[:_ROWS_OF_SEARCH] for name, value in batches[0].items()}
        self.readers = {name: find_sum(model, example, name) for name in linears}
        self._run = LayerwiseRun(model, batches)
        self._kept: list[dict[str, list[Tensor]]] | None = self._all() if self._fits(linears) else None

    def start(self) -> None:
        """Begin a refit, from the first linear on."""
        if self._kept is None:
            self._run = LayerwiseRun(self._model, self._batches)

    def of(self, linear: str) -> Iterator[list[Tensor]]:
        """The sums of each call of a linear, `[tokens, out]` without padding, batch by batch."""
        if self._kept is not None:
            yield from (batch[linear] for batch in self._kept)
            return
        self._run.advance(self._run.layers_of(linear).start)
        for batch, calls in zip(self._batches, self._run.observe({linear: self.readers[linear]}), strict=True):
            yield [_sum(call)[_mask(self._model, call, batch)] for call in calls]

    def _fits(self, linears: Sequence[str]) -> bool:
        width = max(linear_sizes(module)[1] for module in map(self._model.get_submodule, linears) if is_linear(module))
        tokens = sum(max(value.numel() for value in batch.values()) for batch in self._batches)
        return 4 * tokens * width * len(linears) <= _KEPT_BYTES

    def _all(self) -> list[dict[str, list[Tensor]]]:
        sums = []
        for batch, calls in zip(self._batches, self._run.observe(self.readers), strict=True):
            part: dict[str, list[Tensor]] = {name: [] for name in self.readers}
            for call in sorted(calls, key=lambda call: call.number):
                part[call.linear].append(_sum(call)[_mask(self._model, call, batch)])
            sums.append(part)
        return sums


def refit_in_order(
    model: PreTrainedModel,
    choices: Sequence[GroupChoice],
    counts: Mapping[str, int],
    batches: Sequence[Batch],
    weights: Sequence[TokenWeights],
    sums: DenseSums,
    on_progress: ProgressCallback,
    *,
    ridge: float = 0.02,
) -> None:
    """Give the linear of each group, in order, the weights that restore the dense model's residual stream best.

    With x the inputs of the linear in the model as it is pruned so far and R the residual stream that its output is
    added to, and with y' and R' those of the dense model, the weights minimise

        sum over tokens of w ||W x + b + R - (y' + R')||^2 + lambda ||W - W_0||^2

    where W_0 are the weights reconstructed for the kept units. Each linear therefore repairs what all linears before it
    lost. Columns of dropped units become zero, so that the model computes the same with and without its gates.

    Args:
        model: the model, whose linears are changed.
        choices: the units of each group, in the order in which the model calls them.
        counts: name of the group -> number of units that are kept.
        batches: calibration inputs `[rows, ...]`.
        weights: weights of the tokens, see `token_weights`.
        sums: the sums y' + R' of the dense model.
        on_progress: called with (groups, all groups).
        ridge: lambda, as a share of the mean diagonal of the sums over x x'.

    Raises:
        InputError: an activation is not finite.
    """
    run = LayerwiseRun(model, batches)
    sums.start()
    for number, choice in enumerate(choices):
        on_progress(number, len(choices))
        name = str(choice.group.linear)
        run.advance(run.layers_of(name).start)
        calls = zip(batches, weights, run.observe({name: sums.readers[name]}), sums.of(name), strict=True)
        _refit(model, choice, counts[choice.group.name], calls, ridge)
    on_progress(len(choices), len(choices))


def _refit(
    model: PreTrainedModel,
    choice: GroupChoice,
    count: int,
    batches: Iterable[tuple[Batch, TokenWeights, list[LinearCall], list[Tensor]]],
    ridge: float,
) -> None:
    """Refit the linear of one group; only the kept inputs are summed up."""
    columns, has_ones = choice.columns(count), choice.gram.has_ones
    statistics = RefitStatistics(len(columns), len(choice.weight), has_ones=has_ones)
    index = torch.from_numpy(columns)
    for batch, weights, calls, sums in batches:
        for number, (call, dense) in enumerate(zip(calls, sums, strict=True)):
            mask = _mask(model, call, batch)
            targets = dense if call.sum is None else dense - (call.sum - call.output)[mask]
            scales = weights[call.linear][number].to(call.input.device)[mask]
            statistics.add(call.input[mask][:, index.to(call.input.device)], targets, scales)
    start = choice.reconstruction(count)
    weight, bias = np.zeros_like(start.weight), start.bias
    if len(columns) or has_ones:
        refit = statistics.solve(start.weight[:, columns], start.bias, np.arange(len(columns)), ridge=ridge)
        weight[:, columns], bias = refit.weight, refit.bias
    set_weights(linear_of(model, choice.group), weight, bias)


def _sum(call: LinearCall) -> Tensor:
    return call.output if call.sum is None else call.sum


def _mask(model: PreTrainedModel, call: LinearCall, batch: Batch) -> Tensor:
    return token_mask(model, call.linear, batch, call.input.shape[:-1])


def set_weights(linear: Linear, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Give a linear other weights `[outputs, inputs]`, and another bias where it has one."""
    with torch.no_grad():
        linear_weight(linear).copy_(torch.from_numpy(weight))
        if bias is not None:
            linear.bias.copy_(torch.from_numpy(bias))
