"""Run a model from one of its blocks on, with what came before played back: what a search repeats it need not compute.

A block is an element of the model's outermost lists of modules: a layer of an encoder or a decoder. What a subset of
heads changes begins at the first attention call whose gates differ. Every block that ends before that call gives what
it gave, and every attention up to that call, the call included, gives the same output of each head before its gate.
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
    """One batch's way through the model.

    Attributes:
        blocks: output of each block call, in order.
        ends: attention calls made until the end of each block call.
        heads: output of each attention call before its gates, `[batch, query, head, head_dim]`, in order.
        sites: the site of each attention call.
    """

    blocks: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        held: dict[int, int] = {}
        for tensor in (*self.heads, *_tensors(self.blocks)):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(held.values())

    def first_call(self, changed: set[str]) -> int:
        """The first attention call of a site in `changed`; the number of calls where there is none."""
        return next((call for call, site in enumerate(self.sites) if site in changed), len(self.sites))

    def start(self, call: int) -> int:
        """Block calls that end before attention call `call`: what need not be run again."""
        return sum(end <= call for end in self.ends)


class PartialForward:
    """Forwards of one model without dropout, from any block on.

    Args:
        model: not changed.
        sites: its sites, in call order.
        mixed_precision: what matrices are multiplied in.
    """

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site], mixed_precision: MixedPrecision = "no") -> None:
        self._model, self._sites, self._half = model, sites, mixed_precision == "bf16"
        self._blocks = blocks(model)
        takes = inspect.signature(model.forward).parameters
        self._always = {"use_cache": False} if "use_cache" in takes else {}

    def run(
        self,
        batch: Mapping[str, Tensor],
        gates: Tensor,
        *,
        base: ActivationCache | None = None,
        call: int = 0,
        record: ActivationCache | None = None,
    ) -> Any:
        """The model's output on a batch, for one subset of heads or for several at once.

        Args:
            batch: inputs `[rows, ...]`.
            gates: `[subsets, heads]`; the output has `subsets * rows` rows, all rows of the first subset first.
            base: an earlier run on this batch, played back up to the attention call `call`.
            call: the first attention call before which nothing differs from `base`.
            record: filled with this run; for one subset.
        """
        rows = len(next(iter(batch.values())))
        run = _Run(len(gates), rows, base, call, record)
        parts = torch.split(gates, [site.heads for site in self._sites], dim=1)
        apart = {site.name: part for site, part in zip(self._sites, parts, strict=True)}

        def on_call(made: Call) -> tuple[Tensor, Tensor | None]:
            out = run.attention(made)
            gate = apart[made.site].to(out.device, out.dtype)
            # Where a forward makes more rows of each, as a chunked attention does, they lie side by side.
            return out * gate.repeat_interleave(len(out) // len(gate), dim=0)[:, None, :, None], None

        was_training = self._model.training
        self._model.eval()
        try:
            half = torch.autocast(self._model.device.type, torch.bfloat16, enabled=self._half)
            with torch.no_grad(), half, run.patched(self._blocks), intercepted(self._model, on_call, None):
                return self._model(
                    **{name: _repeat(value, len(gates), rows) for name, value in batch.items()}, **self._always
                )
        finally:
            self._model.train(was_training)


class _Run:
    """What one forward plays back and what it writes down."""

    def __init__(
        self, subsets: int, rows: int, base: ActivationCache | None, call: int, record: ActivationCache | None
    ) -> None:
        self.subsets, self.rows, self.base, self.call, self.record = subsets, rows, base, call, record
        self.start = base.start(call) if base else 0
        self.block_calls = self.attention_calls = 0

    def attention(self, made: Call) -> Tensor:
        number = self.attention_calls
        self.attention_calls += 1
        if self.base is not None and number <= self.call and number < len(self.base.heads):
            own = self.base.heads[number]
            out = _repeat(own, self.subsets, self.rows)
        else:
            own = out = made.run()[0]
        if self.record is not None:
            self.record.heads.append(own)
            self.record.sites.append(made.site)
        return out

    def block(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = self.block_calls
        self.block_calls += 1
        if self.base is not None and number < self.start:
            before, self.attention_calls = self.attention_calls, self.base.ends[number]
            own = self.base.blocks[number]
            if self.record is not None:
                self.record.heads += self.base.heads[before : self.attention_calls]
                self.record.sites += self.base.sites[before : self.attention_calls]
            out = _repeat(own, self.subsets, self.rows)
        else:
            own = out = original(*args, **kwargs)
        if self.record is not None:
            self.record.blocks.append(own)
            self.record.ends.append(self.attention_calls)
        return out

    @contextmanager
    def patched(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        before = [(module, vars(module).get("forward")) for module in modules]
        try:
            for module in modules:
                module.forward = partial(self.block, module.forward)
            yield
        finally:
            for module, forward in before:
                del module.forward
                if forward is not None:
                    module.forward = forward


def blocks(model: nn.Module) -> list[nn.Module]:
    """Elements of the outermost lists of modules, none inside another."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                visit(child)

    visit(unwrap(model))
    return list(dict.fromkeys(found))


class NotRowsError(Exception):
    """Raised where several subsets cannot share a forward: a block gives something that is not made of rows."""


def _repeat(value: Any, times: int, rows: int) -> Any:
    """`times` copies, one after another, of every tensor made of `rows` rows; one made of a single row serves all."""
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
