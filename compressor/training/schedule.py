"""How long and how fast a run trains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from compressor.errors import UsageError

MixedPrecision = Literal["no", "bf16"]
"""What matrices are multiplied in, weights staying float32: float32, or bfloat16."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a run trains.

    Attributes:
        steps: optimizer steps.
        batch_size: rows, or streams side by side, a step and process.
        learning_rate: the model's peak learning rate, after a linear warm-up.
        seed: of the rows' order, of dropout and of the gate's noise.
        warmup: share of the steps over which the model's learning rate rises.
        weight_decay: the optimizer's, on the model's matrices.
        max_grad_norm: bound on the norm of the model's gradient.
        evaluations: evaluations over the run, evenly spaced, with hard gates; a checkpoint goes with each.
        points: points of the curves, evenly spaced.
        mixed_precision: what matrices are multiplied in.
        optimizer: `adamw`, or `lamb` (You et al. 2020), whose rate each matrix scales by its own norm, up to 10.
        scheduler: how the rate falls after the warm-up, `linear` or `cosine`.
        final_learning_rate: where it ends.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    warmup: float
    weight_decay: float
    max_grad_norm: float
    evaluations: int
    points: int
    mixed_precision: MixedPrecision
    optimizer: Literal["adamw", "lamb"] = "adamw"
    scheduler: Literal["linear", "cosine"] = "linear"
    final_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup <= 1:
            raise UsageError(f"warmup {self.warmup}: a share of the steps; give a number from 0 to 1")
        if self.weight_decay < 0 or self.max_grad_norm <= 0:
            raise UsageError(
                f"weight_decay {self.weight_decay}, max_grad_norm {self.max_grad_norm}: one must be at least 0 and the"
                " other above it; raise them"
            )
        if self.evaluations < 1 or self.points < 1:
            raise UsageError(f"evaluations {self.evaluations}, points {self.points}: give 1 or more of each")
        if not 0 <= self.final_learning_rate <= self.learning_rate:
            raise UsageError(
                f"final_learning_rate {self.final_learning_rate}: the rate falls to it from {self.learning_rate}; give"
                " a number from 0 to that"
            )

    def pace(self, step: int) -> float:
        """Factor on `learning_rate` at `step`: a linear warm-up from zero, then down to the final rate."""
        rise = round(self.warmup * self.steps)
        if step < rise:
            return step / rise
        left = max(0.0, (self.steps - step) / max(1, self.steps - rise))
        if self.scheduler == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        final = self.final_learning_rate / self.learning_rate
        return final + (1 - final) * left
