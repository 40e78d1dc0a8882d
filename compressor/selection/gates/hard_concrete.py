"""Hard concrete gates (Voita et al. 2019, after Louizos et al. 2018): gates in [0, 1] with mass at both ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from compressor.selection.gates import base, concrete
from compressor.selection.options import MethodOptions


class HardConcreteOptions(MethodOptions):
    """Options of `hard-concrete`.

    The defaults are those of Li et al. 2021 for this baseline (penalty, learning rate, small seeded initial weights),
    except for `cooldown`: they adjust the number of heads after training, which corresponds to `cooldown=1`.
    """

    penalty: concrete.Penalty = 0.0015
    penalty_warmup: concrete.PenaltyWarmup = 0.0
    cooldown: concrete.Cooldown = 2 / 3
    initial: concrete.Initial = 0.0
    beta: concrete.Beta = 0.333
    gamma: float = Field(-0.1, lt=0, description="lower end of the interval that gates are stretched over")
    zeta: float = Field(1.1, gt=1, description="upper end of that interval")
    gate_learning_rate: base.GateLearningRate = 0.1
    gate_max_grad_norm: base.GateMaxGradNorm = 1.0


class HardConcreteGate(concrete.ConcreteGate):
    """Concrete gates stretched over [gamma, zeta] and clipped to [0, 1]; a kept unit is deployed at scale 1.

    Args:
        layers: units of each group, in order.
        keep: number of units to keep, from none to all, or budgets; None: keep those that end up open.
        steps: optimizer steps of the run.
        seed: seed of the noise of every step, and of the small noise on the initial weights that breaks ties.
        options: penalty, distribution and learning rate.

    Raises:
        UsageError: `keep` is out of range.
    """

    options_class = HardConcreteOptions

    def __init__(
        self,
        layers: Sequence[int],
        keep: base.Keep | None,
        steps: int,
        seed: int,
        options: HardConcreteOptions | None = None,
    ) -> None:
        options = options or HardConcreteOptions()
        start = options.initial + base.initial(layers, seed)
        super().__init__(start, keep, steps, seed, **options.model_dump(exclude={"initial"}))

    def draw(self, uniform: Tensor) -> Tensor:
        stretched = self.concrete(uniform) * (self.zeta - self.gamma) + self.gamma
        return torch.clamp(stretched, 0.0, 1.0)
