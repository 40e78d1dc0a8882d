"""What joint learning asks of a gate: one number a head, learned together with the model, and a mask at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Gate(nn.Module, ABC):
    """One gate a head, over all heads of a model in (site, head) order.

    Its parameters learn with the model, under their own learning rate. It must be a pure function of them and of the
    step: noise is drawn anew from the run's seed and the step, so that every process of a distributed run draws the
    same, and an interrupted run draws again what it drew before.

    Attributes:
        heads: heads of the whole model.
        steps: optimizer steps of the run.
        learning_rate: peak learning rate of the gate's parameters.
        max_grad_norm: bound on the norm of the gate's own gradient, clipped apart from the model's.
    """

    heads: int
    steps: int
    learning_rate: float
    max_grad_norm: float

    @abstractmethod
    def sample(self, step: int) -> Tensor:
        """Gates `[heads]` of one training step, differentiable in the gate's parameters."""

    @abstractmethod
    def harden(self) -> Tensor:
        """Mask `[heads]`, bool: the heads kept if learning ended now. No noise; exactly as many as asked for."""

    def scale(self) -> Tensor:
        """Gates `[heads]` at evaluation and in the plan: zero where `harden` drops the head."""
        return self.harden().to(torch.float64)

    def penalty(self, step: int) -> Tensor:
        """Scalar added to the task's loss; zero where the gate needs no push towards fewer heads."""
        return torch.zeros((), dtype=torch.float64, device=next(self.parameters()).device)

    def learning_rate_at(self, step: int) -> float:
        """Factor on `learning_rate` at `step`: falls linearly to zero."""
        return max(0.0, 1.0 - step / self.steps)

    def is_settled(self, step: int) -> bool:
        """Whether the choice has settled at `step`, so that a checkpoint of it may be the result."""
        return step >= self.steps

    def readings(self, step: int) -> dict[str, float]:
        """Settings at `step` for the curves, e.g. a temperature; pools share them."""
        return {}

    def counts(self) -> dict[str, float]:
        """Numbers of heads for the curves, e.g. how many gates are open; over pools they add up."""
        return {}
