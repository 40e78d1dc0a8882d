"""Differentiable subset pruning (Li, Cotterell, Sachan 2021): a relaxed draw of K heads, cooled until it is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from compressor.errors import UsageError
from compressor.selection.gates import base

_TINY = torch.finfo(torch.float64).tiny


def soft_top(weights: Tensor, keep: int, temperature: float) -> Tensor:
    """The relaxed K-hot vector `[heads]` of (perturbed) `weights` `[heads]`: equations 14 to 18 of the paper.

    The entries sum to `keep` exactly; a single one can exceed 1 while the temperature is above zero. The update of
    the weights is not divided by the temperature, as in the released code.
    """
    gates = torch.zeros_like(weights)
    for _ in range(keep):
        share = torch.softmax(weights / temperature, dim=-1)
        gates = gates + share
        weights = weights + torch.log(torch.clamp(1.0 - share, min=_TINY))
    return gates


class DspGate(base.RankedGate):
    """Gumbel soft top-K over the heads of the whole model, in float64 throughout.

    Args:
        layers: heads of each site, in site order.
        keep: heads to keep, from none to all; at both ends there is no choice to learn and the gates are constant.
        steps: optimizer steps of the run; cooldown and learning rate follow them.
        seed: seeds the start and every step's noise.
        tau_ini, tau_end: first and last temperature (the paper's BERT values).
        cooldown: share of the steps over which the temperature falls, log-linearly.
        gate_learning_rate: peak learning rate of the head weights.
        gate_schedule: `linear`: decayed to zero; `constant`: held, as the paper does for translation, with tau_ini 0.1
            and gate_learning_rate 0.2.
        gate_max_grad_norm: bound on the norm of the weights' gradient, which reaches 1/(4 tau) near a tie.

    Raises:
        UsageError: an option out of its range.
    """

    def __init__(
        self,
        layers: Sequence[int],
        keep: int,
        steps: int,
        seed: int,
        *,
        tau_ini: float = 1000.0,
        tau_end: float = 1e-8,
        cooldown: float = 2 / 3,
        gate_learning_rate: float = 0.5,
        gate_schedule: Literal["linear", "constant"] = "linear",
        gate_max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(base.initial(layers, seed), keep, steps, seed, gate_learning_rate, gate_max_grad_norm)
        if not 0 < tau_end <= tau_ini:
            raise UsageError(f"tau_ini {tau_ini}, tau_end {tau_end}: temperatures fall and stay above 0; mend them")
        self.tau_ini, self.tau_end, self.gate_schedule = tau_ini, tau_end, gate_schedule
        self.cooldown_steps = base.share_of(steps, "cooldown", cooldown)

    def temperature(self, step: int) -> float:
        """Temperature at `step`: log-linear from `tau_ini` at step 0 to `tau_end` at the end of the cooldown."""
        if step >= self.cooldown_steps:
            return self.tau_end
        return self.tau_ini * (self.tau_end / self.tau_ini) ** (step / self.cooldown_steps)

    def sample(self, step: int) -> Tensor:
        if not self.choice:
            return self.fixed()
        uniform = base.noise(self.heads, self.seed, step).to(self.weight.device)
        gumbel = -torch.log(-torch.log(torch.clamp(uniform, min=_TINY)))
        return soft_top(self.weight + gumbel, self.keep, self.temperature(step))

    def is_settled(self, step: int) -> bool:
        return not self.choice or step >= self.cooldown_steps

    def learning_rate_at(self, step: int) -> float:
        return 1.0 if self.gate_schedule == "constant" else super().learning_rate_at(step)

    def readings(self, step: int) -> dict[str, float]:
        return {"temperature": self.temperature(step)}
