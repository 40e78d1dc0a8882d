"""Scores of a model with successive weights, and how far it diverges from the whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset

from compressor.answers import several_answers
from compressor.graph.signature import GeneratingForward, generator_of
from compressor.measure.ceiling import LossCeiling
from compressor.measure.divergence import divergence, variance_of
from compressor.model_folder.access import Forward, ModelAccess
from compressor.progress import RunLog
from compressor.pruning.bisect import ResampledScore
from compressor.tasks import Task, batches, statistics

_DRAWS = 500
_BATCH_SIZE = 16
"""Rows of a batch, for which the outputs of two models are in memory."""
Arrays = Mapping[str, np.ndarray]


class Scorer:
    """Scores a model, which has the weights of the whole model now, with later weights on the same draws.

    Attributes:
        whole_state: the `state` of the whole model, which must not be written to.
    """

    def __init__(self, model: ModelAccess, task: Task, rows: Dataset, seed: int, log: RunLog) -> None:
        self._model, self._task, self._rows, self._seed, self._log = model, task, rows, seed, log
        self.whole_state, self._whole = model.copy_state(), model.snapshot()
        self._kind, self._variance = several_answers(model.config), None
        self._ceiling: LossCeiling | None = None
        self._small: dict[int, Arrays] = {}  # outputs of the whole model by batch, where they are small
        first = self._whole_outputs(0, next(self._batches())[2])
        if variance_of([first], task.loss_outputs, self._kind) is not None:  # a regression
            outputs = [self._whole_outputs(number, inputs) for number, (*_, inputs) in enumerate(self._batches())]
            self._variance = variance_of(outputs, task.loss_outputs, self._kind)

    def score_whole(self) -> ResampledScore:
        """The score of the whole model, whose outputs later weights are compared with."""
        values, divergence = self._measure(None, "the whole model")
        self._ceiling = self._ceiling_of(values)
        constant, order = self._task.constant_score(values), self._task.order_text(values, "evaluation")
        return replace(self._resampled(values, divergence), constant=constant, order=order)

    def score(self, label: str, engine: Forward | None = None) -> ResampledScore:
        """The score of the model as it is, or of an engine of it."""
        return self._resampled(*self._measure(engine or self._model.forward(), label))

    def _measure(self, run: Forward | None, label: str) -> tuple[np.ndarray, float]:
        """The metric sums of a model, `[rows, k]`, and its divergence from the whole model; None: it is that."""
        task, measured, divergences = self._task, dict[int, np.ndarray](), list[np.ndarray]()
        stage = f"comparing {label} with the whole model" if self._has_own_forwards else f"scoring {label}"
        with self._log.stage(f"{stage} on the evaluation rows") as on_progress:
            for number, (indices, batch, inputs) in enumerate(self._batches()):
                before = self._whole_outputs(number, inputs)
                outputs = before if run is None else self._scored(run, inputs)
                rows = divergence(before, outputs, task.loss_outputs, inputs, self._variance, kind=self._kind)
                divergences.append(task.example_means(rows, batch))
                if not self._has_own_forwards:
                    parts = task.per_example(task.logits(outputs), batch[task.label_name])
                    measured.update(zip(indices, parts, strict=True))
                on_progress(min(_BATCH_SIZE * (number + 1), len(self._rows)), len(self._rows))
        mean = float(np.concatenate(divergences).mean())
        if self._has_own_forwards:
            return metric_sums(run or self._whole, task, self._rows, label, self._log), mean
        return task.summarize(np.stack([measured[row] for row in sorted(measured)])), mean

    @property
    def _has_own_forwards(self) -> bool:
        """Whether the metric needs forwards of its own, e.g. to generate texts."""
        return type(self._task).measure is not Task.measure

    def _ceiling_of(self, values: np.ndarray) -> LossCeiling | None:
        """What models lose at most, by the metric sums `[rows, 2]` of the whole one: its classes and the labels.

        None: the metric is not the share of rows whose class, that of the largest logit, is the label.
        """
        if self._has_own_forwards or values.ndim != 2 or values.shape[1] != 2:
            return None
        answers, labels = values.T.astype(np.int64)
        is_accuracy = np.array_equal(self._drawn(values, self._task.score), self._drawn(answers == labels, np.mean))
        logits: dict[int, np.ndarray] = {}
        for number, (indices, _, inputs) in enumerate(self._batches()) if is_accuracy else ():
            logits.update(zip(indices, self._task.logits(self._whole_outputs(number, inputs)), strict=True))
        if len({row.shape for row in logits.values()}) != 1:
            return None
        rows = np.stack([logits[row] for row in sorted(logits)]).astype(np.float32)
        is_known = rows.ndim == 2 and labels.min() >= 0 and labels.max() < rows.shape[1]
        if not is_known or not np.isfinite(rows).all() or not np.array_equal(rows.argmax(-1), answers):
            return None
        return LossCeiling.of(rows, labels, are_answers=self._task.scores_agreement)

    def _batches(self) -> Iterator[tuple[list[int], dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """The numbers of the rows of each batch, the batch, and the inputs of the model in it."""
        for indices, batch in batches(self._task, self._rows, _BATCH_SIZE):
            yield indices, batch, self._task.model_inputs(batch)

    def _scored(self, run: Forward, inputs: dict[str, np.ndarray]) -> Arrays:
        """The outputs that are compared and scored."""
        task, outputs = self._task, self._task.scored_outputs(run(inputs), inputs)
        return {name: outputs[name] for name in dict.fromkeys((*task.outputs, *task.loss_outputs)) if name in outputs}

    def _whole_outputs(self, number: int, inputs: dict[str, np.ndarray]) -> Arrays:
        """Those of the whole model on a batch; small ones are kept, since every score reads the same rows."""
        if number in self._small:
            return self._small[number]
        outputs = self._scored(self._whole, inputs)
        if all(values.ndim <= 2 for values in outputs.values()):
            self._small[number] = outputs
        return outputs

    def _resampled(self, values: np.ndarray, divergence: float) -> ResampledScore:
        ceiling = None if self._ceiling is None else self._ceiling.loss(values[:, 0].astype(np.int64))
        return ResampledScore(self._task.score(values), self._drawn(values, self._task.score), divergence, ceiling)

    def _drawn(self, values: np.ndarray, score: Callable[[np.ndarray], Any]) -> np.ndarray:
        """A score of values `[rows, ...]` on bootstrap draws of the rows, which are the same in each call."""
        rng, count = np.random.default_rng(self._seed), len(values)
        return np.array([score(values[rng.integers(0, count, count)]) for _ in range(_DRAWS)])


def metric_sums(run: Forward, task: Task, rows: Dataset, label: str, log: RunLog) -> np.ndarray:
    """The metric sums of a model on encoded rows, `[rows, k]`; see `Task.measure`."""

    def forward(batch: dict[str, np.ndarray]) -> np.ndarray:
        return task.logits(task.scored_outputs(run(batch), batch))

    generating = GeneratingForward(forward, lambda model: generator_of(run, model))
    with log.stage(f"scoring {label} on the evaluation rows") as on_progress:
        return statistics(task, rows, generating, on_progress=on_progress)
