"""Base of the gates: a weight per head that ranks the heads, noise, and straight-through gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from compressor.errors import ErrorCode, UsageError
from compressor.selection.options import MethodOptions
from compressor.units.gate import Gate

GateLearningRate = Annotated[float, Field(gt=0, description="peak learning rate of the gate's weights")]
GateMaxGradNorm = Annotated[float, Field(gt=0, description="maximum norm of the gradient of the gate's weights")]


class RankedGate(Gate):
    """A gate with one weight per head: the heads of largest weight are kept, ties in (site, head) order.

    A registered gate derives from this class. Its arguments are `(layers, keep, steps, seed, options)`: heads of each
    site in site order, heads to keep, optimizer steps of the run, its seed, and an instance of `options_class`.

    Args:
        start: initial weights `[heads]`.
        keep: heads to keep, from none to all; at both ends there is no choice to learn.
        steps: optimizer steps of the run.
        seed: seed of the noise of every step.
        learning_rate: peak learning rate of the weights.
        max_grad_norm: maximum norm of the weights' gradient.

    Raises:
        UsageError: `keep` is out of range.
    """

    options_class: ClassVar[type[MethodOptions]]

    def __init__(
        self, start: Tensor, keep: int, steps: int, seed: int, *, learning_rate: float, max_grad_norm: float
    ) -> None:
        super().__init__()
        self.heads = len(start)
        if not 0 <= keep <= self.heads:
            raise UsageError(
                f"keep {keep}: the model has {self.heads} heads; choose a number from 0 to {self.heads}",
                code=ErrorCode.OUT_OF_RANGE,
                field="keep",
                value=keep,
                maximum=self.heads,
            )
        self.keep, self.steps, self.seed = keep, steps, seed
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        self.weight = parameter(start)

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one subset of this size."""
        return 0 < self.keep < self.heads

    def harden(self) -> Tensor:
        return top(self.weight, self.keep)

    def fixed(self) -> Tensor:
        """The gates of `scale` with a zero gradient: distributed training expects every parameter in the graph."""
        return self.scale() + 0.0 * self.weight


def top(weights: Tensor, keep: int) -> Tensor:
    """Mask `[heads]` of the `keep` largest of `weights` `[heads]`; the lower index wins a tie."""
    order = torch.argsort(weights.detach(), descending=True, stable=True)
    mask = torch.zeros(weights.shape, dtype=torch.bool, device=weights.device)
    mask[order[:keep]] = True
    return mask


def initial(layers: Sequence[int], seed: int) -> Tensor:
    """Small seeded noise `[heads]`, float64, for gates over `layers` (heads of each site).

    Xavier-uniform over [layers, heads] as in the released code of differentiable subset pruning.
    """
    bound = math.sqrt(6.0 / (len(layers) + max(layers)))
    uniform = torch.rand(sum(layers), dtype=torch.float64, generator=torch.Generator().manual_seed(seed % 2**63))
    return (2.0 * uniform - 1.0) * bound


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of `hard` with the gradient of `soft`."""
    return hard + (soft - soft.detach())


def noise(heads: int, seed: int, step: int) -> Tensor:
    """Uniform noise `[heads]` in [0, 1), float64: a function of the run's seed and the step."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step + 1) % 2**63)
    return torch.rand(heads, dtype=torch.float64, generator=generator)


def parameter(values: Tensor) -> nn.Parameter:
    """A learnable copy of `values` that stays float64 when the model around it is moved or saved."""
    return nn.Parameter(values.clone().to(torch.float64))
