"""Hard concrete gates (Voita et al. 2019, after Louizos et al. 2018): gates in [0, 1] with mass at both ends."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from compressor.selection.gates import concrete


class HardConcreteOptions(concrete.ConcreteOptions):
    """Options of `hard-concrete`.

    The defaults are those of Li et al. 2021 for this baseline (penalty, learning rate, small seeded initial weights),
    except for `cooldown`: they adjust the number of heads after training, which corresponds to `cooldown=1`.
    """

    penalty: concrete.Penalty = 0.0015
    penalty_warmup: concrete.PenaltyWarmup = 0.0
    cooldown: concrete.Cooldown = 2 / 3
    initial: concrete.Initial = 0.0
    gamma: float = Field(-0.1, lt=0, description="lower end of the interval that gates are stretched over")
    zeta: float = Field(1.1, gt=1, description="upper end of that interval")


class HardConcreteGate(concrete.ConcreteGate):
    """Concrete gates stretched over [gamma, zeta] and clipped to [0, 1]; a kept unit is deployed at scale 1.

    Small seeded noise on the initial weights breaks ties. See `ConcreteGate` for the arguments.
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
