"""Forms of the recurrences of state space models whose exported graph runs at any length."""

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

Scan = Callable[..., Any]


@contextlib.contextmanager
def any_length(model: nn.Module) -> Iterator[None]:
    """While inside, the recurrences of a model compute the same, and torch.export keeps the length of the text free.

    A recurrence belongs to the model if the Python module of one of its classes has the function of transformers.
    """
    sources = {type(part).__module__ for part in model.modules()}
    modules = [module for name in sorted(sources) if (module := sys.modules.get(name)) is not None]
    patches: list[tuple[ModuleType, str, Callable[[Scan], Scan]]] = [
        (module, name, form) for module in modules for name, form in _FORMS.items() if hasattr(module, name)
    ]
    if not patches:
        yield
        return
    # Else torch.export takes a text of one chunk as a text of one chunk for ever.
    with patch_attributes(patches), shape_settings.patch(backed_size_oblivious=True):
        yield


def _cut_to_length(chunk_scan: Scan) -> Scan:
    """Mamba 2 in chunks, whose output is cut to the length of the text at every length.

    The function of transformers cuts it `if pad_size > 0`, and torch.export keeps the branch of the example.
    """

    @functools.wraps(chunk_scan)
    def scan_and_cut(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        result = chunk_scan(hidden_states, *args, **kwargs)
        length = hidden_states.shape[1]
        if isinstance(result, tuple):
            output, final_state = result
            return output[:, :length], final_state
        cut: Tensor = result[:, :length]
        return cut

    return scan_and_cut


def _scanned(_: Scan) -> Scan:
    """Mamba 1 as the operator `scan`; torch.export would repeat the loop of transformers for each position."""
    return _selective_scan


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The arithmetic of `mamba_selective_scan` of transformers, in the same order."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = nn.functional.softplus(dt)
    # The operator scans the first axis: [position, batch, channel, state].
    steps, texts = dt.permute(2, 0, 1)[..., None], hidden_states.permute(2, 0, 1)[..., None]
    decays = torch.exp(A * steps)
    updates = steps * B.permute(2, 0, 1)[:, :, None].float() * texts.float()
    start = torch.zeros_like(updates[0])

    def step(state: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        decay, update = inputs
        state = decay * state + update
        return state, state.clone()

    last, states = scan(step, start, (decays, updates))
    read = torch.matmul(states.to(hidden_states.dtype), C.permute(2, 0, 1)[..., None])
    output = read[..., 0].permute(1, 2, 0)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * nn.functional.silu(z)
    return (output, last) if return_last_state else output


_FORMS: dict[str, Callable[[Scan], Scan]] = {"mamba2_chunk_scan": _cut_to_length, "mamba_selective_scan": _scanned}
"""Name of a function of transformers -> its form from the function."""
