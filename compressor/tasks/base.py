"""What a task is: it turns rows into batches, and a model's outputs into a number that can be resampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from datasets import Dataset
from torch import Tensor

from compressor.errors import InputError

Forward = Callable[[dict[str, Tensor]], np.ndarray]
"""A batch without labels to logits, `[batch, ...]`."""


class Task(Protocol):
    """One task over one model folder; a base class too, for tasks that one forward answers.

    Attributes:
        name: `text-classification`, `regression`, `causal-lm`, `translation` or `question-answering`.
        metric: what `score` computes, e.g. `accuracy`.
        higher_is_better: False for perplexity.
        metrics: the metrics that the task knows, the default first.
        notes: what a reader must know of how rows were read and scored; complete once labels are learned.
        in_order: whether rows follow each other, so that they may not be drawn from among others.
        outputs: the model's outputs that are scored, in the order in which it gives them.
        label_name: what `collate` calls what is to be predicted.
        beams: hypotheses that go into the model at once for every row.
        longest: most tokens of what the model makes in place of one forward; 0: one forward it is.
    """

    name: str
    metric: str
    higher_is_better: bool
    metrics: tuple[str, ...]
    notes: tuple[str, ...] = ()
    in_order: bool = False
    outputs: tuple[str, ...] = ("logits",)
    label_name: str = "labels"
    beams: int = 1
    longest: int = 0

    @property
    def chooser(self) -> Task:
        """The task that heads and checkpoints are chosen by: this one, if one forward answers its rows."""
        return self

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Fix how the labels of `rows` map to numbers, for every split. Called once, before any `encode`.

        Raises:
            InputError: a label that the model cannot have, or one class only.
        """
        ...

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Rows to examples: columns `input_ids`, `length` (tokens), and what else `collate` needs of a row.

        Raises:
            InputError: a column is missing, a value is not what the task needs, or nothing is left.
        """
        ...

    def unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """The same of any rows, whatever labels they have or lack, where a label is no part of what the model reads:
        its place is filled, so that the model can be watched on them."""
        return self.encode(rows, source)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """One batch, padded to its longest example: what the model's forward takes, and the labels."""
        ...

    def labelled(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A collated batch with its labels as the model takes them, to compute its loss."""
        return batch

    def scored(self, outputs: Mapping[str, Any]) -> np.ndarray:
        """The logits of one forward, of PyTorch or of an engine; of several `outputs`, on a last axis.

        Raises:
            InputError: the model does not give one.
        """
        missing = next((name for name in self.outputs if name not in outputs), None)
        if missing is not None:
            raise InputError(f"the model gives no {missing}, which {self.name} is scored by; take one that does")
        found = [outputs[name] for name in self.outputs]
        arrays = [value.float().cpu().numpy() if isinstance(value, Tensor) else value for value in found]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)

    def measure(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Sufficient statistics of a few rows, `[examples, k]` float64: `score` of any rows of them is the metric.

        By one forward, unless the task needs more of them.
        """
        batch = self.collate(examples)
        labels = batch.pop(self.label_name).numpy()
        return self.per_example(forward(batch), labels)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The same from the logits of one forward over a collated batch, and its labels."""
        ...

    def score(self, statistics: np.ndarray) -> float:
        """The metric over `[examples, k]`, e.g. over a bootstrap's resampled rows of `measure`."""
        ...


class DataRequest(Protocol):
    """The part of a recipe that says which rows to use.

    Attributes:
        data: training rows: a file or a Hugging Face data set name; None for none.
        eval_data: rows that choices are made on.
        test_data: rows that are reported on.
        text_columns: columns that hold the text, in order (source and target of a translation); empty: by name.
        label_column: column that holds the label; None: found by name.
        metric: None for the task's own.
        max_length: longest example in tokens; longer ones are cut, or read in windows.
        stride: tokens that such windows of a text share.
        seed: draws the rows that are set aside.
    """

    @property
    def data(self) -> str | None: ...
    @property
    def eval_data(self) -> str | None: ...
    @property
    def test_data(self) -> str | None: ...
    @property
    def text_columns(self) -> tuple[str, ...]: ...
    @property
    def label_column(self) -> str | None: ...
    @property
    def metric(self) -> str | None: ...
    @property
    def max_length(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Data:
    """Encoded rows of one run, ready for `Task.collate`.

    Attributes:
        train: rows to learn from; none of them where only a plan is followed.
        eval: rows that choices are made on; none of them where only test rows were given.
        test: rows that are reported on; nothing is chosen on them.
        task: the task that encoded them.
        notes: what a reader must know, e.g. that the test rows were set aside from the evaluation rows.
        train_hash: `sha256:...` over the training rows as encoded, whatever file they came in; None without.
        eval_hash: the same of the evaluation rows.
    """

    train: Dataset
    eval: Dataset
    test: Dataset
    task: Task
    notes: tuple[str, ...]
    train_hash: str | None
    eval_hash: str | None
