"""Base of hard concrete and BinConcrete gates: independent stochastic gates, closed by a penalty on their number."""

from __future__ import annotations

import math
from abc import abstractmethod
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
Beta = Annotated[float, Field(gt=0, description="temperature of the concrete distribution")]


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
        start: initial `log_alpha` `[units]`.
        keep: number of units to keep, or budgets; with none or all of them, gates are constant. None: keep those that
            end up open.
        steps: optimizer steps of the run.
        seed: seed of the noise of every step.
        penalty: weight of the expected number of open units in the loss.
        penalty_warmup: share of the steps over which that weight rises linearly from zero.
        cooldown: share of the steps after which the gates are frozen; 1: never.
        beta: temperature of the concrete distribution.
        gamma: lower end of the interval over which gates are stretched, below 0.
        zeta: upper end of that interval, above 1.
        gate_learning_rate: peak learning rate of `log_alpha`, which decays linearly to zero at the end of the cooldown.
        gate_max_grad_norm: maximum norm of its gradient.

    Raises:
        UsageError: `keep` is out of range.
    """

    def __init__(
        self,
        start: Tensor,
        keep: base.Keep | None,
        steps: int,
        seed: int,
        *,
        penalty: float,
        penalty_warmup: float,
        cooldown: float,
        beta: float,
        gamma: float,
        zeta: float,
        gate_learning_rate: float,
        gate_max_grad_norm: float,
    ) -> None:
        super().__init__(
            start,
            len(start) if keep is None else keep,
            steps,
            seed,
            learning_rate=gate_learning_rate,
            max_grad_norm=gate_max_grad_norm,
        )
        self.is_free = keep is None
        self.strength, self.beta, self.gamma, self.zeta = penalty, beta, gamma, zeta
        self.warmup_steps, self.cooldown_steps = round(penalty_warmup * steps), round(cooldown * steps)

    @abstractmethod
    def draw(self, uniform: Tensor) -> Tensor:
        """Gates `[..., units]` from noise `uniform` `[..., units]`, differentiable in the weights."""

    def concrete(self, uniform: Tensor) -> Tensor:
        """Binary concrete variables in (0, 1) from noise `uniform` `[..., units]` (Maddison et al. 2017)."""
        return torch.sigmoid((torch.logit(uniform) + self.weight) / self.beta)

    def open_probability(self) -> Tensor:
        """Probability `[units]` that a stretched gate is not zero (Louizos et al. 2018, equation 12)."""
        return torch.sigmoid(self.weight - self.beta * math.log(-self.gamma / self.zeta))

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
        return self.strength * warm * (prices * self.open_probability()).sum()

    def learning_rate_at(self, step: int) -> float:
        return max(0.0, 1.0 - step / max(1, self.cooldown_steps))

    def is_settled(self, step: int) -> bool:
        return step >= self.cooldown_steps

    def counts(self) -> dict[str, float]:
        """`open`: number of units whose `log_alpha` is above zero; `expected`: the expected number of open units."""
        return {"open": float((self.weight > 0).sum()), "expected": self.open_probability().sum().item()}

    def _is_random(self, step: int) -> bool:
        return self.has_choice and not self.is_settled(step)
