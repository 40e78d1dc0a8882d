"""The length of a training, and its optimizer and learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from compressor.config.values import MixedPrecision
from compressor.errors import ErrorCode, UsageError


@dataclass(frozen=True)
class Schedule:
    """The length of a training, and its optimizer and learning rate.

    Attributes:
        steps: training steps.
        batch_size: rows, or parallel streams of text, per step and process.
        learning_rate: peak learning rate of the model, after a linear warm-up.
        seed: seed of the order of rows, of dropout and of the gate's noise.
        warmup: share of the steps over which the learning rate of the model rises linearly from zero.
        weight_decay: weight decay of the model's matrices.
        max_grad_norm: maximum norm of the model's gradient.
        evaluations: evenly spaced evaluations with hard gates; each writes a checkpoint.
        points: evenly spaced points of the training curves.
        mixed_precision: precision of matmuls.
        optimizer: `adamw` or `lamb` (You et al. 2020), which scales the rate of each matrix by its norm, at most 10.
        scheduler: shape of the decrease of the learning rate after the warm-up, `linear` or `cosine`.
        final_learning_rate: learning rate at the last step.

    Raises:
        UsageError: the final learning rate is negative, or above the peak.
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
        if not 0 <= self.final_learning_rate <= self.learning_rate:
            raise UsageError(
                f"final_learning_rate {self.final_learning_rate}: out of range; give a number from 0 to the peak "
                f"learning rate, {self.learning_rate:g}",
                code=ErrorCode.OUT_OF_RANGE,
                field="final_learning_rate",
                value=self.final_learning_rate,
            )

    def pace(self, step: int) -> float:
        """Factor on `learning_rate` at `step`: a linear warm-up from zero, then a decrease to the final rate."""
        warmup_steps = round(self.warmup * self.steps)
        if step < warmup_steps:
            return step / warmup_steps
        remaining = max(0.0, (self.steps - step) / max(1, self.steps - warmup_steps))
        if self.scheduler == "cosine":
            remaining = 0.5 * (1 - math.cos(math.pi * remaining))
        final = self.final_learning_rate / self.learning_rate
        return final + (1 - final) * remaining
