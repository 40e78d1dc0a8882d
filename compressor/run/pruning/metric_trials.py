"""What the metric loses by plans that are tried one after another, estimated from all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.run.run_log import RunLog
from compressor.tasks import Task, statistics
from compressor.training.distillation import Distillation

_DRAWS = 500
_COMPARABLE = 10.0
"""Ratio of the divergences of two plans up to which their losses are taken to be in proportion: a model that answers by
chance loses no more, however far it diverges."""


@dataclass(frozen=True)
class ResampledScore:
    """How a model scores on rows.

    Attributes:
        metric: the metric on all rows, then on bootstrap draws of them, `[1 + draws]`.
        divergence: mean KL of its outputs from those of the whole model.
    """

    metric: np.ndarray
    divergence: float


class LossEstimate(NamedTuple):
    """What the metric is expected to lose by a plan, in its unit; negative where it gains.

    Attributes:
        loss: the estimate.
        error: its standard error.
    """

    loss: float
    error: float


class TrialScorer:
    """Scores one model with successive weights, on the same rows and draws.

    Args:
        model: the model, which has the weights of the whole model now.
        task: its task.
        rows: encoded rows with labels.
        seed: seed of the draws.
        log: receives the stages.
    """

    def __init__(self, model: PreTrainedModel, task: Task, rows: Dataset, seed: int, log: RunLog) -> None:
        self._model, self._task, self._rows, self._seed, self._log = model, task, rows, seed, log
        self._reference = Distillation.of(model, task.loss_outputs, hidden_weight=0.0)

    @property
    def whole_weights(self) -> dict[str, Tensor]:
        """The weights of the whole model, which stay as they are."""
        return self._reference.teacher.state_dict()

    def __call__(self, label: str) -> ResampledScore:
        """The score of the model as it is.

        Args:
            label: what the stages call it.
        """
        values = scored_statistics(self._model, self._task, self._rows, label, self._log)
        with self._log.stage(f"comparing {label} with the whole model"):
            divergence = self._reference.mean_divergence(self._model, self._task, self._rows)
        rng, count = np.random.default_rng(self._seed), len(values)
        draws = (rng.integers(0, count, count) for _ in range(_DRAWS))
        return ResampledScore(
            np.array([self._task.score(values), *(self._task.score(values[draw]) for draw in draws)]), divergence
        )


def estimate_losses(
    whole: ResampledScore, trials: Sequence[ResampledScore], *, higher_is_better: bool
) -> list[LossEstimate]:
    """What the metric loses by each of several plans.

    Every answer that changes moves the metric of a small set, so that the loss of a single plan is known within a point
    or so only. The divergence of the outputs is known far better, and small losses are in proportion to it. A plan is
    therefore expected to lose its divergence times the sum of the losses over the sum of the divergences of all plans
    that diverge at most `_COMPARABLE` times as far. The standard error is that of the draws, for the divergences as
    they are.

    Args:
        whole: the score of the whole model.
        trials: the scores of plans, on the same rows and draws.
        higher_is_better: whether a higher metric is better.
    """
    sign = 1.0 if higher_is_better else -1.0
    losses = sign * np.stack([whole.metric - trial.metric for trial in trials])
    divergences = np.array([trial.divergence for trial in trials])
    estimates = []
    for divergence in divergences:
        compared = divergences <= _COMPARABLE * divergence
        total = divergences[compared].sum()
        # Plans without any divergence answer as the whole model does.
        draws = losses[compared].sum(0) * (divergence / total if total > 0 else 0.0)
        # A draw may leave the metric undefined (one class only); it is ignored.
        estimates.append(LossEstimate(float(draws[0]), float(np.nanstd(draws[1:]))))
    return estimates


def scored_statistics(model: PreTrainedModel, task: Task, rows: Dataset, label: str, log: RunLog) -> np.ndarray:
    """Sufficient statistics of the metric of a model on rows, `[rows, k]`.

    Args:
        model: the model, as it is.
        task: its task.
        rows: encoded rows with labels.
        label: what the stage calls the model.
        log: receives the stage.
    """
    model.eval()

    def forward(batch: dict[str, Tensor]) -> np.ndarray:
        with torch.no_grad():
            return task.logits(model(**{name: tensor.to(model.device) for name, tensor in batch.items()}))

    scored = 0
    with log.stage(f"scoring {label} on the evaluation rows") as on_progress:

        def progress(count: int) -> None:
            nonlocal scored
            on_progress(scored := scored + count, len(rows))

        return statistics(task, rows, forward, progress=progress)
