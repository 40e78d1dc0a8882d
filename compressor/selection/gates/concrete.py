"""What hard concrete and BinConcrete share: independent stochastic gates that a penalty on their number closes."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from compressor.errors import UsageError
from compressor.selection.gates import base

_EDGE = 1e-6  # uniform noise keeps so far from 0 and 1 (Voita et al.'s code)


class ConcreteGate(base.RankedGate):
    """One concrete variable a head, `log_alpha` its weight; a head counts as open iff that is above zero.

    How many heads end up open follows from the penalty and cannot be set (Li et al. 2021, section 5.2). Without `keep`
    it is those. To keep exactly K, the closed heads of highest `log_alpha` are opened again or the open ones of lowest
    closed, as few as possible: that is the top K of `log_alpha`.

    After `cooldown` the gates are frozen at that mask and training goes on without noise and penalty. Otherwise the
    model would learn under random subsets of another size until the end and never meet the one it is deployed with, and
    the penalty would go on closing heads (Shim et al. 2021, section 4.1.2, freeze after a fifth of the steps).

    Args:
        start: `log_alpha` `[heads]` to learn from.
        keep: heads to keep, from none to all; at both ends the gates are constant. None: those that end up open.
        steps: optimizer steps of the run.
        seed: of every step's noise.
        penalty: weight of the expected number of open heads in the loss.
        penalty_warmup: share of the steps over which that weight rises linearly from zero.
        cooldown: share of the steps after which the gates are frozen; 1: never.
        beta: temperature of the concrete distribution.
        gamma, zeta: ends of the interval that it is stretched over, below 0 and above 1.
        gate_learning_rate: peak learning rate of `log_alpha`, decayed linearly to zero at the end of the cooldown.
        gate_max_grad_norm: bound on the norm of its gradient.

    Raises:
        UsageError: one of them is out of its range.
    """

    def __init__(
        self,
        start: Tensor,
        keep: int | None,
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
            start, len(start) if keep is None else keep, steps, seed, gate_learning_rate, gate_max_grad_norm
        )
        self.free = keep is None
        if penalty < 0:
            raise UsageError(f"penalty {penalty}: would reward open heads; give a number from 0 up")
        if beta <= 0:
            raise UsageError(f"beta {beta}: a temperature; give a number above 0")
        if not (gamma < 0 and zeta > 1):
            raise UsageError(f"gamma {gamma}, zeta {zeta}: 0 and 1 must lie between them, e.g. -0.1 and 1.1; mend them")
        self.strength, self.beta, self.gamma, self.zeta = penalty, beta, gamma, zeta
        self.warmup_steps = base.share_of(steps, "penalty_warmup", penalty_warmup)
        self.cooldown_steps = base.share_of(steps, "cooldown", cooldown)

    @abstractmethod
    def draw(self, uniform: Tensor) -> Tensor:
        """Gates `[heads]` for noise `uniform` `[..., heads]`, differentiable in the weights."""

    def concrete(self, uniform: Tensor) -> Tensor:
        """Binary concrete variables in (0, 1) for noise `uniform` `[..., heads]`: Maddison et al. 2017."""
        return torch.sigmoid((torch.logit(uniform) + self.weight) / self.beta)

    def open(self) -> Tensor:
        """Probability `[heads]` that a stretched gate is not closed: Louizos et al. 2018, equation 12."""
        return torch.sigmoid(self.weight - self.beta * math.log(-self.gamma / self.zeta))

    @property
    def choice(self) -> bool:
        return self.free or super().choice

    def harden(self) -> Tensor:
        return self.weight.detach() > 0 if self.free else super().harden()

    def sample(self, step: int) -> Tensor:
        if not self._moves(step):
            return self.fixed()
        uniform = base.noise(self.heads, self.seed, step).clamp(_EDGE, 1.0 - _EDGE)
        return self.draw(uniform.to(self.weight.device))

    def penalty(self, step: int) -> Tensor:
        if not self._moves(step):
            return super().penalty(step)
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return self.strength * warm * self.open().sum()

    def learning_rate_at(self, step: int) -> float:
        return max(0.0, 1.0 - step / max(1, self.cooldown_steps))

    def is_settled(self, step: int) -> bool:
        return step >= self.cooldown_steps

    def counts(self) -> dict[str, float]:
        """`open`: heads of `log_alpha` above zero; `expected`: the number that the penalty weighs."""
        return {"open": float((self.weight > 0).sum()), "expected": self.open().sum().item()}

    def _moves(self, step: int) -> bool:
        return self.choice and not self.is_settled(step)
