"""Gates with given weights, and their gradients by autograd and by finite differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compressor.config.methods import METHODS
from compressor.selection.gates import RankedGate
from compressor.selection.gates.concrete import ConcreteGate
from compressor.selection.options import read_options

LAYERS = (3, 4, 2)
"""Heads of each site."""
HEADS = sum(LAYERS)


def make_gate(
    method: str,
    keep: int | None,
    *,
    layers: Sequence[int] = LAYERS,
    steps: int = 30,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> RankedGate:
    """The gate of a method, with some of its options."""
    make = METHODS[method].load()
    gate: RankedGate = make(layers, keep, steps, seed, read_options(method, options or {}, make.options_class))
    return gate


def make_concrete(method: str, keep: int | None, *, steps: int = 100, **options: Any) -> ConcreteGate:
    """The gate of a penalised method."""
    gate = make_gate(method, keep, steps=steps, options=options)
    assert isinstance(gate, ConcreteGate)
    return gate


def set_weights(gate: RankedGate, weights: list[float]) -> None:
    with torch.no_grad():
        gate.weight.copy_(torch.tensor(weights))


def gradient(gate: RankedGate, output: torch.Tensor) -> list[float]:
    """The gradient of a scalar in the weights of a gate."""
    (slopes,) = torch.autograd.grad(output, gate.weight)
    return list(slopes.tolist())


def central_differences(gate: RankedGate, function: Callable[[], torch.Tensor], step: float = 1e-6) -> list[float]:
    """The gradient of a function of the weights of a gate by central differences."""
    slopes = []
    with torch.no_grad():
        for head in range(gate.units):
            values = []
            for shift in (step, -2 * step):
                gate.weight[head] += shift
                values.append(function().item())
            gate.weight[head] += step
            slopes.append((values[0] - values[1]) / (2 * step))
    return slopes
