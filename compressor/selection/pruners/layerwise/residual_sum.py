"""Find where a model reads the sum of a linear's output and the residual stream, by experiment in any family.

No module computes the sum, so it is observed at the first module that reads it: the norm of a post-norm model; the next
sublayer, the next layer or the final norm of a pre-norm model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.selection.pruners.layerwise.layer_calls import EndForwardError, run_layers
from compressor.selection.pruners.layerwise.linear_inputs import first_tensor
from compressor.units.layers import removed_afterwards

_CANDIDATES = 32
"""Module calls after a linear that are examined."""
_ROUNDING = 16
"""Tolerance of each number in a comparison, in roundings of the numbers that are added."""


@dataclass(frozen=True)
class SumReader:
    """The module calls whose first tensor argument is `s = y + R`, where y is the output of a linear.

    Attributes:
        linear: module path of the linear.
        calls: for each call of the linear in a forward, the path of the module that reads the sum, and which of the
            calls of that module after the call of the linear it is (1: the first one).
    """

    linear: str
    calls: tuple[tuple[str, int], ...]


def find_sum(model: PreTrainedModel, batch: Mapping[str, Tensor], linear: str) -> SumReader | None:
    """The first module after each call of a linear whose input is the linear's output plus something else.

    The input has the shape of the output y, differs from it, and shifts by delta when y is shifted by a random delta.

    Args:
        model: a transformers model, which is restored afterwards.
        batch: inputs `[batch, ...]`; a few rows suffice.
        linear: module path of the linear.

    Returns:
        None if a call of the linear has no such module call.
    """
    expected = _readings(model, batch, linear)
    calls = []
    for number, call in enumerate(expected):
        delta = _delta(call.output)
        shifted = _readings(model, batch, linear, shift=(number, delta))[number]
        reader = _first_sum(call, shifted, delta)
        if reader is None:
            return None
        calls.append(reader)
    return SumReader(linear, tuple(calls)) if calls else None


@dataclass
class _Call:
    """One call of a linear: its output, and the module calls after it as (path, call number, input)."""

    output: Tensor
    inputs: list[tuple[str, int, Tensor]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    is_complete: bool = False


def _readings(
    model: PreTrainedModel, batch: Mapping[str, Tensor], linear: str, shift: tuple[int, Tensor] | None = None
) -> list[_Call]:
    """The calls of a linear in one forward, up to the call number `shift[0]` where one is shifted by `shift[1]`."""
    calls: list[_Call] = []

    def on_linear(module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        shifted = output + shift[1] if shift is not None and len(calls) == shift[0] else None
        # A later operation in place would change the recorded output.
        calls.append(_Call((output if shifted is None else shifted).clone()))
        return shifted

    def on_module(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = first_tensor(args, kwargs)
        for call in calls:
            if not call.is_complete:
                call.counts[name] = call.counts.get(name, 0) + 1
                if tensor is not None and tensor.shape == call.output.shape and not torch.equal(tensor, call.output):
                    call.inputs.append((name, call.counts[name], tensor.clone()))
                    call.is_complete = len(call.inputs) == _CANDIDATES
        if shift is not None and len(calls) > shift[0] and calls[shift[0]].is_complete:
            raise EndForwardError

    # The hook of the linear precedes all others, which then see the shifted output.
    hooks = [model.get_submodule(linear).register_forward_hook(on_linear, prepend=True)]
    hooks += [
        module.register_forward_pre_hook(partial(on_module, name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    with removed_afterwards(hooks):
        run_layers(model, batch, lambda number, layer, run: run())
    return calls


def _first_sum(call: _Call, shifted: _Call, delta: Tensor) -> tuple[str, int] | None:
    """The first module call whose input moved by delta, up to the rounding of each number."""
    inputs = {(name, number): tensor for name, number, tensor in shifted.inputs}
    for name, number, tensor in call.inputs:
        moved = inputs.get((name, number))
        if moved is None or moved.dtype != delta.dtype:
            continue
        values = [value.double() for value in (tensor, moved, delta, call.output, shifted.output)]
        size = torch.stack([value.abs() for value in values]).sum(0) + values[0].square().mean().sqrt()
        difference = (values[1] - values[0] - values[2]).abs()
        if bool((difference <= _ROUNDING * torch.finfo(delta.dtype).eps * size).all()):
            return name, number
    return None


def _delta(output: Tensor) -> Tensor:
    """Random numbers of the shape and the scale of an output, the same ones in every process."""
    generator = torch.Generator().manual_seed(0)
    scale = float(output.float().square().mean().sqrt()) or 1.0
    return (torch.randn(output.shape, generator=generator) * scale).to(output.device, output.dtype)


def readers_of(readers: Sequence[SumReader | None]) -> set[str]:
    """Module paths that read any of the sums."""
    return {name for reader in readers if reader is not None for name, _ in reader.calls}
