"""Independent stochastic gates, closed by a penalty on their number.

Hard concrete gates (Voita et al. 2019, after Louizos et al. 2018) lie in [0, 1], with mass at both ends. BinConcrete
gates of all-attention head pruning (Shim et al. 2021, section 3.2) are 0 or 1 in every step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from compressor.selection.gates import base
from compressor.selection.options import StepShare

_EDGE = 1e-6
"""Minimum distance of uniform noise from 0 and 1, as in the code of Voita et al."""

Penalty = Annotated[
    float,
    Field(
        ge=0,
        description="weight in the loss of the expected number of open units, which under a budget is weighted by "
        "their cost",
    ),
]
PenaltyWarmup = Annotated[StepShare, Field(description="share of the steps in which that weight rises from zero")]
Cooldown = Annotated[StepShare, Field(description="share of the steps after which the gates are frozen; 1: never")]
Initial = Annotated[float, Field(description="initial weight of every gate; above zero it is open")]


class ConcreteOptions(base.GateOptions):
    """Options of both gates."""

    gate_learning_rate: base.GateLearningRate = 0.1
    penalty: Penalty
    penalty_warmup: PenaltyWarmup
    cooldown: Cooldown
    initial: Initial
    beta: float = Field(0.333, gt=0, description="temperature of the concrete distribution")


class ConcreteGate(base.RankedGate):
    """One concrete variable per unit, whose weight is its `log_alpha`; a unit is open if that is above zero.

    The number of units that are open at the end depends on the penalty and cannot be set directly (Li et al. 2021,
    section 5.2); without `keep`, the open units are kept. With `keep`, the K units of highest `log_alpha` are kept.
    Under budgets the same order decides, and each unit counts in the penalty by its price: its cost relative to the
    mean.

    After `cooldown` the gates are frozen at that mask and training continues without noise and penalty. Otherwise the
    model would be trained under random subsets of different sizes until the end, never under the deployed subset, and
    the penalty would close further heads. Shim et al. 2021 (section 4.1.2) freeze after a fifth of the steps.

    The learning rate decays linearly to zero at the end of the cooldown. See `RankedGate` for the arguments.
    """

    options: ConcreteOptions

    @property
    def cooldown_steps(self) -> int:
        """Number of steps after which the gates are frozen."""
        return round(self.options.cooldown * self.steps)

    @property
    def stretch(self) -> tuple[float, float]:
        """Interval over which gates are stretched, from below 0 to above 1, as in the papers' code."""
        return -0.1, 1.1

    @abstractmethod
    def draw(self, uniform: Tensor) -> Tensor:
        """Gates `[..., units]` from noise `uniform` `[..., units]`, differentiable in the weights."""

    def concrete(self, uniform: Tensor) -> Tensor:
        """Binary concrete variables in (0, 1) from noise `uniform` `[..., units]` (Maddison et al. 2017)."""
        return torch.sigmoid((torch.logit(uniform) + self.weight) / self.options.beta)

    def open_probability(self) -> Tensor:
        """Probability `[units]` that a stretched gate is not zero (Louizos et al. 2018, equation 12)."""
        low, high = self.stretch
        return torch.sigmoid(self.weight - self.options.beta * math.log(-low / high))

    @property
    def has_choice(self) -> bool:
        return self.is_free or super().has_choice

    def harden(self) -> Tensor:
        return self.weight.detach() > 0 if self.is_free else super().harden()

    def sample(self, step: int) -> Tensor:
        if not self._is_random(step):
            return self.fixed()
        uniform = base.noise(self.units, self.seed, step).clamp(_EDGE, 1.0 - _EDGE)
        return self.draw(uniform.to(self.weight.device))

    def penalty(self, step: int) -> Tensor:
        if not self._is_random(step):
            return super().penalty(step)
        warmup_steps = round(self.options.penalty_warmup * self.steps)
        warm = min(1.0, step / warmup_steps) if warmup_steps else 1.0
        prices = self.capacity.prices.to(self.weight.device)
        return self.options.penalty * warm * (prices * self.open_probability()).sum()

    def learning_rate_at(self, step: int) -> float:
        return max(0.0, 1.0 - step / max(1, self.cooldown_steps))

    def is_settled(self, step: int) -> bool:
        return step >= self.cooldown_steps

    def counts(self) -> dict[str, float]:
        """`open`: number of units whose `log_alpha` is above zero; `expected`: the expected number of open units."""
        return {"open": float((self.weight > 0).sum()), "expected": self.open_probability().sum().item()}

    def _is_random(self, step: int) -> bool:
        return self.has_choice and not self.is_settled(step)


class HardConcreteOptions(ConcreteOptions):
    """Options of `hard-concrete`.

    The defaults are those of Li et al. 2021 for this baseline (penalty, learning rate, small seeded initial weights),
    except for `cooldown`: they adjust the number of heads after training, which corresponds to `cooldown=1`.
    """

    penalty: Penalty = 0.0015
    penalty_warmup: PenaltyWarmup = 0.0
    cooldown: Cooldown = 2 / 3
    initial: Initial = 0.0
    gamma: float = Field(-0.1, lt=0, description="lower end of the interval that gates are stretched over")
    zeta: float = Field(1.1, gt=1, description="upper end of that interval")


class HardConcreteGate(ConcreteGate):
    """Concrete gates stretched over [gamma, zeta] and clipped to [0, 1]; a kept unit is deployed at scale 1.

    Small seeded noise on the initial weights breaks ties.
    """

    options_class = HardConcreteOptions
    options: HardConcreteOptions

    @property
    def stretch(self) -> tuple[float, float]:
        return self.options.gamma, self.options.zeta

    def initial_weights(self) -> Tensor:
        return self.options.initial + super().initial_weights()

    def draw(self, uniform: Tensor) -> Tensor:
        low, high = self.stretch
        return torch.clamp(self.concrete(uniform) * (high - low) + low, 0.0, 1.0)


class BinConcreteOptions(ConcreteOptions):
    """Options of `bin-concrete`.

    The defaults are the paper's, with steps as shares of its 80K: a penalty between 0.01 and 0.02 that rises over the
    first 4K steps, gates that are frozen after 16K steps, and weights (`pi`) that start at 2, so that a unit is open
    with probability 0.8808. The three techniques of section 3.3 can be switched off: `penalty_warmup=0`, `initial=0`,
    `output_scaling=False`.
    """

    penalty: Penalty = 0.015
    penalty_warmup: PenaltyWarmup = 0.05
    cooldown: Cooldown = 0.2
    initial: Initial = 2.0
    output_scaling: bool = Field(True, description="scale the open units of a group up to make up for its closed ones")


class BinConcreteGate(ConcreteGate):
    """Concrete gates rounded to 0 or 1, with the gradient of the values before rounding."""

    options_class = BinConcreteOptions
    options: BinConcreteOptions

    def initial_weights(self) -> Tensor:
        return torch.full((self.units,), self.options.initial, dtype=torch.float64)

    def draw(self, uniform: Tensor) -> Tensor:
        soft = self.concrete(uniform)
        return self._scaled(base.straight_through((soft > 0.5).to(soft.dtype), soft))

    def scale(self) -> Tensor:
        return self._scaled(super().scale())

    def _scaled(self, gates: Tensor) -> Tensor:
        return scale_groups(gates, self.layers) if self.options.output_scaling else gates


def scale_groups(gates: Tensor, layers: Sequence[int]) -> Tensor:
    """Gates `[..., units]` times `s_g = min(H, H / sum g)` of their group of H units (equation 3); H if all are closed.

    The factor applies to the sum of the outputs of the units, before the bias of the linear that reads them, so it can
    be folded into that linear. The paper scales heads; bundles of neurons are scaled in the same way.
    """
    parts = gates.split(list(layers), dim=-1)
    return torch.cat([part * part.shape[-1] / part.sum(-1, keepdim=True).clamp(min=1.0) for part in parts], dim=-1)
