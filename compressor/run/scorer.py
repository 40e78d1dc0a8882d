"""Scores of a model with successive weights, and how far it diverges from the whole one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class _Measured:
    """What is measured of a model on the rows.

    Attributes:
        values: its metric sums, `[rows, k]`.
        divergence: its divergence from the whole model.
        logits, labels: its logits `[rows, classes]` and the labels `[rows]`; None where these are no classes of rows.
    """

    values: np.ndarray
    divergence: float
    logits: np.ndarray | None = None
    labels: np.ndarray | None = None


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
        measured, task = self._measure(None, "the whole model"), self._task
        logits, labels = measured.logits, measured.labels
        if logits is not None and labels is not None and np.isfinite(logits).all():
            self._ceiling = LossCeiling.of(logits, labels, task.per_example, task.score, self._seed)
        constant = task.constant_score(measured.values)
        order = task.order_text(measured.values, "evaluation")
        return replace(self._resampled(measured), constant=constant, order=order)

    def score(self, label: str, engine: Forward | None = None) -> ResampledScore:
        """The score of the model as it is, or of an engine of it."""
        return self._resampled(self._measure(engine or self._model.forward(), label))

    def _measure(self, run: Forward | None, label: str) -> _Measured:
        """What is measured of a model; None: of the whole one."""
        task, divergences = self._task, list[np.ndarray]()
        measured, answers = dict[int, np.ndarray](), dict[int, tuple[np.ndarray, int]]()
        has_own_forwards = type(task).measure is not Task.measure  # for its metric
        stage = f"comparing {label} with the whole model" if has_own_forwards else f"scoring {label}"
        with self._log.stage(f"{stage} on the evaluation rows") as on_progress:
            for number, (indices, batch, inputs) in enumerate(self._batches()):
                before = self._whole_outputs(number, inputs)
                outputs = before if run is None else self._scored(run, inputs)
                rows = divergence(before, outputs, task.loss_outputs, inputs, self._variance, kind=self._kind)
                divergences.append(task.example_means(rows, batch))
                if not has_own_forwards:
                    logits, labels = task.logits(outputs), batch[task.label_name]
                    measured.update(zip(indices, task.per_example(logits, labels), strict=True))
                    if task.labels_are_classes:
                        answers.update(zip(indices, zip(logits, labels.tolist(), strict=True), strict=True))
                on_progress(min(_BATCH_SIZE * (number + 1), len(self._rows)), len(self._rows))
        mean = float(np.concatenate(divergences).mean())
        if has_own_forwards:
            return _Measured(metric_sums(run or self._whole, task, self._rows, label, self._log), mean)
        values = task.summarize(np.stack([measured[row] for row in sorted(measured)]))
        if not answers:
            return _Measured(values, mean)
        logits, labels = (np.array(part) for part in zip(*(answers[row] for row in sorted(answers)), strict=True))
        return _Measured(values, mean, logits.astype(np.float64), labels)

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

    def _resampled(self, measured: _Measured) -> ResampledScore:
        values, ceiling = measured.values, None
        if self._ceiling is not None and measured.logits is not None and np.isfinite(measured.logits).all():
            ceiling = self._ceiling.loss(measured.logits, higher_is_better=self._task.higher_is_better)
        rng, count = np.random.default_rng(self._seed), len(values)
        draws = [self._task.score(values[rng.integers(0, count, count)]) for _ in range(_DRAWS)]
        return ResampledScore(self._task.score(values), np.array(draws), measured.divergence, ceiling)


def metric_sums(run: Forward, task: Task, rows: Dataset, label: str, log: RunLog) -> np.ndarray:
    """The metric sums of a model on encoded rows, `[rows, k]`; see `Task.measure`."""

    def forward(batch: dict[str, np.ndarray]) -> np.ndarray:
        return task.logits(task.scored_outputs(run(batch), batch))

    generating = GeneratingForward(forward, lambda model: generator_of(run, model))
    with log.stage(f"scoring {label} on the evaluation rows") as on_progress:
        return statistics(task, rows, generating, on_progress=on_progress)
