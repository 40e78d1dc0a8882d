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
Keep = int | Capacity
"""What a gate keeps: a number of units, or those that fit into budgets."""


class GateOptions(MethodOptions):
    """Options of every gate. A gate with options of its own derives a class from this one."""

    gate_learning_rate: GateLearningRate = 0.5
    gate_max_grad_norm: float = Field(1.0, gt=0, description="maximum norm of the gradient of the gate's weights")


class RankedGate(Gate):
    """A gate with one weight per unit: the units of largest weight are kept, ties in (group, unit) order.

    A registered gate derives from this class and sets `options_class`.

    Args:
        layers: units of each group, in order.
        keep: number of units to keep, from none to all, or budgets of their costs. Where every unit or none can be
            kept, there is no choice to learn, and gates are constant.
        steps: training steps of the run.
        seed: seed of the initial weights, and of the noise of every step.
        options: an instance of `options_class`; None: its defaults.

    Raises:
        UsageError: `keep` is out of range.
    """

    options_class: ClassVar[type[GateOptions]]
    options: GateOptions

    def __init__(
        self, layers: Sequence[int], keep: Keep, steps: int, seed: int, options: GateOptions | None = None
    ) -> None:
        super().__init__()
        self.options = options or self.options_class()
        self.layers, self.units, self.steps, self.seed = tuple(layers), sum(layers), steps, seed
        self.capacity: Capacity = keep if isinstance(keep, Capacity) else FixedCount(self.units, keep)
        self.learning_rate, self.max_grad_norm = self.options.gate_learning_rate, self.options.gate_max_grad_norm
        # The weights stay float64 when the model around them is moved or saved.
        self.weight = nn.Parameter(self.initial_weights().to(torch.float64))

    def initial_weights(self) -> Tensor:
        """Small seeded noise `[units]`: Xavier-uniform over [layers, heads].

        So it is in the released code of differentiable subset pruning.
        """
        bound = math.sqrt(6.0 / (len(self.layers) + max(self.layers)))
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        return (2.0 * torch.rand(self.units, dtype=torch.float64, generator=generator) - 1.0) * bound

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one subset that may be kept."""
        return self.capacity.has_choice

    def harden(self) -> Tensor:
        return self.capacity.select(self.weight)

    def fixed(self) -> Tensor:
        """The gates of `scale` with a zero gradient: distributed training expects every parameter in the graph."""
        return self.scale() + 0.0 * self.weight


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of `hard` with the gradient of `soft`."""
    return hard + (soft - soft.detach())


def noise(units: int, seed: int, step: int) -> Tensor:
    """Uniform noise `[units]` in [0, 1), float64: a function of the run's seed and the step."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step + 1) % 2**63)
    return torch.rand(units, dtype=torch.float64, generator=generator)
