"""Base of the gates: a weight per unit that ranks the units, noise, and straight-through gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from compressor.selection.gates.capacity import Capacity, FixedCount
from compressor.selection.options import MethodOptions
from compressor.units.gate import Gate

GateLearningRate = Annotated[float, Field(gt=0, description="peak learning rate of the gate's weights")]
GateMaxGradNorm = Annotated[float, Field(gt=0, description="maximum norm of the gradient of the gate's weights")]
Keep = int | Capacity
"""What a gate keeps: a number of units, or those that fit into budgets."""


class RankedGate(Gate):
    """A gate with one weight per unit: the units of largest weight are kept, ties in (group, unit) order.

    A registered gate derives from this class. Its arguments are `(layers, keep, steps, seed, options)`: units of each
    group, units to keep, optimizer steps of the run, its seed, and an instance of `options_class`.

    Args:
        start: initial weights `[units]`.
        keep: number of units to keep, from none to all, or budgets of their costs. Where every unit or none can be
            kept, there is no choice to learn.
        steps: optimizer steps of the run.
        seed: seed of the noise of every step.
        learning_rate: peak learning rate of the weights.
        max_grad_norm: maximum norm of the weights' gradient.

    Raises:
        UsageError: `keep` is out of range.
    """

    options_class: ClassVar[type[MethodOptions]]

    def __init__(
        self, start: Tensor, keep: Keep, steps: int, seed: int, *, learning_rate: float, max_grad_norm: float
    ) -> None:
        super().__init__()
        self.units = len(start)
        self.capacity: Capacity = keep if isinstance(keep, Capacity) else FixedCount(self.units, keep)
        if self.capacity.units != self.units:
            raise ValueError(f"{self.capacity.units} costs for {self.units} units")
        self.steps, self.seed = steps, seed
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        self.weight = parameter(start)

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one subset that may be kept."""
        return self.capacity.has_choice

    def harden(self) -> Tensor:
        return self.capacity.select(self.weight)

    def fixed(self) -> Tensor:
        """The gates of `scale` with a zero gradient: distributed training expects every parameter in the graph."""
        return self.scale() + 0.0 * self.weight


def initial(layers: Sequence[int], seed: int) -> Tensor:
    """Small seeded noise `[units]`, float64, for gates over `layers` (units of each group).

    Xavier-uniform over [layers, heads] as in the released code of differentiable subset pruning.
    """
    bound = math.sqrt(6.0 / (len(layers) + max(layers)))
    uniform = torch.rand(sum(layers), dtype=torch.float64, generator=torch.Generator().manual_seed(seed % 2**63))
    return (2.0 * uniform - 1.0) * bound


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of `hard` with the gradient of `soft`."""
    return hard + (soft - soft.detach())


def noise(units: int, seed: int, step: int) -> Tensor:
    """Uniform noise `[units]` in [0, 1), float64: a function of the run's seed and the step."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step + 1) % 2**63)
    return torch.rand(units, dtype=torch.float64, generator=generator)


def parameter(values: Tensor) -> nn.Parameter:
    """A learnable copy of `values` that stays float64 when the model around it is moved or saved."""
    return nn.Parameter(values.clone().to(torch.float64))
