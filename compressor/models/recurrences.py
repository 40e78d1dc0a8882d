"""Forms of functions of transformers whose exported graph runs at any length, or with any number of images.

The recurrences of linear attention and state space models loop over positions or chunks, or cut padding off if there is
any; torch.export keeps the loop and the branch of the example. The forms here do the same arithmetic, with the operator
`scan` in place of a loop. `compressor.models.image_positions` has the form of a loop over images.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.fx.experimental import _config as shape_settings
from transformers.exporters.utils import patch_attributes

from compressor.models.image_positions import resized_at_once

Recurrence = Callable[..., Any]


@contextlib.contextmanager
def any_length(model: nn.Module) -> Iterator[None]:
    """While inside, functions of a model have the forms that torch.export exports for inputs of any length.

    These are the functions and methods of a name in `_FORMS`, in a module of Python or a class of the model's parts.
    """
    classes = {type(part) for part in model.modules()}
    modules = {module for cls in classes if (module := sys.modules.get(cls.__module__)) is not None}
    owners: tuple[type | ModuleType, ...] = (*classes, *modules)
    patches = [(owner, name, form) for owner in owners for name, form in _FORMS.items() if name in vars(owner)]
    if not patches:
        yield
        return
    with contextlib.ExitStack() as undo:
        for owner, name, form in patches:
            undo.enter_context(_replaced(owner, name, form))
        # Sizes of one, such as a single chunk, stay free too.
        undo.enter_context(patch_attributes([(shape_settings, "backed_size_oblivious", lambda _: True)]))
        undo.enter_context(torch.no_grad())  # what `scan` repeats may write in place, without gradients
        yield


@contextlib.contextmanager
def _replaced(owner: type | ModuleType, name: str, form: Callable[[Recurrence], Recurrence]) -> Iterator[None]:
    """While inside, an attribute has another form; a static method stays one."""
    original, replacement = vars(owner)[name], form(getattr(owner, name))
    setattr(owner, name, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _cut_to_length(chunk_scan: Recurrence) -> Recurrence:
    """Mamba 2, whose output is cut to the length of the text even if the example has no padding of its last chunk."""

    @functools.wraps(chunk_scan)
    def scan_and_cut(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        result = chunk_scan(hidden_states, *args, **kwargs)
        output, *state = result if isinstance(result, tuple) else (result,)
        output = output[:, : hidden_states.shape[1]]
        return (output, *state) if state else output

    return scan_and_cut


def _step(state: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One position of a recurrence: the next state, and a copy of it as the output."""
    decay, update = inputs
    state = decay * state + update
    return state, state.clone()


def _selective_scan(_: Recurrence) -> Recurrence:
    """Mamba 1 as a `scan` of positions."""

    def selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if delta_softplus:
            dt = nn.functional.softplus(dt)
        # `scan` runs along the first axis: [position, batch, channel, state].
        steps, channels = (tensor.permute(2, 0, 1)[..., None] for tensor in (dt, hidden_states))
        writes, reads = b.permute(2, 0, 1), c.permute(2, 0, 1)
        updates = steps * writes[:, :, None].float() * channels.float()
        last, states = scan(_step, torch.zeros_like(updates[0]), (torch.exp(a * steps), updates))
        output = torch.matmul(states.to(hidden_states.dtype), reads[..., None])[..., 0].permute(1, 2, 0)
        if (skip := options.get("D")) is not None:
            output = output + hidden_states * skip[None, :, None]
        if z is not None:
            output = output * nn.functional.silu(z)
        return (output, last) if return_last_state else output

    return selective_scan


def _linear_recurrence(_: Recurrence) -> Recurrence:
    """The linear recurrent unit of Griffin as a `scan` of positions."""

    def linear_recurrence(
        _: nn.Module,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        decays = (recurrent_gate * ~reset).to(acc_dtype).transpose(0, 1)
        updates = hidden_states.to(acc_dtype).transpose(0, 1)
        start = torch.zeros_like(updates[0]) if recurrent_states is None else recurrent_states.to(updates)
        last, states = scan(_step, start, (decays, updates))
        return states.transpose(0, 1).to(hidden_states.dtype), last

    return linear_recurrence


def _chunk_by_chunk(rule: Recurrence) -> Recurrence:
    """A delta rule as a `scan` of its chunks, each of which starts from the state after the one before."""

    @functools.wraps(rule)
    def scan_chunks(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, length, heads, width = value.shape
        count = (length + chunk_size - 1) // chunk_size
        chunks = tuple(_chunks(part, count, chunk_size) for part in (query, key, value, g, beta))
        if initial_state is None:
            initial_state = value.new_zeros(batch, heads, key.shape[-1], width)

        def step(state: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            output, state = rule(
                *inputs, chunk_size=chunk_size, initial_state=state, output_final_state=True, **options
            )
            return state, output

        last, outputs = scan(step, initial_state.float(), chunks)
        output = outputs.transpose(0, 1).reshape(batch, count * chunk_size, heads, width)[:, :length]
        return output, last if output_final_state else None

    return scan_chunks


def _chunks(part: Tensor, count: int, size: int) -> Tensor:
    """The chunks of `[batch, position, ...]`, the last one padded by zeros, as `[chunk, batch, position, ...]`."""
    rest = part.shape[2:]
    padded = nn.functional.pad(part, (0, 0) * len(rest) + (0, count * size - part.shape[1]))
    return padded.reshape(part.shape[0], count, size, *rest).transpose(0, 1)


_FORMS: dict[str, Callable[[Recurrence], Recurrence]] = {
    "mamba2_chunk_scan": _cut_to_length,
    "mamba_selective_scan": _selective_scan,
    "_rnn_scan": _linear_recurrence,
    "torch_chunk_gated_delta_rule": _chunk_by_chunk,
    "chunk_kimi_delta_attention": _chunk_by_chunk,
    "resize_positional_embeddings": resized_at_once,
}
"""Name of a function or method of transformers -> the form for the export, from the original."""
