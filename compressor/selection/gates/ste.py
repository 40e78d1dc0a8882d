"""Straight-through top-K, a baseline of Li, Cotterell, Sachan 2021, section 4.2.3: K heads in every step, no noise."""

from __future__ import annotations

from torch import Tensor

from compressor.selection.gates import base
from compressor.selection.gates.capacity import FixedCount


class StraightThroughOptions(base.GateOptions):
    """Options of `ste`; the learning rate is that of the released code."""


class StraightThroughGate(base.RankedGate):
    """Forward: the hard top-K of the weights; backward: the gradient of the identity.

    The K units of a step are those with which the model would be deployed, so every checkpoint may be the result. The
    selected units can change until the learning rate has decayed.

    Under budgets the identity is projected onto the weights of equal cost, `w - p (p w) / (p p)` with the prices p:
    otherwise a weight would rise whatever its unit takes from the budget. See `RankedGate` for the arguments.
    """

    options_class = StraightThroughOptions

    def sample(self, step: int) -> Tensor:
        if isinstance(self.capacity, FixedCount) or not self.has_choice:
            return base.straight_through(self.scale(), self.weight)
        prices = self.capacity.prices.to(self.weight.device)
        projected = self.weight - prices * (prices @ self.weight) / (prices @ prices)
        return base.straight_through(self.scale(), projected)

    def is_settled(self, step: int) -> bool:
        return True
