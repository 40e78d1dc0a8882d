"""Linears that round as in the engine, so that training compensates for it; their weights stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from compressor.units.layers import Linear, is_linear, linear_weight

FULL_RANGE, REDUCED_RANGE = 127, 63
"""Largest integer of a weight, and where the graph uses 7 of 8 bits."""
_SMOOTHING = 0.95
"""Share of the magnitudes of activations that moves into weights; NNCF's value for matmuls."""
_LEVELS = 255
"""Largest integer of an activation."""
_SMALLEST = 1e-8


@dataclass(frozen=True)
class Rounding:
    """When linears round during a training.

    Attributes:
        first_step: number of training steps before linears round.
        weight_levels: largest integer of a weight; None: weights and inputs round to bfloat16.
    """

    first_step: int
    weight_levels: int | None = FULL_RANGE


@contextmanager
def fake_quantized(
    model: nn.Module, is_active: Callable[[], bool], *, weight_levels: int | None = FULL_RANGE
) -> Iterator[None]:
    """The model with linears that round inputs and weights to 8 bits, as the portable quantized graph, or to bfloat16.

    Rounding has the gradient one (straight through). On exit the model is as before.

    In 8 bits, inputs are asymmetric with one range for a tensor, and weights symmetric with one range for each output
    channel. First, each input channel is divided by a factor that its weights are multiplied by, so that outliers of
    activations do not widen the range of all others (SmoothQuant, Xiao et al. 2023, equation 4). All ranges are those
    of the batch, so that there is no state besides the weights.

    Args:
        model: the model; its parameters, and their names, stay as they are.
        is_active: whether a forward rounds, e.g. by the step of a training.
        weight_levels: largest integer of a weight, `FULL_RANGE` or `REDUCED_RANGE`; None: bfloat16.
    """
    with ExitStack() as undo:
        for module in model.modules():
            if is_linear(module):
                rounded = partial(_forward, module, module.forward, is_active, weight_levels)
                setattr(module, "forward", rounded)  # noqa: B010 - a method of the instance
                undo.callback(delattr, module, "forward")
        yield


def _forward(
    linear: Linear,
    exact: Callable[[Tensor], Tensor],
    is_active: Callable[[], bool],
    weight_levels: int | None,
    inputs: Tensor,
) -> Tensor:
    """The output `[..., outputs]` of a linear for inputs `[..., inputs]`."""
    if not is_active() or not inputs.numel() or not linear.weight.numel():
        return exact(inputs)
    weight = linear_weight(linear)
    if weight_levels is None:
        return nn.functional.linear(_round_to_bfloat16(inputs), _round_to_bfloat16(weight), linear.bias)
    factors = _smoothing_factors(inputs.detach(), weight.detach())
    rounded = _round_weight(weight * factors, weight_levels)
    return nn.functional.linear(_round_input(inputs / factors), rounded, linear.bias)


def _smoothing_factors(inputs: Tensor, weight: Tensor) -> Tensor:
    """The factor of each input channel, `[inputs]`; one where a channel is zero."""
    activations, weights = (tensor.abs().reshape(-1, tensor.shape[-1]).amax(0) for tensor in (inputs, weight))
    factors = activations**_SMOOTHING / weights ** (1 - _SMOOTHING)
    return torch.where((activations > 0) & (weights > 0), factors, torch.ones_like(factors))


def _round_to_bfloat16(tensor: Tensor) -> Tensor:
    """A tensor rounded to bfloat16, in its own type."""
    exact = tensor.detach()
    return tensor + (exact.to(torch.bfloat16).to(exact.dtype) - exact)


def _round_input(inputs: Tensor) -> Tensor:
    """Inputs rounded to 8 bits with a zero point; zero stays zero."""
    low, high = inputs.detach().aminmax()
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / _LEVELS).clamp(min=_SMALLEST).float()
    zero_point = (-low / scale).round().to(torch.int32)
    return torch.fake_quantize_per_tensor_affine(inputs, scale, zero_point, 0, _LEVELS)


def _round_weight(weight: Tensor, levels: int) -> Tensor:
    """A weight `[outputs, inputs]` rounded to integers of at most `levels`, with a scale for each output."""
    scale = (weight.detach().abs().amax(1) / levels).clamp(min=_SMALLEST).float()
    zero_points = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zero_points, 0, -levels, levels)
