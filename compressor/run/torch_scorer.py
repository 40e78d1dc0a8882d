"""Scores of a model of PyTorch with successive weights, and how far it diverges from the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.progress import RunLog
from compressor.pruning.bisect import ResampledScore
from compressor.tasks import Task, statistics
from compressor.tasks.scoring import forward_of
from compressor.training.distillation import Distillation, OutputsObserver

_DRAWS = 500
_BATCH_SIZE = 16
"""Rows of a batch, for which the outputs of two models are in memory."""


class TorchScorer:
    """Scores a model of PyTorch, which has the weights of the whole model now, with later weights on the same draws."""

    def __init__(self, model: PreTrainedModel, task: Task, rows: Dataset, seed: int, log: RunLog) -> None:
        self._model, self._task, self._rows, self._seed, self._log = model, task, rows, seed, log
        self._reference = Distillation.of(model, task.loss_outputs, hidden_weight=0.0).with_variance_of(task, rows)

    @property
    def whole_weights(self) -> Mapping[str, Tensor]:
        """The weights of the whole model, which must not be written to."""
        return self._reference.teacher.state_dict()

    def score_whole(self) -> ResampledScore:
        """The score of the whole model, whose outputs later weights are compared with."""
        values, divergence = self._measure(self._reference.teacher, "the whole model")
        constant, order = self._task.constant_score(values), self._task.order_text(values, "evaluation")
        return replace(self._resampled(values, divergence), constant=constant, order=order)

    def score(self, label: str) -> ResampledScore:
        """The score of the model as it is."""
        return self._resampled(*self._measure(self._model, label))

    def _measure(self, model: PreTrainedModel, label: str) -> tuple[np.ndarray, float]:
        """The metric sums of a model, `[rows, k]`, and its divergence from the whole model."""
        task, measured = self._task, dict[int, np.ndarray]()
        if type(task).measure is not Task.measure:  # the metric needs forwards of its own
            values = metric_sums(model, task, self._rows, label, self._log)
            with self._log.stage(f"comparing {label} with the whole model"):
                return values, self._divergence(model)
        with self._log.stage(f"scoring {label} on the evaluation rows") as on_progress:

            def measure(indices: list[int], batch: Mapping[str, np.ndarray], outputs: Mapping[str, Any]) -> None:
                parts = task.per_example(task.logits(outputs), batch[task.label_name])
                measured.update(zip(indices, parts, strict=True))
                on_progress(len(measured), len(self._rows))

            divergence = self._divergence(model, measure)
        return task.summarize(np.stack([measured[row] for row in sorted(measured)])), divergence

    def _divergence(self, model: PreTrainedModel, observe: OutputsObserver | None = None) -> float:
        return self._reference.mean_divergence(model, self._task, self._rows, _BATCH_SIZE, observe)

    def _resampled(self, values: np.ndarray, divergence: float) -> ResampledScore:
        rng, count = np.random.default_rng(self._seed), len(values)
        draws = [self._task.score(values[rng.integers(0, count, count)]) for _ in range(_DRAWS)]
        return ResampledScore(self._task.score(values), np.array(draws), divergence)


def metric_sums(model: PreTrainedModel, task: Task, rows: Dataset, label: str, log: RunLog) -> np.ndarray:
    """The metric sums of a model of PyTorch on encoded rows, `[rows, k]`; see `Task.measure`."""
    scored = 0
    with log.stage(f"scoring {label} on the evaluation rows") as on_progress:

        def progress(count: int) -> None:
            nonlocal scored
            on_progress(scored := scored + count, len(rows))

        return statistics(task, rows, forward_of(task, model), progress=progress)
