"""Run a model layer by layer over many batches, of each of which only the latest layer output is held.

Two runs, one over the dense model and one over a copy that is pruned on the way, see the inputs and outputs of the same
linear side by side::

    for dense_calls, calls in zip(dense.observe(readers), pruned.observe(readers)):
        ...  # of one batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from compressor.selection.pruners.layerwise.layer_calls import (
    CallOrder,
    EndForwardError,
    layer_groups,
    run_layers,
)
from compressor.selection.pruners.layerwise.linear_inputs import first_tensor
from compressor.selection.pruners.layerwise.residual_sum import SumReader, readers_of
from compressor.units.layers import removed_afterwards


@dataclass(frozen=True)
class LinearCall:
    """One call of a linear `y = W x + b`. Its tensors are those of the forward and must not be changed.

    Attributes:
        linear: module path.
        number: which of the calls of the linear in the forward it is, from 0.
        input: x `[batch, position, in]`.
        output: y `[batch, position, out]`; None if neither it nor a sum is observed.
        sum: s = y + R `[batch, position, out]`, R the residual stream; None if it is not observed.
    """

    linear: str
    number: int
    input: Tensor
    output: Tensor | None
    sum: Tensor | None


class LayerwiseRun:
    """One pass of batches through the layers of a model, as the model is at each moment.

    A forward starts at layer call `start`. The layer calls before it return the latest output that was recorded for
    their module list; all but the last of these are discarded by the chain of layers. For each batch one output is held
    per module list (those of an encoder and of a decoder). Everything outside layers, e.g. embeddings, runs again.

    Args:
        model: a transformers model. Weights and hooks may change between calls; changes of a layer before `start` have
            no effect any more.
        batches: inputs `[batch, ...]` of each batch, with or without `labels`.

    Attributes:
        start: the layer call that the next forward starts at, from 0.
        end: number of layer calls of a forward.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._model, self._batches = model, batches
        self._group_of = layer_groups(model)
        self._latest: list[dict[int, Any]] = [{} for _ in batches]
        self._order = CallOrder(model, batches[0])
        self.start, self.end = 0, self._order.layer_calls

    def layers_of(self, linear: str) -> range:
        """The layer calls from the first to the last one that calls a linear. Modules behind all layers: `end`.

        Raises:
            ValueError: a forward does not call the linear.
        """
        calls = self._order.of(linear)
        return range(calls[0], calls[-1] + 1)

    def observe(
        self, readers: Mapping[str, SumReader | None], *, with_outputs: bool = True, advance_to: int | None = None
    ) -> Iterator[list[LinearCall]]:
        """The calls of some linears, in the order in which they complete, batch by batch.

        Each forward ends as soon as all of them have been observed. A call is complete when its sum has been read, or
        when the linear has run if it has no reader.

        Args:
            readers: the reader of the sum of each linear (see `find_sum`), or None.
            with_outputs: whether the outputs of linears without a reader are observed; if not, the calls of these are
                complete before they run.
            advance_to: the new `start` after the last batch, at most `end`; the same forwards record the outputs of the
                layers on the way, so that all batches have to be consumed. None: the run stays where it is.

        Raises:
            ValueError: a linear is called before layer call `start`, the run is already past `advance_to`, or the model
                has fewer layer calls.
        """
        for linear in readers:
            if self.layers_of(linear).start < self.start:
                raise ValueError(
                    f"{linear}: called in layer call {self.layers_of(linear).start}, but the run is at {self.start}; "
                    "observe a linear before advancing past it"
                )
        stop = self.start if advance_to is None else advance_to
        if not self.start <= stop <= self.end:
            raise ValueError(f"layer call {stop}: use one of {self.start} to {self.end}")
        expected = sum(len(self._order.of(linear)) for linear in readers)
        for number in range(len(self._batches)):
            observation = _Observation(readers, expected, with_outputs, recorded=stop == self.start)
            with removed_afterwards(observation.hooks(self._model)):
                self._forward(number, stop, observation)
            yield observation.calls
        self.start = stop

    def advance(self, layer_call: int) -> None:
        """Run all batches up to the start of a layer call, and record the outputs of the layers on the way.

        Args:
            layer_call: the new `start`, at most `end`.

        Raises:
            ValueError: the run is already past this layer call, or the model has fewer.
        """
        if layer_call != self.start:
            for _ in self.observe({}, advance_to=layer_call):
                pass

    def _forward(self, batch: int, stop: int, observation: _Observation) -> None:
        """A forward from `start` on, which records the outputs of the layer calls before `stop`."""
        latest = self._latest[batch]

        def around(number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
            group = self._group_of[layer]
            if number < self.start:
                return latest[group]
            output = run()
            if number < stop:
                latest[group] = output
                if number + 1 == stop:
                    observation.end_recording()
            return output

        run_layers(self._model, self._batches[batch], around)


@dataclass
class _PendingCall:
    """A call of a linear whose sum is read by the module at `path`, in the call that `remaining` counts down to."""

    call: LinearCall
    path: str
    remaining: int


@dataclass
class _Observation:
    """Collects the calls of some linears in one forward, and ends it after `expected` of them.

    The forward does not end before all layers on the way have been recorded (`recorded`).
    """

    readers: Mapping[str, SumReader | None]
    expected: int
    with_outputs: bool
    recorded: bool
    calls: list[LinearCall] = field(default_factory=list)
    pending: list[_PendingCall] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def hooks(self, model: nn.Module) -> Iterator[RemovableHandle]:
        # The hook of a linear precedes those of others, which may change its output.
        for name, reader in self.readers.items():
            linear = model.get_submodule(name)
            if reader is None and not self.with_outputs:
                yield linear.register_forward_pre_hook(partial(self._on_input, name))
            else:
                yield linear.register_forward_hook(partial(self._on_linear, name), prepend=True)
        for name in readers_of(list(self.readers.values())):
            module = model.get_submodule(name)
            yield module.register_forward_pre_hook(partial(self._on_reader, name), with_kwargs=True)

    def _on_input(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._complete(LinearCall(name, self._next_number(name), args[0], None, None))

    def _on_linear(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        number = self._next_number(name)
        reader = self.readers[name]
        if reader is None:
            # Where the forward goes on, an operation in place could change the output.
            kept = output if self.expected == 1 and self.recorded else output.clone()
            self._complete(LinearCall(name, number, args[0], kept, None))
        else:
            path, nth = reader.calls[number]
            # An operation in place could change the output before its sum is read.
            self.pending.append(_PendingCall(LinearCall(name, number, args[0], output.clone(), None), path, nth))

    def _on_reader(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for pending in self.pending:
            pending.remaining -= pending.path == name
        complete = [pending.call for pending in self.pending if not pending.remaining]
        self.pending = [pending for pending in self.pending if pending.remaining]
        for call in complete:
            self._complete(replace(call, sum=first_tensor(args, kwargs)))

    def _next_number(self, name: str) -> int:
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        return number

    def end_recording(self) -> None:
        self.recorded = True
        self._end_if_complete()

    def _complete(self, call: LinearCall) -> None:
        self.calls.append(call)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self.recorded and len(self.calls) == self.expected:
            raise EndForwardError
