"""Replay the recorded outputs of a model's first layers, so that a search runs only the layers that a subset changes.

A layer here is an element of the model's outermost module lists: a layer of an encoder or a decoder. Two subsets of
heads differ first at the first attention call whose gates differ. All layers that end before that call have the same
output, and all attentions up to and including that call have the same head outputs before their gates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.training.precision import MixedPrecision
from compressor.units import Site
from compressor.units.find import evaluating, unread_sites
from compressor.units.gating import spread_over_rows
from compressor.units.hook import Call, intercepted
from compressor.units.layers import outermost_layers, routed_forwards
from compressor.units.projections import hooked_projections


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
        """Bytes of the tensors; shared storage is counted once."""
        sizes: dict[int, int] = {}
        for tensor in (*self.heads, *tensors_of(self.layers)):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(sizes.values())

    def first_call(self, changed: set[str]) -> int:
        """The first attention call of a site in `changed`; the number of calls if there is none."""
        return next((call for call, site in enumerate(self.sites) if site in changed), len(self.sites))

    def start(self, call: int) -> int:
        """The number of layer calls that end before attention call `call`; these need not run again."""
        return sum(end <= call for end in self.ends)


class PartialForward:
    """Runs forwards of one model without dropout, which may start at any layer.

    Args:
        model: the model, which is not changed.
        sites: its sites, in call order.
        mixed_precision: precision of matmuls.
    """

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site], mixed_precision: MixedPrecision = "no") -> None:
        self._model, self._sites, self._is_half = model, sites, mixed_precision == "bf16"
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
            batch: inputs `[batch, ...]`.
            gates: `[subsets, heads]`; the output has `subsets * rows` rows, all rows of the first subset first.
            base: activations of an earlier run on this batch, replayed up to the attention call `call`.
            call: the first attention call at which `gates` differ from those of `base`.
            record: filled with the activations of this run, which must be of one subset; None: they are not recorded.

        Raises:
            NotRowsError: several subsets cannot share a forward of this model.
        """
        if len(gates) > 1 and any(site.batch_axis for site in self._sites):
            raise NotRowsError("positions before rows")
        rows = len(next(iter(batch.values())))
        calls = _CachedCalls(len(gates), rows, base, call, record)
        parts = torch.split(gates, [site.heads for site in self._sites], dim=1)
        gate_of = {site.name: part for site, part in zip(self._sites, parts, strict=True)}

        def on_call(attention: Call) -> tuple[Tensor, Tensor | None]:
            return gated_output(attention.site, lambda: attention.run()[0]), None

        def on_projection(site: str, heads: Tensor) -> Tensor:
            return gated_output(site, lambda: heads)

        def gated_output(site: str, compute: Callable[[], Tensor]) -> Tensor:
            out = calls.attention(site, compute)
            if site in unread_sites(self._model):
                return out
            return out * spread_over_rows(gate_of[site], len(out)).to(out.device, out.dtype)

        inputs = {name: _repeat(value, len(gates), rows) for name, value in batch.items()}
        autocast = torch.autocast(self._model.device.type, torch.bfloat16, enabled=self._is_half)
        with (
            evaluating(self._model),
            torch.no_grad(),
            autocast,
            routed_forwards(self._layers, calls.layer),
            intercepted(self._model, on_call, None),
            hooked_projections(self._model, self._sites, on_projection),
        ):
            return self._model(**inputs, **self._fixed_inputs)


class _CachedCalls:
    """The calls of layers and attentions in one forward: some replay those of `base`, and all are added to `record`."""

    def __init__(
        self, subsets: int, rows: int, base: ActivationCache | None, call: int, record: ActivationCache | None
    ) -> None:
        self.subsets, self.rows, self.base, self.call, self.record = subsets, rows, base, call, record
        self.start = base.start(call) if base else 0
        self.attention_calls = 0

    def attention(self, site: str, compute: Callable[[], Tensor]) -> Tensor:
        """The heads `[batch, query, head, head_dim]` of an attention call before gates, replayed if `base` has them."""
        number = self.attention_calls
        self.attention_calls += 1
        if self.base is not None and number <= self.call and number < len(self.base.heads):
            output = self.base.heads[number]
            repeated = _repeat(output, self.subsets, self.rows)
        else:
            repeated = output = compute()
        if self.record is not None:
            self.record.heads.append(output)
            self.record.sites.append(site)
        return repeated

    def layer(self, number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
        """The output of a layer call, replayed if it equals that of `base`; see `routed_forwards`."""
        if self.base is not None and number < self.start:
            first_call, self.attention_calls = self.attention_calls, self.base.ends[number]
            output = self.base.layers[number]
            if self.record is not None:
                self.record.heads += self.base.heads[first_call : self.attention_calls]
                self.record.sites += self.base.sites[first_call : self.attention_calls]
            repeated = _repeat(output, self.subsets, self.rows)
        else:
            repeated = output = run()
        if self.record is not None:
            self.record.layers.append(output)
            self.record.ends.append(self.attention_calls)
        return repeated


class NotRowsError(Exception):
    """Several subsets cannot share a forward, because the output of a layer does not consist of rows."""


def _repeat(value: Any, times: int, rows: int) -> Any:
    """Concatenate `times` copies of every tensor of `rows` rows in `value`; tensors of a single row stay as they are.

    Raises:
        NotRowsError: `value` contains anything else.
    """
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


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
