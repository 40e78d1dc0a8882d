"""What joint learning asks of a gate: one number a head, learned together with the model, and a mask at the end."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compressor.errors import UsageError


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

    def cold(self, step: int) -> bool:
        """Whether the choice has settled at `step`, so that a checkpoint of it may be the result."""
        return step >= self.steps

    def readings(self, step: int) -> dict[str, float]:
        """Settings at `step` for the curves, e.g. a temperature; pools share them."""
        return {}

    def counts(self) -> dict[str, float]:
        """Numbers of heads for the curves, e.g. how many gates are open; over pools they add up."""
        return {}


class RankedGate(Gate):
    """A gate with one weight a head: the heads of largest weight stay, ties in (site, head) order.

    Args:
        start: weights `[heads]` to learn from.
        keep: heads to keep, from none to all; at both ends there is no choice to learn.
        steps: optimizer steps of the run.
        seed: of every step's noise.
        gate_learning_rate: peak learning rate of the weights.
        gate_max_grad_norm: bound on the norm of the weights' gradient.

    Raises:
        UsageError: one of them is out of its range.
    """

    def __init__(
        self, start: Tensor, keep: int, steps: int, seed: int, gate_learning_rate: float, gate_max_grad_norm: float
    ) -> None:
        super().__init__()
        self.heads = len(start)
        if not 0 <= keep <= self.heads:
            raise UsageError(f"keep {keep}: the model has {self.heads} heads; give a number from 0 to {self.heads}")
        if gate_learning_rate <= 0 or gate_max_grad_norm <= 0:
            raise UsageError(
                f"gate_learning_rate {gate_learning_rate}, gate_max_grad_norm {gate_max_grad_norm}: must be above 0;"
                " raise them"
            )
        self.keep, self.steps, self.seed = keep, steps, seed
        self.learning_rate, self.max_grad_norm = gate_learning_rate, gate_max_grad_norm
        self.weight = parameter(start)

    @property
    def choice(self) -> bool:
        """Whether there is more than one subset of this size."""
        return 0 < self.keep < self.heads

    def harden(self) -> Tensor:
        return top(self.weight, self.keep)

    def fixed(self) -> Tensor:
        """The gates of `scale`, for training. Their zero gradient keeps the weights in the graph, as distributed
        training expects of each parameter."""
        return self.scale() + 0.0 * self.weight


def top(weights: Tensor, keep: int) -> Tensor:
    """Mask `[heads]` of the `keep` largest of `weights` `[heads]`, exactly so many: ties go to the lower index."""
    order = torch.argsort(weights.detach(), descending=True, stable=True)
    mask = torch.zeros(weights.shape, dtype=torch.bool, device=weights.device)
    mask[order[:keep]] = True
    return mask


def initial(layers: Sequence[int], seed: int) -> Tensor:
    """Small seeded noise `[heads]`, float64, for gates over `layers` (heads of each site).

    Xavier-uniform over [layers, heads] as in the released code of differentiable subset pruning.
    """
    bound = math.sqrt(6.0 / (len(layers) + max(layers)))
    noise = torch.rand(sum(layers), dtype=torch.float64, generator=torch.Generator().manual_seed(seed % 2**63))
    return (2.0 * noise - 1.0) * bound


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of `hard` with the gradient of `soft`."""
    return hard + (soft - soft.detach())


def share_of(steps: int, name: str, share: float) -> int:
    """The `share` of `steps`, in steps.

    Raises:
        UsageError: not from 0 to 1; `name` is the option's.
    """
    if not 0 <= share <= 1:
        raise UsageError(f"{name} {share}: a share of the steps; give a number from 0 to 1")
    return round(share * steps)


def noise(heads: int, seed: int, step: int) -> Tensor:
    """Uniform noise `[heads]` in [0, 1), float64, a function of the run's seed and the step alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step + 1) % 2**63)
    return torch.rand(heads, dtype=torch.float64, generator=generator)


def parameter(values: Tensor) -> nn.Parameter:
    """A learnable copy of `values` that keeps float64 when the model around it is moved or saved."""
    return nn.Parameter(values.clone().to(torch.float64))
