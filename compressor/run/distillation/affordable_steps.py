"""How many steps and evaluations a distillation makes in the minutes that it may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from compressor.config.steps import Distill
from compressor.errors import ErrorCode, UsageError
from compressor.selection.options import ScheduleOptions
from compressor.store import Json, Store
from compressor.tasks import Data
from compressor.tasks.calibration import draw_rows
from compressor.training.distillation import Distillation
from compressor.training.fake_quantization import fake_quantized

_TIMED_STEPS = 5
_EVALUATIONS = ScheduleOptions().evaluations
_EVALUATED_SHARE = 0.2
"""Share of the minutes that evaluations take at most; where they would take more, fewer are made."""


@dataclass(frozen=True)
class TrainingLength:
    """The length of a training.

    Attributes:
        steps: number of steps.
        evaluations: number of evaluations, each of which writes a checkpoint.
    """

    steps: int
    evaluations: int = _EVALUATIONS


def affordable_length(
    step: Distill,
    data: Data,
    distillation: Distillation,
    network: PreTrainedModel,
    store: Store,
    evaluate: Callable[[], object],
) -> TrainingLength:
    """The length of the distillation: as configured, or as many steps as its minutes allow beside the evaluations.

    The times of an evaluation and of a step, with and without rounding, are measured once, and the length is stored,
    so that an interrupted run makes as many.

    Args:
        step: steps, minutes and quantized share of the distillation, and rows of a step.
        data: the rows.
        distillation: the loss of a step.
        network: the model that is trained.
        store: keeps the length, where it follows from a time.
        evaluate: compares the model with its teacher, which has evaluated these rows before.

    Raises:
        UsageError: the minutes do not suffice for one step and one evaluation.
    """
    minutes = step.minutes
    if minutes is None:
        return TrainingLength(step.training_steps)

    def measure(_: Path) -> TrainingLength:
        available, seconds = 60 * minutes, _step_seconds(step, data, distillation, network)
        start = time.perf_counter()
        evaluate()
        evaluation_seconds = time.perf_counter() - start
        # At least one, and no more than leave time for a step.
        times = (_EVALUATED_SHARE * available, available - seconds)
        evaluations = max(1, min(_EVALUATIONS, *(int(time_left / evaluation_seconds) for time_left in times)))
        affordable = int((available - evaluations * evaluation_seconds) / seconds)
        if affordable < 1:
            raise UsageError(
                f"--minutes {minutes:g}: one step of the distillation takes {seconds:.2g} s and an evaluation"
                f" {evaluation_seconds:.2g} s; allow more time, or fewer rows a step (--batch-size)",
                code=ErrorCode.OUT_OF_RANGE,
                field="minutes",
                value=minutes,
            )
        return TrainingLength(min(step.training_steps, affordable), evaluations)

    return store.memo("length", {}, measure, Json(TrainingLength), by_main=True)


def _step_seconds(step: Distill, data: Data, distillation: Distillation, network: PreTrainedModel) -> float:
    """Mean seconds of a step over a training, in whose last steps linears round to 8 bits."""
    share = step.quantized_share
    seconds = 0.0
    for rounds, part in ((False, 1 - share), (True, share)):
        if part:
            with fake_quantized(network, partial(bool, rounds)):
                seconds += part * _timed_seconds(step, data, distillation, network)
    return seconds


def _timed_seconds(step: Distill, data: Data, distillation: Distillation, network: PreTrainedModel) -> float:
    """Mean seconds of a few training steps, after a first one for warm-up. Weights keep their values."""
    rows = draw_rows(data, _TIMED_STEPS * step.batch_size, step.seed)
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    times = []
    # Steps of a training are of full batches, of repeated rows where there are few.
    for batch in np.resize(rows, (_TIMED_STEPS, step.batch_size)):
        start = time.perf_counter()
        inputs = data.task.model_inputs(data.task.collate([data.train[int(row)] for row in batch]))
        loss = distillation.loss(network, inputs)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, math.inf)
        if torch.isfinite(norm):  # else a step makes weights NaN, even at a rate of zero
            optimizer.step()
        optimizer.zero_grad()
        loss.item()  # a GPU computes on after the call
        times.append(time.perf_counter() - start)
    return float(np.mean(times[1:] or times))
