"""BinConcrete gates of all-attention head pruning (Shim et al. 2021, section 3.2): 0 or 1 in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from compressor.selection.gates import base, concrete


class BinConcreteOptions(concrete.ConcreteOptions):
    """Options of `bin-concrete`.

    The defaults are the paper's, with steps as shares of its 80K: a penalty between 0.01 and 0.02 that rises over the
    first 4K steps, gates that are frozen after 16K steps, and weights (`pi`) that start at 2, so that a unit is open
    with probability 0.8808. The three techniques of section 3.3 can be switched off: `penalty_warmup=0`, `initial=0`,
    `output_scaling=False`.
    """

    penalty: concrete.Penalty = 0.015
    penalty_warmup: concrete.PenaltyWarmup = 0.05
    cooldown: concrete.Cooldown = 0.2
    initial: concrete.Initial = 2.0
    output_scaling: bool = Field(True, description="scale the open units of a group up to make up for its closed ones")


class BinConcreteGate(concrete.ConcreteGate):
    """Concrete gates rounded to 0 or 1, with the gradient of the values before rounding.

    See `ConcreteGate` for the arguments.
    """

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
