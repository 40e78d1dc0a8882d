"""Straight-through top-K, a baseline of Li, Cotterell, Sachan 2021, section 4.2.3: K heads at every step, no noise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compressor.selection.gates import base


class StraightThroughGate(base.RankedGate):
    """Forward the hard top-K of the weights, backward as if that were the identity.

    The K heads of a step are those that it would be deployed with, so every checkpoint may be the result. Which K they
    are can change until the learning rate has decayed.

    Args:
        layers: heads of each site, in site order.
        keep: heads to keep, from none to all.
        steps: optimizer steps of the run.
        seed: of the start.
        gate_learning_rate: peak learning rate of the head weights (0.5 in the released code), decayed linearly to zero.
        gate_max_grad_norm: bound on the norm of the weights' gradient.

    Raises:
        UsageError: an option out of its range.
    """

    def __init__(
        self,
        layers: Sequence[int],
        keep: int,
        steps: int,
        seed: int,
        *,
        gate_learning_rate: float = 0.5,
        gate_max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(base.initial(layers, seed), keep, steps, seed, gate_learning_rate, gate_max_grad_norm)

    def sample(self, step: int) -> Tensor:
        return base.straight_through(self.scale(), self.weight)

    def is_settled(self, step: int) -> bool:
        return True
