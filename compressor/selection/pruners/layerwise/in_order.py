"""The calls of linears in a model that is pruned from the first layer to the last."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import psutil
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback
from compressor.selection.pruners.base import Batch
from compressor.selection.pruners.layerwise.layer_run import LayerwiseRun, LinearCall
from compressor.selection.pruners.layerwise.linear_inputs import count_tokens, token_mask
from compressor.selection.pruners.layerwise.residual_sum import find_sum
from compressor.units.layers import linear_at, linear_sizes

_ROWS_OF_SEARCH = 2
"""Examples on which `find_sum` looks for the sum of a linear's output and the residual stream."""
_KEPT_BYTES = 1 << 30
"""Size of the dense model's sums that are kept at a time, whatever the size of the model."""
_REFIT_BYTES = 7 << 28
"""Size of these sums and of the weights of both models up to which more is kept for small models."""
_PROCESS_BYTES = 13 << 28
"""Memory of the process up to which sums are kept; beyond it they are computed again for each request."""


def kept_bytes(model: nn.Module) -> int:
    """Largest size of the dense model's sums that are kept at a time, in the memory that this process has left."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return min(max(_KEPT_BYTES, _REFIT_BYTES - 2 * weights), _PROCESS_BYTES - psutil.Process().memory_info().rss)


class DenseSums:
    """The residual stream of the dense model after each of some linears, which pruning in order restores.

    It is `y + R` at each token: y is the output of the linear, R what y is added to. Where nothing is added, it is y.
    The sums of as many consecutive linears as fit into memory are computed in one pass and kept until others are
    requested: those of the whole model, of a few layers, or of a part of a layer. Those of linears that do not fit
    together are computed batch by batch.

    Args:
        model: the dense model, which must not change while this object is in use.
        linears: module paths of the linears, in the order in which the model calls them.
        batches: calibration inputs `[batch, ...]`.
        unsummed: those of the linears for which no sum is searched.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        linears: Sequence[str],
        batches: Sequence[Batch],
        unsummed: Collection[str] = (),
    ) -> None:
        self._model, self._linears, self._batches = model, list(dict.fromkeys(linears)), batches
        example = {name: value[:_ROWS_OF_SEARCH] for name, value in batches[0].items()}
        self.readers = {name: None if name in unsummed else find_sum(model, example, name) for name in linears}
        self._run = LayerwiseRun(model, batches)
        self._kept: Sequence[dict[str, list[Tensor]]] = ()
        self._limit = kept_bytes(model)  # before the forward below, whose memory the process may hold on to
        self._tokens = count_tokens(model, batches, self._linears)

    @classmethod
    def of_copy(
        cls,
        model: PreTrainedModel,
        linears: Sequence[str],
        batches: Sequence[Batch],
        unsummed: Collection[str] = (),
    ) -> Self:
        """The sums of a copy of a model, which stays dense while the linears of the model are changed in place.

        The copy holds weights of these linears alone; it shares all other parameters and buffers with the model, which
        must not change. See the class for the arguments.
        """
        changed = {id(value) for name in linears for value in model.get_submodule(name).parameters()}
        shared = {id(value): value for value in (*model.parameters(), *model.buffers()) if id(value) not in changed}
        return cls(copy.deepcopy(model, shared), linears, batches, unsummed)

    def start(self) -> None:
        """Begin a pass from the first linear on."""
        if self._run.start > self._run.layers_of(self._linears[0]).start:
            self._run, self._kept = LayerwiseRun(self._model, self._batches), ()

    def of(self, linears: Sequence[str]) -> Iterator[Mapping[str, list[Tensor]]]:
        """The sums of each call of some linears of one layer, `[tokens, out]` without padding, batch by batch.

        Args:
            linears: module paths; consecutive ones of all linears, and since `start` never before those of an earlier
                request.

        Raises:
            ValueError: a linear is not among all linears, or the pass is already past its layer.
        """
        if not self._kept or not set(linears) <= set(self._kept[0]):
            self._kept = ()
            self._run.advance(self._run.layers_of(linears[0]).start)
            span = self._span(linears)
            if self._bytes(span) > self._limit:
                yield from self._observed(span)
                return
            self._kept = list(self._observed(span))
        yield from self._kept

    def _span(self, linears: Sequence[str]) -> list[str]:
        """Linears from the first of these on: at least these, and as many more as fit into memory."""
        first = self._linears.index(linears[0])
        end = first + len(linears)
        while end < len(self._linears) and self._bytes(self._linears[first : end + 1]) <= self._limit:
            end += 1
        return self._linears[first:end]

    def _bytes(self, linears: Sequence[str]) -> int:
        """Size of the sums of some linears, float32."""
        return sum(4 * self._tokens[name] * linear_sizes(linear_at(self._model, name))[1] for name in linears)

    def _observed(self, linears: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
        """The sums of consecutive linears; the run goes on to the linear behind them."""
        readers = {name: self.readers[name] for name in linears}
        rest = self._linears[self._linears.index(linears[0]) + len(linears) :]
        following = self._run.layers_of(rest[0]).start if rest else None
        calls_of_batches = self._run.observe(readers, advance_to=following)
        for batch, calls in zip(self._batches, calls_of_batches, strict=True):
            sums: dict[str, list[Tensor]] = {name: [] for name in linears}
            for call in sorted(calls, key=lambda call: call.number):
                sums[call.linear].append(_sum(call)[_mask(self._model, call, batch)])
            yield sums


@dataclass(frozen=True)
class TargetedCall:
    """One call of a linear on one batch, in the model as it is pruned so far.

    Attributes:
        linear: module path.
        batch: number of the batch.
        number: which of the calls of the linear in the forward it is, from 0.
        mask: the tokens of its input that are not padding, usually `[batch, position]`.
        inputs: its inputs without padding, `[tokens, in]`.
        targets: the outputs, bias included, for which the residual stream is that of the dense model, `[tokens, out]`.
    """

    linear: str
    batch: int
    number: int
    mask: Tensor
    inputs: Tensor
    targets: Tensor


def calls_in_order(
    model: PreTrainedModel,
    linear_sets: Sequence[Sequence[str]],
    batches: Sequence[Batch],
    sums: DenseSums,
    on_progress: ProgressCallback,
) -> Iterator[Iterator[TargetedCall]]:
    """For each set of linears, their calls on all batches; sets and calls run when they are requested.

    With y the output of a linear and R the residual stream that it is added to, and with y' and R' those of the dense
    model, the target of y is y' + R' - R; without such a sum it is y'. Each linear can therefore repair what all
    linears before it lost.

    The linears of a set are changed before the next set is requested, whose calls are computed with the changed model.
    The calls of a set may be left unread, but cannot be read after the next set is requested.

    Args:
        model: the model; it is dense at the start.
        linear_sets: module paths of linears, in the order in which the model calls them; those of one set are called in
            the same layer and do not depend on each other.
        batches: inputs `[batch, ...]`.
        sums: the sums y' + R' of the dense model.
        on_progress: called with (sets, all sets).

    Raises:
        KeyError: a linear has no sums.
        ValueError: a forward does not call a linear, or the sets are in another order than the calls.
    """
    run = LayerwiseRun(model, batches)
    sums.start()
    for number, linears in enumerate(linear_sets):
        on_progress(number, len(linear_sets))
        run.advance(run.layers_of(linears[0]).start)
        observed = run.observe({linear: sums.readers[linear] for linear in linears}, with_outputs=False)
        yield _targeted(model, batches, observed, sums.of(linears))
    on_progress(len(linear_sets), len(linear_sets))


def _targeted(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    calls_of_batches: Iterator[list[LinearCall]],
    sums_of_batches: Iterator[Mapping[str, list[Tensor]]],
) -> Iterator[TargetedCall]:
    """The calls of some linears, with the dense model's sums."""
    for number, (batch, calls, sums) in enumerate(zip(batches, calls_of_batches, sums_of_batches, strict=True)):
        for call in calls:
            mask, dense = _mask(model, call, batch), sums[call.linear][call.number]
            target = dense if call.output is None or call.sum is None else dense - (call.sum - call.output)[mask]
            yield TargetedCall(call.linear, number, call.number, mask, call.input[mask], target)


def _sum(call: LinearCall) -> Tensor:
    total = call.output if call.sum is None else call.sum
    assert total is not None
    return total


def _mask(model: PreTrainedModel, call: LinearCall, batch: Batch) -> Tensor:
    return token_mask(model, call.linear, batch, call.input.shape[:-1])
