"""How many steps a distillation makes in the minutes that it may take."""

from __future__ import annotations

import json
import math
import time
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from compressor.config.run import Recipe
from compressor.errors import ErrorCode, UsageError
from compressor.run.engine_choice.calibrate import draw_rows
from compressor.run.learning_store import LearningStore
from compressor.tasks import Data
from compressor.training.distillation import Distillation
from compressor.training.fake_quantization import fake_quantized
from compressor.training.processes import process_state
from compressor.workdir import write_json

_STEPS = "steps.json"
"""File of the number of steps, where it follows from a time."""
_TIMED_STEPS = 5


def affordable_steps(
    recipe: Recipe, data: Data, distillation: Distillation, network: PreTrainedModel, store: LearningStore
) -> int:
    """The steps of the distillation: as configured, or as many as its minutes allow.

    The time of a step, with and without rounding, is measured once, and the number is stored, so that an
    interrupted run makes as many.

    Args:
        recipe: steps, minutes and quantized share of the distillation, and rows of a step.
        data: the rows.
        distillation: the loss of a step.
        network: the model that is trained.
        store: folder of the number of steps.

    Raises:
        UsageError: the minutes do not suffice for one step.
    """
    options, file, state = recipe.distillation, store.path / _STEPS, process_state()
    if options.minutes is None:
        return options.distill_steps
    if state.is_main_process and not file.is_file():
        seconds = _step_seconds(recipe, data, distillation, network)
        affordable = int(60 * options.minutes / seconds)
        if affordable < 1:
            raise UsageError(
                f"--minutes {options.minutes:g}: one step of the distillation takes {seconds:.2g} s; allow more time,"
                " or fewer rows a step (--batch-size)",
                code=ErrorCode.OUT_OF_RANGE,
                field="minutes",
                value=options.minutes,
            )
        write_json(file, {"steps": min(options.distill_steps, affordable)})
    state.wait_for_everyone()
    return int(json.loads(file.read_text())["steps"])


def _step_seconds(recipe: Recipe, data: Data, distillation: Distillation, network: PreTrainedModel) -> float:
    """Mean seconds of a step over a training, in whose last steps linears round to 8 bits."""
    share = recipe.distillation.quantized_share
    seconds = 0.0
    for rounds, part in ((False, 1 - share), (True, share)):
        if part:
            with fake_quantized(network, partial(bool, rounds)):
                seconds += part * _timed_seconds(recipe, data, distillation, network)
    return seconds


def _timed_seconds(recipe: Recipe, data: Data, distillation: Distillation, network: PreTrainedModel) -> float:
    """Seconds of a step: the mean of a few after one that is not counted. Weights keep their values."""
    rows = draw_rows(data, _TIMED_STEPS * recipe.selection.batch_size, recipe.selection.seed)
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    times = []
    for batch in np.array_split(np.array(rows), min(_TIMED_STEPS, len(rows))):
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
