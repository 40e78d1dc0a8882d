"""BinConcrete gates of all-attention head pruning (Shim et al. 2021, section 3.2): 0 or 1 at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.selection.gates import base
from compressor.selection.gates.concrete import ConcreteGate


class BinConcreteGate(ConcreteGate):
    """Concrete gates rounded to 0 or 1, with the gradient of what was rounded.

    The defaults are the paper's, as shares of its 80K steps: a penalty between 0.01 and 0.02 that rises over the first
    4K, gates frozen after 16K, `pi` started at 2, which opens a head with probability 0.8808. Its three techniques
    (section 3.3) can be left out: `penalty_warmup=0`, `initial=0`, `output_scaling=False`.

    Args:
        layers: heads of each site, in site order.
        initial: `pi` of every head at the start.
        output_scaling: what is open in a site stands in for what is closed there, see `scaled`.

    The others are `ConcreteGate`'s, with `pi` for `log_alpha`. The penalty weighs the stretched gate's probability.
    """

    def __init__(
        self,
        layers: Sequence[int],
        keep: int | None,
        steps: int,
        seed: int,
        *,
        penalty: float = 0.015,
        penalty_warmup: float = 0.05,
        cooldown: float = 0.2,
        initial: float = 2.0,
        output_scaling: bool = True,
        beta: float = 0.333,
        gate_learning_rate: float = 0.1,
        gate_max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(
            torch.full((sum(layers),), initial, dtype=torch.float64),
            keep,
            steps,
            seed,
            penalty=penalty,
            penalty_warmup=penalty_warmup,
            cooldown=cooldown,
            beta=beta,
            gamma=-0.1,
            zeta=1.1,
            gate_learning_rate=gate_learning_rate,
            gate_max_grad_norm=gate_max_grad_norm,
        )
        self.layers, self.output_scaling = tuple(layers), output_scaling

    def draw(self, uniform: Tensor) -> Tensor:
        soft = self.concrete(uniform)
        return self._scaled(base.straight_through((soft > 0.5).to(soft.dtype), soft))

    def scale(self) -> Tensor:
        return self._scaled(super().scale())

    def _scaled(self, gates: Tensor) -> Tensor:
        return scaled(gates, self.layers) if self.output_scaling else gates


def scaled(gates: Tensor, layers: Sequence[int]) -> Tensor:
    """Gates `[..., heads]` times their site's `s_g = min(H, H / sum g)`, of H heads (equation 3); H if all are closed.

    It is a factor on the sum of the site's outputs, before the output projection's bias, and so folds into that
    projection.
    """
    parts = gates.split(list(layers), dim=-1)
    return torch.cat([part * part.shape[-1] / part.sum(-1, keepdim=True).clamp(min=1.0) for part in parts], dim=-1)
