"""Forms of the recurrences of linear attention and state space models whose exported graph runs at any length.

The functions of transformers loop over positions or chunks, or cut padding off if there is any; torch.export keeps the
loop and the branch of the example. The forms here do the same arithmetic, with the operator `scan` in place of a loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

Recurrence = Callable[..., Any]


def cut_to_length(chunk_scan: Recurrence) -> Recurrence:
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


def selective_scan(_: Recurrence) -> Recurrence:
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


def linear_recurrence(_: Recurrence) -> Recurrence:
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


def chunk_by_chunk(rule: Recurrence) -> Recurrence:
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
