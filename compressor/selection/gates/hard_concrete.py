"""Hard concrete gates (Voita et al. 2019, after Louizos et al. 2018): gates in [0, 1] with mass at both ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.selection.gates import base
from compressor.selection.gates.concrete import ConcreteGate


class HardConcreteGate(ConcreteGate):
    """Concrete gates stretched over [gamma, zeta] and clipped to [0, 1]; a head that stays is deployed at scale 1.

    The defaults are those with which Li et al. 2021 ran this baseline (penalty, learning rate, seeded small start), but
    for `cooldown`: they adjust the number of heads after training, which is `cooldown=1`.

    Args:
        layers: heads of each site, in site order.
        initial: `log_alpha` of every head at the start, before the small seeded noise that tells them apart.

    The others are `ConcreteGate`'s.
    """

    def __init__(
        self,
        layers: Sequence[int],
        keep: int | None,
        steps: int,
        seed: int,
        *,
        penalty: float = 0.0015,
        penalty_warmup: float = 0.0,
        cooldown: float = 2 / 3,
        initial: float = 0.0,
        beta: float = 0.333,
        gamma: float = -0.1,
        zeta: float = 1.1,
        gate_learning_rate: float = 0.1,
        gate_max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(
            initial + base.initial(layers, seed),
            keep,
            steps,
            seed,
            penalty=penalty,
            penalty_warmup=penalty_warmup,
            cooldown=cooldown,
            beta=beta,
            gamma=gamma,
            zeta=zeta,
            gate_learning_rate=gate_learning_rate,
            gate_max_grad_norm=gate_max_grad_norm,
        )

    def draw(self, uniform: Tensor) -> Tensor:
        stretched = self.concrete(uniform) * (self.zeta - self.gamma) + self.gamma
        return torch.clamp(stretched, 0.0, 1.0)
