"""Run a model from any of its layers on, and replay the layers before: a search repeats most of each forward.

A layer here is an element of the model's outermost lists of modules: a layer of an encoder or a decoder. A subset of
heads has its first effect at the first attention call whose gates differ. Every layer that ends before that call gives
the same output, and every attention up to and including that call gives the same output of each head before its gate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.training.schedule import MixedPrecision
from compressor.units import Site
from compressor.units.hook import Call, intercepted, unwrap


@dataclass
class ActivationCache:
    """The activations of one batch.

    Attributes:
        layers: output of each call of a layer, in order.
        ends: number of attention calls up to the end of each call of a layer.
        heads: output of each attention call before its gates, `[batch, query, head, head_dim]`, in order.
        sites: the site of each attention call.
    """

    layers: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, storage shared by several counted once."""
        sizes: dict[int, int] = {}
        for tensor in (*self.heads, *_tensors(self.layers)):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(sizes.values())

    def first_call(self, changed: set[str]) -> int:
        """The first attention call of a site in `changed`; the number of calls if there is none."""
        return next((call for call, site in enumerate(self.sites) if site in changed), len(self.sites))

    def start(self, call: int) -> int:
        """The number of calls of a layer that end before attention call `call`: these need not run again."""
        return sum(end <= call for end in self.ends)


class PartialForward:
    """Forwards of one model without dropout, from any layer on.

    Args:
        model: not changed.
        sites: its sites, in call order.
        mixed_precision: precision of matrix products.
    """

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site], mixed_precision: MixedPrecision = "no") -> None:
        self._model, self._sites, self._half = model, sites, mixed_precision == "bf16"
        self._layers = outermost_layers(model)
        parameters = inspect.signature(model.forward).parameters
        self._fixed_inputs = {"use_cache": False} if "use_cache" in parameters else {}

    def run(
        self,
        batch: Mapping[str, Tensor],
        gates: Tensor,
        *,
        base: ActivationCache | None = None,
        call: int = 0,
        record: ActivationCache | None = None,
    ) -> Any:
        """The output of the model on a batch, for one subset of heads or for several at once.

        Args:
            batch: inputs `[rows, ...]`.
            gates: `[subsets, heads]`; the output has `subsets * rows` rows, all rows of the first subset first.
            base: activations of an earlier run on this batch, replayed up to the attention call `call`.
            call: the first attention call at which gates differ from those of `base`.
            record: filled with the activations of this run; only for one subset.

        Raises:
            NotRowsError: several subsets cannot share a forward of this model.
        """
        rows = len(next(iter(batch.values())))
        replay = _Replay(len(gates), rows, base, call, record)
        parts = torch.split(gates, [site.heads for site in self._sites], dim=1)
        gate_of = {site.name: part for site, part in zip(self._sites, parts, strict=True)}

        def on_call(attention: Call) -> tuple[Tensor, Tensor | None]:
            out = replay.attention(attention)
            gate = gate_of[attention.site].to(out.device, out.dtype)
            # Where a forward splits a row into several, as chunked attention does, those lie side by side.
            return out * gate.repeat_interleave(len(out) // len(gate), dim=0)[:, None, :, None], None

        inputs = {name: _repeat(value, len(gates), rows) for name, value in batch.items()}
        was_training = self._model.training
        self._model.eval()
        try:
            half = torch.autocast(self._model.device.type, torch.bfloat16, enabled=self._half)
            with torch.no_grad(), half, replay.patched(self._layers), intercepted(self._model, on_call, None):
                return self._model(**inputs, **self._fixed_inputs)
        finally:
            self._model.train(was_training)


class _Replay:
    """What one forward replays, and what it records."""

    def __init__(
        self, subsets: int, rows: int, base: ActivationCache | None, call: int, record: ActivationCache | None
    ) -> None:
        self.subsets, self.rows, self.base, self.call, self.record = subsets, rows, base, call, record
        self.start = base.start(call) if base else 0
        self.layer_calls = self.attention_calls = 0

    def attention(self, attention: Call) -> Tensor:
        number = self.attention_calls
        self.attention_calls += 1
        if self.base is not None and number <= self.call and number < len(self.base.heads):
            output = self.base.heads[number]
            repeated = _repeat(output, self.subsets, self.rows)
        else:
            repeated = output = attention.run()[0]
        if self.record is not None:
            self.record.heads.append(output)
            self.record.sites.append(attention.site)
        return repeated

    def layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = self.layer_calls
        self.layer_calls += 1
        if self.base is not None and number < self.start:
            before, self.attention_calls = self.attention_calls, self.base.ends[number]
            output = self.base.layers[number]
            if self.record is not None:
                self.record.heads += self.base.heads[before : self.attention_calls]
                self.record.sites += self.base.sites[before : self.attention_calls]
            repeated = _repeat(output, self.subsets, self.rows)
        else:
            repeated = output = forward(*args, **kwargs)
        if self.record is not None:
            self.record.layers.append(output)
            self.record.ends.append(self.attention_calls)
        return repeated

    @contextmanager
    def patched(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Route the forwards of some modules through `layer`."""
        before = [(module, vars(module).get("forward")) for module in modules]
        try:
            for module in modules:
                module.forward = partial(self.layer, module.forward)
            yield
        finally:
            for module, forward in before:
                del module.forward
                if forward is not None:
                    module.forward = forward


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost lists of modules, none of which lies inside another."""
    layers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                layers.extend(child)
            else:
                visit(child)

    visit(unwrap(model))
    return list(dict.fromkeys(layers))


class NotRowsError(Exception):
    """Several subsets cannot share a forward, because the output of a layer is not made of rows."""


def _repeat(value: Any, times: int, rows: int) -> Any:
    """`times` concatenated copies of every tensor made of `rows` rows; a tensor of a single row serves all."""
    if times == 1 or value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if value.dim() and len(value) % rows == 0:
            return value.repeat(times, *(1,) * (value.dim() - 1))
        if not value.dim() or len(value) == 1:
            return value
    elif type(value) in (tuple, list):
        return type(value)(_repeat(part, times, rows) for part in value)
    raise NotRowsError(type(value).__name__)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
