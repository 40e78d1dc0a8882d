"""Straight-through top-K, a baseline of Li, Cotterell, Sachan 2021, section 4.2.3: K heads in every step, no noise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compressor.selection.gates import base
from compressor.selection.gates.capacity import FixedCount
from compressor.selection.options import MethodOptions


class StraightThroughOptions(MethodOptions):
    """Options of `ste`; the learning rate is that of the released code."""

    gate_learning_rate: base.GateLearningRate = 0.5
    gate_max_grad_norm: base.GateMaxGradNorm = 1.0


class StraightThroughGate(base.RankedGate):
    """Forward: the hard top-K of the weights; backward: the gradient of the identity.

    The K units of a step are those with which the model would be deployed, so every checkpoint may be the result. The
    selected units can change until the learning rate has decayed.

    Under budgets the identity is projected onto the weights of equal cost, `w - p (p w) / (p p)` with the prices p:
    otherwise a weight would rise whatever its unit takes from the budget.

    Args:
        layers: units of each group, in order.
        keep: number of units to keep, from none to all, or budgets.
        steps: optimizer steps of the run.
        seed: seed of the initial weights.
        options: learning rate, which decays linearly to zero.

    Raises:
        UsageError: `keep` is out of range.
    """

    options_class = StraightThroughOptions

    def __init__(
        self,
        layers: Sequence[int],
        keep: base.Keep,
        steps: int,
        seed: int,
        options: StraightThroughOptions | None = None,
    ) -> None:
        options = options or StraightThroughOptions()
        super().__init__(
            base.initial(layers, seed),
            keep,
            steps,
            seed,
            learning_rate=options.gate_learning_rate,
            max_grad_norm=options.gate_max_grad_norm,
        )

    def sample(self, step: int) -> Tensor:
        if isinstance(self.capacity, FixedCount) or not self.has_choice:
            return base.straight_through(self.scale(), self.weight)
        prices = self.capacity.prices.to(self.weight.device)
        projected = self.weight - prices * (prices @ self.weight) / (prices @ prices)
        return base.straight_through(self.scale(), projected)

    def is_settled(self, step: int) -> bool:
        return True
