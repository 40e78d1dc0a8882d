"""The interface of a gate: one learned multiplier per unit, trained together with the model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Gate(nn.Module, ABC):
    """One multiplier per unit, over the units of a model in (group, unit) order.

    A unit is a head, or a bundle of heads or neurons that are kept or dropped together (`compressor.units.Bundles`).

    Its parameters are trained with the model, at their own learning rate. Every output is a pure function of the
    parameters and the step: noise is drawn from a generator seeded by the run's seed and the step, so all processes
    of a distributed run draw the same noise, and a resumed run repeats the draws of the interrupted one.

    Attributes:
        units: number of units.
        steps: training steps of the run.
        learning_rate: peak learning rate of the gate's parameters.
        max_grad_norm: maximum norm of the gate's gradient, which is clipped separately from the model's.
    """

    units: int
    steps: int
    learning_rate: float
    max_grad_norm: float

    @abstractmethod
    def sample(self, step: int) -> Tensor:
        """Gates `[units]` of one training step, differentiable in the gate's parameters."""

    @abstractmethod
    def harden(self) -> Tensor:
        """Boolean mask `[units]` of the units that are kept if training ends now, without noise.

        A gate with a number of units keeps exactly that many; one with budgets never exceeds them.
        """

    def scale(self) -> Tensor:
        """Gates `[units]` in evaluation and in the plan; zero for the units that `harden` drops."""
        return self.harden().to(torch.float64)

    def penalty(self, step: int) -> Tensor:
        """Scalar added to the loss of the task; zero for a gate that needs no pressure towards fewer units."""
        return torch.zeros((), dtype=torch.float64, device=next(self.parameters()).device)

    def learning_rate_at(self, step: int) -> float:
        """Factor on `learning_rate` at `step`; decreases linearly to zero."""
        return max(0.0, 1.0 - step / self.steps)

    def is_settled(self, step: int) -> bool:
        """Whether the selected units no longer depend on annealing at `step`, so a checkpoint may be the result."""
        return step >= self.steps

    def readings(self, step: int) -> dict[str, float]:
        """Values for the training curves that are common to all pools of a gate, e.g. the temperature at `step`."""
        return {}

    def counts(self) -> dict[str, float]:
        """Values for the training curves that are summed over pools, e.g. the number of open gates."""
        return {}
