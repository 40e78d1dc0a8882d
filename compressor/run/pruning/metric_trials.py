"""How much of the metric plans lose that are tried one after another, estimated from all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.progress import RunLog
from compressor.tasks import Task, statistics
from compressor.tasks.scoring import uninformed_text
from compressor.training.distillation import Distillation, OutputsObserver

_DRAWS = 500
_BATCH_SIZE = 16
"""Rows of a batch, for which the outputs of two models are in memory."""
_COMPARABLE = 5.0
"""A plan is compared with those that diverge at most this many times as far. Beyond that losses are not in proportion:
a model that answers by chance loses no more, however far it diverges."""
_MARGIN = 1.645
"""Standard errors that are added to an estimated loss: an upper bound with a confidence of 95%, one-sided."""
_OWN_ERRORS = 2.0
"""Standard errors by which the loss that a plan itself shows may exceed what is allowed."""


@dataclass(frozen=True)
class ResampledScore:
    """How a model scores on rows.

    Attributes:
        metric: the metric on all rows.
        draws: the metric on bootstrap draws of the rows, the same draws for every model.
        divergence: mean KL of the outputs of the model from those of the whole model.
        constant: of the whole model, the metric of an answer that is the same for every row; None: there is none.
        order: of the whole model, why the labels seem to have another order than its classes; None: they do not.
    """

    metric: float
    draws: np.ndarray
    divergence: float
    constant: float | None = None
    order: str | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the metric on all rows and the divergence are finite."""
        return bool(np.isfinite([self.metric, self.divergence]).all())


class LossEstimate(NamedTuple):
    """How much of the metric a plan loses, in its unit; negative where it gains.

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
        self._reference = Distillation.of(model, task.loss_outputs, hidden_weight=0.0).with_variance_of(task, rows)

    @property
    def whole_state(self) -> dict[str, Any]:
        """The state of the whole model, which must not be written to."""
        return self._reference.teacher.state_dict()

    def score_whole(self) -> ResampledScore:
        """The score of the whole model, whose outputs later models are compared with."""
        values, divergence = self._measure(self._reference.teacher, "the whole model")
        constant, order = self._task.constant_score(values), self._task.order_text(values, "evaluation")
        return replace(self._resampled(values, divergence), constant=constant, order=order)

    def score(self, label: str) -> ResampledScore:
        """The score of the model as it is.

        Args:
            label: what the stages call it.
        """
        return self._resampled(*self._measure(self._model, label))

    def _measure(self, model: PreTrainedModel, label: str) -> tuple[np.ndarray, float]:
        """Statistics of the metric of a model, `[rows, k]`, and its divergence from the whole model."""
        task, measured = self._task, dict[int, np.ndarray]()
        if type(task).measure is not Task.measure:  # the metric needs forwards of its own
            values = scored_statistics(model, task, self._rows, label, self._log)
            with self._log.stage(f"comparing {label} with the whole model"):
                return values, self._divergence(model)
        with self._log.stage(f"scoring {label} on the evaluation rows") as on_progress:

            def measure(indices: list[int], batch: Mapping[str, Tensor], outputs: Mapping[str, Any]) -> None:
                parts = task.per_example(task.logits(outputs), batch[task.label_name].numpy())
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


def require_informed(dense: ResampledScore, task: Task) -> None:
    """Raise InputError if the metric of the whole model on the evaluation rows can show no loss.

    Args:
        dense: the score of the whole model.
        task: its task.
    """
    text = uninformed_text(task.metric, dense.metric, dense.constant, "evaluation")
    if text is not None and dense.order is not None:
        raise InputError(
            f"{dense.order}; --max-drop cannot bound a loss that does not show",
            code=ErrorCode.LABEL_MISMATCH,
            metric=task.metric,
            value=dense.metric,
        )
    if text is not None:
        raise InputError(
            f"{text} (--data, --eval-data); --max-drop cannot bound a loss that does not show: name other rows, or"
            " another metric (--metric)",
            code=ErrorCode.LABEL_MISMATCH,
            metric=task.metric,
            value=dense.metric,
            constant=dense.constant,
        )


def estimate_losses(
    whole: ResampledScore, trials: Sequence[ResampledScore], *, higher_is_better: bool
) -> list[LossEstimate]:
    """How much of the metric each of several plans loses.

    Every answer that changes moves the metric of a small set, so that the loss of one plan is known only to about a
    point. The divergence of the outputs is known far better, and small losses are about in proportion to it. A plan is
    therefore expected to lose its divergence times the sum of the losses over the sum of the divergences of all plans
    that diverge at most `_COMPARABLE` times as far. The standard error is that of the draws, for the divergences as
    they are.

    A plan without finite outputs loses everything, and nothing is learned from it.

    Args:
        whole: the score of the whole model.
        trials: the scores of plans.
        higher_is_better: whether a higher metric is better.
    """
    sign = 1.0 if higher_is_better else -1.0
    finite = [trial for trial in trials if trial.is_finite]
    estimates = []
    for trial in trials:
        if not trial.is_finite:
            estimates.append(LossEstimate(np.inf, 0.0))
            continue
        compared = [other for other in finite if other.divergence <= _COMPARABLE * trial.divergence]
        total = sum(other.divergence for other in compared)
        share = sign * (trial.divergence / total if total > 0 else 1 / len(compared))
        draws = share * np.sum([whole.draws - other.draws for other in compared], axis=0)
        # A draw may leave the metric undefined (one class only); it is ignored.
        defined = draws[np.isfinite(draws)]
        error = float(np.std(defined)) if len(defined) else np.inf
        estimates.append(LossEstimate(share * sum(whole.metric - other.metric for other in compared), error))
    return estimates


def upper_losses(whole: ResampledScore, trials: Sequence[ResampledScore], *, higher_is_better: bool) -> list[float]:
    """The loss up to which each of several plans is taken to go, in the unit of the metric.

    It is the estimate from all plans with a margin, or what the plan itself certainly shows, whichever is more.

    Args:
        whole: the score of the whole model.
        trials: the scores of plans.
        higher_is_better: whether a higher metric is better.
    """
    upper = []
    for trial, estimate in zip(trials, estimate_losses(whole, trials, higher_is_better=higher_is_better), strict=True):
        (own,) = estimate_losses(whole, [trial], higher_is_better=higher_is_better)
        upper.append(max(estimate.loss + _MARGIN * estimate.error, own.loss - _OWN_ERRORS * own.error))
    return upper


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
