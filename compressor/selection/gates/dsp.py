"""Differentiable subset pruning (Li, Cotterell, Sachan 2021): a relaxed sample of K heads that is annealed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from compressor.config.fields import FieldConflictError
from compressor.errors import ErrorCode
from compressor.selection.gates import base
from compressor.selection.gates.capacity import FixedCount
from compressor.selection.options import StepShare

_TINY = torch.finfo(torch.float64).tiny


class DspOptions(base.GateOptions):
    """Options of `dsp` and `dsp-pipelined`.

    The defaults are the paper's for BERT, and for translation those for its encoder-decoder (table 2 and the released
    code). The table states them for joint pruning; the pipelined variant shares them.
    """

    task_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "translation": {"tau_ini": 0.1, "gate_learning_rate": 0.2, "gate_schedule": "constant"}
    }
    tau_ini: float = Field(1000.0, description="first temperature")
    tau_end: float = Field(1e-8, gt=0, description="last temperature")
    cooldown: StepShare = Field(
        2 / 3, description="share of the steps in which the temperature falls, linearly in its logarithm"
    )
    gate_schedule: Literal["linear", "constant"] = Field(
        "linear", description="whether the learning rate of the gate falls linearly to zero or stays"
    )

    @model_validator(mode="after")
    def _temperature_falls(self) -> Self:
        if self.tau_end > self.tau_ini:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<tau_ini> {self.tau_ini:g}, <tau_end> {self.tau_end:g}: the temperature cannot rise; choose a"
                " smaller tau_end",
                *("tau_ini", "tau_end"),
            )
        return self


class DspGate(base.RankedGate):
    """Gumbel soft top-K over the units of the whole model, in float64 throughout.

    Under budgets, a relaxed knapsack takes the place of the soft top-K; see `UnitBudget` for the difference. Cooldown
    and learning rate are relative to the number of steps.
    """

    options_class = DspOptions
    options: DspOptions

    @property
    def cooldown_steps(self) -> int:
        """Number of steps in which the temperature falls."""
        return round(self.options.cooldown * self.steps)

    def temperature(self, step: int) -> float:
        """Temperature at `step`: log-linear from `tau_ini` at step 0 to `tau_end` at the end of the cooldown."""
        first, last = self.options.tau_ini, self.options.tau_end
        if step >= self.cooldown_steps:
            return last
        return first * (last / first) ** (step / self.cooldown_steps)

    def sample(self, step: int) -> Tensor:
        if not self.has_choice:
            return self.fixed()
        uniform = base.noise(self.units, self.seed, step).to(self.weight.device)
        gumbel = -torch.log(-torch.log(torch.clamp(uniform, min=_TINY)))
        return self.capacity.soft_select(self.weight + gumbel, self.temperature(step))

    def is_settled(self, step: int) -> bool:
        return not self.has_choice or step >= self.cooldown_steps

    def learning_rate_at(self, step: int) -> float:
        return 1.0 if self.options.gate_schedule == "constant" else super().learning_rate_at(step)

    def readings(self, step: int) -> dict[str, float]:
        return {"temperature": self.temperature(step)}


class StraightThroughGate(base.RankedGate):
    """Straight-through top-K, a baseline of the same paper (section 4.2.3): K units in every step, without noise.

    Forward: the hard top-K of the weights; backward: the gradient of the identity. The K units of a step are those with
    which the model would be deployed, so every checkpoint may be the result.

    Under budgets the identity is projected onto the weights of equal cost, `w - p (p w) / (p p)` with the prices p:
    otherwise a weight would rise whatever its unit takes from the budget.
    """

    options_class = base.GateOptions

    def sample(self, step: int) -> Tensor:
        if isinstance(self.capacity, FixedCount) or not self.has_choice:
            return base.straight_through(self.scale(), self.weight)
        prices = self.capacity.prices.to(self.weight.device)
        projected = self.weight - prices * (prices @ self.weight) / (prices @ prices)
        return base.straight_through(self.scale(), projected)

    def is_settled(self, step: int) -> bool:
        return True
