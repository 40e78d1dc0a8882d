"""Forwards on calibration batches: the inputs of linears without padding, and runs layer by layer over many batches.

A layer is an element of the model's outermost module lists, see `outermost_layers`. Layers of one list form a chain:
each reads the output of the one before. In a run only the latest layer output of each batch is held. A run over the
dense model and one over a copy that is pruned on the way see the calls of a linear side by side.

No module computes the sum of a linear's output and the residual stream, so it is observed at the first module that
reads it: the norm of a post-norm model; the next sublayer, the next layer or the final norm of a pre-norm model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.models.forwards import decoder_mask, forward_arguments, scored_logits_only
from compressor.progress import ProgressCallback, tracked
from compressor.selection.pruners.base import Batch
from compressor.selection.pruners.layerwise.refit import CallTokens, count_in_proportion, is_token_mask
from compressor.units.find import evaluation_mode
from compressor.units.layers import (
    AroundLayer,
    linear_at,
    linear_sizes,
    outermost_layers,
    removed_afterwards,
    routed_forwards,
)

_CANDIDATES = 32
"""Module calls after a linear that are examined."""
_ROUNDING = 16
"""Tolerance of each number in a comparison, in roundings of the numbers that are added."""
_ROWS_OF_SEARCH = 2
"""Examples on which `find_sum` looks for the sum of a linear's output and the residual stream."""
_KEPT_BYTES = 1 << 30
"""Size of the dense model's sums that are kept at a time, whatever the size of the model."""
_REFIT_BYTES = 7 << 28
"""Size of these sums and of the weights of both models up to which more is kept for small models."""
_PROCESS_BYTES = 13 << 28
"""Memory of the process up to which sums are kept; beyond it they are computed again for each request."""


SumReader = tuple[tuple[str, int], ...]
"""For each call of a linear with the output y, the path of the module whose first tensor argument is `s = y + R`, and
which of the calls of that module after the call of the linear it is (1: the first one)."""


class EndForwardError(Exception):
    """Ends a forward early, raised from a hook; `run_layers` returns None."""


def run_layers(
    model: PreTrainedModel, batch: Mapping[str, Tensor], around: AroundLayer = lambda number, layer, run: run()
) -> Any:
    """The output of a forward in evaluation mode without gradients, each layer call routed through a function.

    The model keeps its hooks and gates, and is restored afterwards. None if `EndForwardError` was raised.
    """
    with torch.no_grad(), evaluation_mode(model), routed_forwards(outermost_layers(model), around):
        try:
            return model(**forward_arguments(model, batch))
        except EndForwardError:
            return None


class CallOrder:
    """When a forward of a few rows calls its layers and its other modules.

    Attributes:
        layer_calls: number of layer calls.
    """

    def __init__(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
        self.layer_calls = 0
        self._calls: dict[str, list[int]] = {}

        def around(number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
            output = run()
            self.layer_calls = number + 1
            return output

        def record(name: str, *_: object) -> None:
            self._calls.setdefault(name, []).append(self.layer_calls)

        leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
        with removed_afterwards(module.register_forward_hook(partial(record, name)) for name, module in leaves):
            run_layers(model, batch, around)

    def of(self, linear: str) -> Sequence[int]:
        """The number of layer calls that end before each call of a linear; ValueError if the forward never calls it."""
        if linear not in self._calls:
            raise ValueError(f"{linear}: a forward calls no such module; use the path of a linear of this model")
        return self._calls[linear]


def collect_inputs(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    linears: Sequence[str],
    observer: Callable[[CallTokens], None],
    number: int = 0,
) -> None:
    """Run the whole model on one batch, by its number, and pass on the inputs of all linears; nothing is stored.

    A linear that a forward calls several times is observed as often.

    Args:
        model: a transformers model; it runs in evaluation mode without gradients, and is restored afterwards.
        batch: inputs `[batch, ...]`, with or without `labels`.
    """
    counts = dict.fromkeys(linears, 0)

    def on_input(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x = args[0]
        mask = token_mask(model, name, batch, x.shape[:-1])
        observer(CallTokens(name, number, counts[name], mask.cpu(), x[mask]))
        counts[name] += 1

    hooks = (model.get_submodule(name).register_forward_hook(partial(on_input, name)) for name in linears)
    with removed_afterwards(hooks), scored_logits_only(model, batch):
        run_layers(model, batch)


def count_tokens(
    model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]], linears: Sequence[str]
) -> dict[str, int]:
    """The number of tokens that `collect_inputs` passes on for each linear, without a forward on every batch.

    The first batch runs; tokens of further batches are in proportion to their tokens without padding, or to the sizes
    of their inputs.
    """
    tokens = dict.fromkeys(linears, 0)

    def count(call: CallTokens) -> None:
        tokens[call.linear] += len(call.inputs)

    collect_inputs(model, batches[0], linears, count)
    sizes = [next(iter(batch.values())).numel() for batch in batches]
    return {
        name: count_in_proportion(number, [padding_mask(model, name, batch) for batch in batches], sizes)
        for name, number in tokens.items()
    }


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor among the arguments of a module's forward; None if it has none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def token_mask(model: PreTrainedModel, linear: str, batch: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """The tokens of a linear's input that are not padding: bool, of `shape`, on the device of the model.

    All tokens count if there is no mask (images), or if the axes of the input differ from those of the mask. Tokens
    that are flattened row by row are recognised.

    Args:
        batch: inputs of the model `[batch, ...]`, with or without `labels`.
        shape: shape of the linear's input without its last axis, usually `[batch, position]`.
    """
    mask = padding_mask(model, linear, batch)
    if is_token_mask(mask, shape):
        return mask.reshape(shape).to(model.device) != 0
    return torch.ones(shape, dtype=torch.bool, device=model.device)


def padding_mask(model: PreTrainedModel, linear: str, batch: Mapping[str, Tensor]) -> Tensor | None:
    """The mask `[batch, position]` of a batch that is zero where the input of a linear is padding; None: there is none.

    1. A module outside the encoder of an encoder-decoder: the mask of the decoder, see `decoder_mask`.
    2. Any other module: the attention mask.
    """
    module = model.get_submodule(linear)
    if not model.config.is_encoder_decoder or any(part is module for part in model.get_encoder().modules()):
        return batch.get("attention_mask")
    return decoder_mask(batch)


def entries_per_row(linear: str, entries: int, rows: int) -> int:
    """How many entries on the first axis of a linear's input belong to each row: windows, or tokens row by row.

    Raises:
        InputError: they do not belong to rows one after another, as in experts that read chosen tokens.
    """
    if entries % rows:
        text = (
            f"{linear}: reads {entries} tokens of {rows} rows, like an expert that reads chosen tokens, so its effect "
            f"on a row cannot be measured; leave it out of the groups"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, linear=linear, entries=entries, rows=rows)
    return entries // rows


@dataclass(frozen=True, eq=False)
class LinearCall:
    """One call of a linear `y = W x + b`. Its tensors are those of the forward and must not be changed.

    Attributes:
        number: number of the call among the calls of the linear in the forward, from 0.
        input: x `[batch, position, in]`.
        output: y `[batch, position, out]`; None if neither y nor a sum is observed.
        sum: s = y + R `[batch, position, out]`, R the residual stream; None if it is not observed.
    """

    linear: str
    number: int
    input: Tensor
    output: Tensor | None
    sum: Tensor | None = None


class LayerwiseRun:
    """One pass of batches through the layers of a model, as the model is at each moment.

    A forward starts at layer call `start`. The layer calls before it return the latest output that was recorded for
    their module list; all but the last of these are discarded by the chain of layers. For each batch one output is held
    per module list (those of an encoder and of a decoder). Everything outside layers, e.g. embeddings, runs again.

    Args:
        model: a transformers model. Weights and hooks may change between calls; changes of a layer before `start` have
            no effect any more.

    Attributes:
        start: the layer call that the next forward starts at, from 0.
        end: number of layer calls of a forward.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._model, self._batches = model, batches
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._list_of = {  # the number of the first module list that has each layer
            layer: next(number for number, members in enumerate(lists) if layer in set(members.children()))
            for layer in outermost_layers(model)
        }
        self._latest: list[dict[int, Any]] = [{} for _ in batches]
        self._order = CallOrder(model, batches[0])
        self.start, self.end = 0, self._order.layer_calls

    def layers_of(self, linear: str) -> range:
        """The layer calls from the first to the last one that calls a linear. Modules behind all layers: `end`.

        ValueError if a forward does not call the linear.
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

        ValueError if the run is already past this layer call, or the model has fewer.
        """
        if layer_call != self.start:
            for _ in self.observe({}, advance_to=layer_call):
                pass

    def _forward(self, batch: int, stop: int, observation: _Observation) -> None:
        """A forward from `start` on, which records the outputs of the layer calls before `stop`."""
        latest = self._latest[batch]

        def around(number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
            members = self._list_of[layer]
            if number < self.start:
                return latest[members]
            output = run()
            if number < stop:
                latest[members] = output
                if number + 1 == stop:
                    observation.recorded = True
                    observation.end_if_complete()
            return output

        run_layers(self._model, self._batches[batch], around)


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
    # Calls whose sum is read by a module, in a call of that number; and numbers of calls, of linears and of readers.
    pending: dict[LinearCall, tuple[str, int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)

    def hooks(self, model: nn.Module) -> Iterator[RemovableHandle]:
        # The hook of a linear precedes those of others, which may change its output.
        for name, reader in self.readers.items():
            linear = model.get_submodule(name)
            if reader is None and not self.with_outputs:
                yield linear.register_forward_pre_hook(partial(self._on_linear, name))
            else:
                yield linear.register_forward_hook(partial(self._on_linear, name), prepend=True)
        for name in {name for reader in self.readers.values() for name, _ in reader or ()}:
            module = model.get_submodule(name)
            yield module.register_forward_pre_hook(partial(self._on_reader, name), with_kwargs=True)

    def _on_linear(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor | None = None) -> None:
        number, reader = self.counts[name], self.readers[name]
        self.counts[name] += 1
        # An operation in place could change the output before its sum is read, or where the forward goes on.
        if output is not None and (reader is not None or self.expected > 1 or not self.recorded):
            output = output.clone()
        call = LinearCall(name, number, args[0], output)
        if reader is None:
            self._complete(call)
        else:
            path, later = reader[number]
            self.pending[call] = path, self.reads[path] + later

    def _on_reader(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.reads[name] += 1
        for call in [call for call, due in self.pending.items() if due == (name, self.reads[name])]:
            del self.pending[call]
            self._complete(replace(call, sum=first_tensor(args, kwargs)))

    def _complete(self, call: LinearCall) -> None:
        self.calls.append(call)
        self.end_if_complete()

    def end_if_complete(self) -> None:
        if self.recorded and len(self.calls) == self.expected:
            raise EndForwardError


def find_sum(model: PreTrainedModel, batch: Mapping[str, Tensor], linear: str) -> SumReader | None:
    """The first module after each call of a linear whose input is the linear's output plus something else.

    It is found by experiment: the input has the shape of the output y, differs from it, and shifts by delta when y is
    shifted by a random delta. None if a call of the linear has no such module call.
    """
    calls = []
    for number, call in enumerate(_readings(model, batch, linear)):
        delta = _delta(call.output)
        reader = _first_sum(call, _readings(model, batch, linear, (number, delta))[number], delta)
        if reader is None:
            return None
        calls.append(reader)
    return tuple(calls) or None


@dataclass
class _Readings:
    """The output of a call of a linear, and the inputs of module calls after it, by path and number of the call."""

    output: Tensor
    inputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_complete(self) -> bool:
        return len(self.inputs) == _CANDIDATES


def _readings(
    model: PreTrainedModel, batch: Mapping[str, Tensor], linear: str, shift: tuple[int, Tensor] | None = None
) -> list[_Readings]:
    """The calls of a linear in one forward, up to the call number `shift[0]` where one is shifted by `shift[1]`."""
    calls: list[_Readings] = []

    def on_linear(module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        shifted = output + shift[1] if shift is not None and len(calls) == shift[0] else None
        # A later operation in place would change the recorded output.
        calls.append(_Readings((output if shifted is None else shifted).clone()))
        return shifted

    def on_module(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = first_tensor(args, kwargs)
        for call in calls:
            if not call.is_complete:
                call.counts[name] += 1
                if tensor is not None and tensor.shape == call.output.shape and not torch.equal(tensor, call.output):
                    call.inputs[name, call.counts[name]] = tensor.clone()
        if shift is not None and len(calls) > shift[0] and calls[shift[0]].is_complete:
            raise EndForwardError

    # The hook of the linear precedes all others, which then see the shifted output.
    hooks = [model.get_submodule(linear).register_forward_hook(on_linear, prepend=True)]
    hooks += [
        module.register_forward_pre_hook(partial(on_module, name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    with removed_afterwards(hooks):
        run_layers(model, batch)
    return calls


def _first_sum(call: _Readings, shifted: _Readings, delta: Tensor) -> tuple[str, int] | None:
    """The first module call whose input moved by delta, up to the rounding of each number."""
    for reader, tensor in call.inputs.items():
        moved = shifted.inputs.get(reader)
        if moved is None or moved.dtype != delta.dtype:
            continue
        values = [value.double() for value in (tensor, moved, delta, call.output, shifted.output)]
        size = torch.stack([value.abs() for value in values]).sum(0) + values[0].square().mean().sqrt()
        difference = (values[1] - values[0] - values[2]).abs()
        if bool((difference <= _ROUNDING * torch.finfo(delta.dtype).eps * size).all()):
            return reader
    return None


def _delta(output: Tensor) -> Tensor:
    """Random numbers of the shape and the scale of an output, the same ones in every process."""
    generator = torch.Generator().manual_seed(0)
    scale = float(output.float().square().mean().sqrt()) or 1.0
    return (torch.randn(output.shape, generator=generator) * scale).to(output.device, output.dtype)


def kept_bytes(model: nn.Module) -> int:
    """Largest size of the dense model's sums that are kept at a time, in the memory that this process has left."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return min(max(_KEPT_BYTES, _REFIT_BYTES - 2 * weights), _PROCESS_BYTES - psutil.Process().memory_info().rss)


class DenseSums:
    """The residual stream of the dense model after each of some linears, which pruning in order restores.

    It is `y + R` at each token: y is the output of the linear, R what y is added to. Where nothing is added, it is y.
    The sums of as many consecutive linears as fit into memory are computed in one pass and kept until others are
    requested. Those of linears that do not fit together are computed batch by batch.

    They are those of a copy, which stays dense while the linears of the model are changed in place. The copy holds
    weights of these linears alone; it shares all other parameters and buffers with the model, which must not change.

    Args:
        linears: module paths, in the order in which the model calls them.
        unsummed: those of the linears for which no sum is searched.
    """

    def __init__(
        self, model: PreTrainedModel, linears: Sequence[str], batches: Sequence[Batch], unsummed: Collection[str] = ()
    ) -> None:
        changed = {id(value) for name in linears for value in model.get_submodule(name).parameters()}
        shared = {id(value): value for value in (*model.parameters(), *model.buffers()) if id(value) not in changed}
        self._model = model = copy.deepcopy(model, shared)
        self._linears, self._batches = list(dict.fromkeys(linears)), batches
        example = {name: value[:_ROWS_OF_SEARCH] for name, value in batches[0].items()}
        self.readers = {name: None if name in unsummed else find_sum(model, example, name) for name in linears}
        self._run = LayerwiseRun(model, batches)
        self._kept: Sequence[dict[str, list[Tensor]]] = ()
        self._limit = kept_bytes(model)  # before the forward below, whose memory the process may hold on to
        tokens = count_tokens(model, batches, self._linears)
        self._bytes = {  # float32
            name: 4 * tokens[name] * linear_sizes(linear_at(model, name))[1] for name in self._linears
        }

    def start(self) -> None:
        """Begin a pass from the first linear on."""
        if self._run.start > self._run.layers_of(self._linears[0]).start:
            self._run, self._kept = LayerwiseRun(self._model, self._batches), ()

    def of(self, linears: Sequence[str]) -> Iterator[Mapping[str, list[Tensor]]]:
        """The sums of each call of some linears of one layer, `[tokens, out]` without padding, batch by batch.

        They are consecutive ones of all linears, and since `start` never before those of an earlier request; ValueError
        if a linear is not among all linears, or the pass is already past its layer.
        """
        if not self._kept or not set(linears) <= set(self._kept[0]):
            self._kept = ()
            self._run.advance(self._run.layers_of(linears[0]).start)
            first = self._linears.index(linears[0])
            end, size = first + len(linears), sum(self._bytes[name] for name in linears)
            while end < len(self._linears) and size + self._bytes[self._linears[end]] <= self._limit:
                size += self._bytes[self._linears[end]]
                end += 1
            observed = self._observed(first, end)
            if size > self._limit:
                yield from observed
                return
            self._kept = list(observed)
        yield from self._kept

    def _observed(self, first: int, end: int) -> Iterator[dict[str, list[Tensor]]]:
        """The sums of the linears from one number to another; the run goes on to the linear behind them."""
        linears, rest = self._linears[first:end], self._linears[end:]
        following = self._run.layers_of(rest[0]).start if rest else None
        calls_of_batches = self._run.observe({name: self.readers[name] for name in linears}, advance_to=following)
        for batch, calls in zip(self._batches, calls_of_batches, strict=True):
            sums: dict[str, list[Tensor]] = {name: [] for name in linears}
            for call in sorted(calls, key=lambda call: call.number):
                total = call.output if call.sum is None else call.sum
                assert total is not None
                sums[call.linear].append(total[token_mask(self._model, call.linear, batch, call.input.shape[:-1])])
            yield sums


def calls_in_order(
    model: PreTrainedModel,
    linear_sets: Sequence[Sequence[str]],
    batches: Sequence[Batch],
    sums: DenseSums,
    on_progress: ProgressCallback,
) -> Iterator[Iterator[CallTokens]]:
    """For each set of linears, their calls on all batches; sets and calls run when they are requested.

    With y the output of a linear and R the residual stream that it is added to, and with y' and R' those of the dense
    model, the target of y is y' + R' - R; without such a sum it is y'.

    The linears of a set are changed before the next set is requested, whose calls are computed with the changed model.
    The calls of a set may be left unread, but cannot be read after the next set is requested.

    Args:
        linear_sets: module paths of linears, in the order in which the model calls them; those of one set are called in
            the same layer and do not depend on each other.
        batches: inputs `[batch, ...]`.

    Raises:
        KeyError: a linear has no sums.
        ValueError: a forward does not call a linear, or the sets are in another order than the calls.
    """
    run = LayerwiseRun(model, batches)
    sums.start()

    def targeted(linears: Sequence[str]) -> Iterator[CallTokens]:
        observed = run.observe({linear: sums.readers[linear] for linear in linears}, with_outputs=False)
        for number, (batch, calls, dense) in enumerate(zip(batches, observed, sums.of(linears), strict=True)):
            for call in calls:
                mask = token_mask(model, call.linear, batch, call.input.shape[:-1])
                target = dense[call.linear][call.number]
                if call.output is not None and call.sum is not None:
                    target = target - (call.sum - call.output)[mask]
                yield CallTokens(call.linear, number, call.number, mask.cpu(), call.input[mask], target)

    for linears in tracked(linear_sets, on_progress):
        run.advance(run.layers_of(linears[0]).start)
        yield targeted(linears)
