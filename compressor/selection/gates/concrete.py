"""Base of hard concrete and BinConcrete gates: independent stochastic gates, closed by a penalty on their number."""

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
        description="weight in the loss of the expected number of open units, under a budget weighted by their cost",
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

    The number of units that end up open depends on the penalty and cannot be set directly (Li et al. 2021, section
    5.2); without `keep`, the open units are kept. To keep exactly K, the closed units of highest `log_alpha` are opened
    again or the open units of lowest `log_alpha` are closed: the result is the top K of `log_alpha`. Under budgets the
    same order decides, and each unit counts in the penalty by its price: its cost relative to the mean.

    After `cooldown` the gates are frozen at that mask and training continues without noise and penalty. Otherwise the
    model would be trained under random subsets of other sizes until the end, never under the deployed one, and the
    penalty would close further heads. Shim et al. 2021 (section 4.1.2) freeze after a fifth of the steps.

    Args:
        layers: units of each group, in order.
        keep: number of units to keep, or budgets; with none or all of them, gates are constant. None: keep those that
            end up open.
        steps: training steps of the run.
        seed: seed of the noise of every step.
        options: penalty, distribution and learning rate, which decays linearly to zero at the end of the cooldown.

    Raises:
        UsageError: `keep` is out of range.
    """

    options: ConcreteOptions

    def __init__(
        self,
        layers: Sequence[int],
        keep: base.Keep | None,
        steps: int,
        seed: int,
        options: ConcreteOptions | None = None,
    ) -> None:
        super().__init__(layers, sum(layers) if keep is None else keep, steps, seed, options)
        self.is_free = keep is None
        self.warmup_steps = round(self.options.penalty_warmup * steps)
        self.cooldown_steps = round(self.options.cooldown * steps)

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
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
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
