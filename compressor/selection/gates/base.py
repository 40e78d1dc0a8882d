"""What the gates share: weights that rank heads, noise, and straight-through gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compressor.errors import UsageError
from compressor.units.gate import Gate


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
