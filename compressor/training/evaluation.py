"""The metric of an evaluation during training, and whether its checkpoint may be the result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction

from compressor.tasks.base import Task
from compressor.training.arguments import SELECTION_METRIC
from compressor.training.callbacks import StepCounter, diverged
from compressor.units.gate import Gate

DIVERGENCE = "divergence"
"""Name of the mean divergence from a teacher in the metrics of an evaluation."""


class Evaluation:
    """Computes the metric of a task from the outputs of a model.

    Args:
        model: its weights are checked before a checkpoint is written.
        task: its metric selects the best checkpoint.
        gate: no checkpoint is eligible before the gate has settled; None: there is no gate.
        counter: the current step.
        steps: training steps of the run.
        by_divergence: whether the divergence from a teacher, the last output of each example, selects the checkpoint.
            It varies less from example to example than a metric does, so that few rows suffice.
        first_step: no checkpoint is eligible before this step.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        gate: Gate | None,
        counter: StepCounter,
        steps: int,
        *,
        by_divergence: bool = False,
        first_step: int = 0,
    ) -> None:
        self._model, self._task, self._gate, self._counter, self._steps = model, task, gate, counter, steps
        self._by_divergence, self._first_step = by_divergence, first_step

    def row_statistics(self, outputs: Any, labels: Tensor) -> Tensor:
        """Statistics `[batch, k]` of one batch. They replace its logits: those of all rows may not fit in memory.

        Args:
            outputs: the model's outputs, a tuple or a single one.
            labels: labels of the batch, `[batch, ...]`.
        """
        task = self._task
        by_name = dict(zip(task.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=False))
        statistics = task.per_example(task.logits(by_name), labels.cpu().numpy())
        if self._by_divergence:
            statistics = np.concatenate([statistics, outputs[-1].cpu().numpy()], axis=1)
        return torch.from_numpy(statistics).to(labels.device)

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """The metric by name, and the number that selects the best checkpoint.

        Raises:
            DivergedError: a weight or the metric is not finite. The error comes before the checkpoint is written, which
                would otherwise count as a good one.
        """
        step, statistics = self._counter.step, np.asarray(prediction.predictions)
        for name, weight in self._model.named_parameters():
            finite = torch.isfinite(weight)
            if not finite.all():
                raise diverged(step, f"weight {name}", float(weight.detach()[~finite][0]))
        divergence = None
        if self._by_divergence:
            statistics, divergence = statistics[:, :-1], float(statistics[:, -1].mean())
        metric = self._task.score(statistics) if np.isfinite(statistics).all() else math.nan
        if not math.isfinite(metric):
            raise diverged(step, self._task.metric, metric)
        selection = metric if self._task.higher_is_better else -metric
        values = {self._task.metric: metric}
        if divergence is not None:
            selection, values = -divergence, {**values, DIVERGENCE: divergence}
        return {**values, SELECTION_METRIC: selection if self._is_eligible(step) else float("-inf")}

    def _is_eligible(self, step: int) -> bool:
        """Whether the checkpoint of this step may be the result: after the gate has settled, and at the last step.

        No checkpoint before `first_step` may, since its evaluation cannot be compared with later ones.
        """
        if step < self._first_step:
            return False
        return self._gate is None or self._gate.is_settled(step) or step >= self._steps
