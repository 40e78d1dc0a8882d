"""What pruning needs of a model, as an interface; and a model of PyTorch with a method that removes units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback, RunLog
from compressor.results import Note
from compressor.selection.allocation import Curve
from compressor.selection.pruners.base import Pruner
from compressor.tasks import Task, statistics
from compressor.training.distillation import Distillation, OutputsObserver
from compressor.units import PrunableGroup

_DRAWS = 500
_BATCH_SIZE = 16
"""Rows of a batch, for which the outputs of two models are in memory."""

Weights = Mapping[str, Any]
"""Name of a weight -> its value."""


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


class Scorer(Protocol):
    """Scores one model with successive weights, on the same rows and draws."""

    @property
    def whole_weights(self) -> Weights:
        """The weights of the whole model, which must not be written to."""
        ...

    def score_whole(self) -> ResampledScore:
        """The score of the whole model, whose outputs later weights are compared with."""
        ...

    def score(self, label: str) -> ResampledScore:
        """The score of the model with the weights that it has; `label` is what the stages call it."""
        ...


class PrunableModel(Protocol):
    """A model whose units are removed: what the search for a plan needs of it.

    It has the weights of the whole model first; `fit` and `load_weights` replace them.
    """

    @property
    def groups(self) -> Sequence[PrunableGroup]:
        """The groups whose units may be removed, in the order in which the model calls them."""
        ...

    @property
    def task(self) -> Task:
        """What its examples are for, and how they are scored."""
        ...

    def rank(self, on_progress: ProgressCallback) -> None:
        """Rank the units of each group, from what calibration examples show of the whole model; called first."""
        ...

    def losses(self, on_progress: ProgressCallback) -> dict[str, Curve]:
        """Name of the group -> number of units -> loss of that group alone, zero for all units; after `rank`."""
        ...

    def kept(self, group: PrunableGroup, count: int) -> tuple[int, ...]:
        """Ids of the units that a group keeps if `count` are, ascending; after `rank`."""
        ...

    def fit(self, counts: Mapping[str, int], on_progress: ProgressCallback) -> tuple[Note, ...]:
        """Give the model, which has the weights of the whole model, those of a plan.

        Args:
            counts: name of the group -> number of units that are kept.
            on_progress: called with (groups, all groups).

        Returns:
            Facts about these weights, for the readers of the report.
        """
        ...

    def weights(self, whole: Weights) -> Weights:
        """A copy of the weights in main memory; those that equal the weights of the whole model are shared with it."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights."""
        ...

    def scorer(self, rows: Dataset, seed: int, log: RunLog) -> Scorer:
        """Scores the model on rows with labels; `seed` is that of the draws, and `log` receives the stages."""
        ...

    def metric_sums(self, rows: Dataset, label: str, log: RunLog) -> np.ndarray:
        """The metric sums of the model as it is, `[rows, k]`; see `Task.measure`."""
        ...


@dataclass(frozen=True)
class TorchModel:
    """A model of PyTorch, as a `PrunableModel`.

    Attributes:
        network: the model.
        pruner: ranks its units and replaces its weights.
        task: what its examples are for.
    """

    network: PreTrainedModel
    pruner: Pruner[Any]
    task: Task

    @property
    def groups(self) -> Sequence[PrunableGroup]:
        return self.pruner.inputs.groups

    def rank(self, on_progress: ProgressCallback) -> None:
        self.pruner.rank(on_progress)

    def losses(self, on_progress: ProgressCallback) -> dict[str, Curve]:
        return self.pruner.losses(on_progress)

    def kept(self, group: PrunableGroup, count: int) -> tuple[int, ...]:
        return self.pruner.kept(group, count)

    def fit(self, counts: Mapping[str, int], on_progress: ProgressCallback) -> tuple[Note, ...]:
        self.pruner.finish(counts, on_progress)
        return self.pruner.notes

    def weights(self, whole: Weights) -> Weights:
        return {
            name: whole[name]
            if not isinstance(value, Tensor) or torch.equal(value, whole[name])
            else value.to("cpu", copy=True)
            for name, value in self.network.state_dict().items()
        }

    def load_weights(self, weights: Weights) -> None:
        self.network.load_state_dict(weights)

    def scorer(self, rows: Dataset, seed: int, log: RunLog) -> TorchScorer:
        return TorchScorer(self.network, self.task, rows, seed, log)

    def metric_sums(self, rows: Dataset, label: str, log: RunLog) -> np.ndarray:
        return metric_sums(self.network, self.task, rows, label, log)


class TorchScorer:
    """Scores a model of PyTorch with successive weights, on the same rows and draws; a `Scorer`.

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
    def whole_weights(self) -> Weights:
        """The weights of the whole model, which must not be written to."""
        return self._reference.teacher.state_dict()

    def score_whole(self) -> ResampledScore:
        """The score of the whole model, whose outputs later weights are compared with."""
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
        """The metric sums of a model, `[rows, k]`, and its divergence from the whole model."""
        task, measured = self._task, dict[int, np.ndarray]()
        if type(task).measure is not Task.measure:  # the metric needs forwards of its own
            values = metric_sums(model, task, self._rows, label, self._log)
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


def metric_sums(model: PreTrainedModel, task: Task, rows: Dataset, label: str, log: RunLog) -> np.ndarray:
    """The metric sums of a model of PyTorch on rows, `[rows, k]`; see `Task.measure`.

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
