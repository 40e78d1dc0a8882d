"""The interface of a task: rows to batches, and a model's outputs to statistics from which a metric is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from torch import Tensor

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, require_processor
from compressor.results import MetricUnit, Note
from compressor.tasks.forwards import LABELS
from compressor.tasks.metrics import Metric
from compressor.tasks.row_origin import RowOrigin, SplitRows
from compressor.tasks.splits import named_splits

Forward = Callable[[dict[str, Tensor]], np.ndarray]
"""Runs a batch without labels; returns logits `[batch, ...]`."""


class Task(ABC):
    """One task on one model folder.

    A task is a class in its own module and a line in `compressor.config.tasks.TASKS`, or a class outside of this
    package (`compressor.config.own_tasks`). The class declares all that is specific to the task: columns, collation,
    scored outputs, and metrics with their units. Its arguments are a model folder, the rows of a recipe, and a metric.

    Args:
        metric: one of `metrics`.

    Attributes:
        name: the name of the task, e.g. `text-classification`.
        metrics: the metrics of the task, the default first.
        in_order: whether rows follow each other in a text and must not be shuffled.
        reads_streams: whether the model keeps a memory of earlier rows, so that a text is read in parallel streams
            (`segment_streams`) where the metric is computed and where the model is trained.
        embeds: whether the scored output is one embedding for each text.
        joined_rows: number of consecutive rows that are encoded as one text, and drawn together.
        outputs: the model outputs that are scored, in the order in which the model returns them. `start_logits` and
            `end_logits` are logits over positions; any other output `[rows, n]` is logits of n classes.
        label_name: the key of the labels in a collated batch, `[examples, ...]`.
        model_task: for a custom task, the value of `--task` that a model folder is loaded with; None: its class
            is the one that it was saved as.
        notes: how rows are read and scored; complete when all rows are encoded.
        set_aside_by: column of the encoded rows; rows with equal values there are set aside together for another
            split. None: rows are set aside one by one.
        beams: number of hypotheses per row that the model processes at once.
        max_new_tokens: maximum number of tokens generated for a row; 0 if the metric needs one forward only.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    in_order: ClassVar[bool] = False
    reads_streams: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    joined_rows: ClassVar[int] = 1
    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    label_name: ClassVar[str] = "labels"
    model_task: ClassVar[str | None] = None

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self.notes: tuple[Note, ...] = ()
        self.set_aside_by: str | None = None
        self.beams = 1
        self.max_new_tokens = 0

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        """Whether this class supports a folder of its task; of several classes, the first that accepts it is used."""
        return True

    @property
    def metric(self) -> str:
        """Name of the metric that `score` computes, e.g. `accuracy`."""
        return self._metric.name

    @property
    def metric_unit(self) -> MetricUnit:
        """Unit in which values of the metric are shown."""
        return self._metric.unit

    @property
    def metric_heading(self) -> str:
        """The metric with its unit, for the head of a column: `accuracy, %`."""
        return self._metric.heading

    @property
    def metric_maximum(self) -> float:
        """The largest value of the metric; infinity where there is none."""
        return self._metric.maximum

    @property
    def higher_is_better(self) -> bool:
        """False for a loss or a perplexity."""
        return self._metric.higher_is_better

    @property
    def chooser(self) -> Task:
        """The task whose metric selects heads and checkpoints: this one, if its metric needs one forward only."""
        return self

    @property
    def special_ids(self) -> frozenset[int] | None:
        """Ids of the tokens that frame the texts of a row; None: rows of the task are not cut and joined."""
        return None

    @property
    def retrieves(self) -> bool:
        """Whether the metric is one of retrieval, which compares all rows with each other."""
        return False

    @property
    def loss_outputs(self) -> tuple[str, ...]:
        """The model outputs whose divergence from the dense model's is the loss without labels."""
        return self.outputs

    @classmethod
    def check_processor(cls, folder: ModelFolder) -> None:
        """Raise an error unless a folder has what converts its rows to inputs of the model: a tokenizer."""
        require_processor(folder.processor, folder.path)

    def read(self, source: str) -> SplitRows:
        """The rows of a file, a folder or a data set by the name of their split; see `splits.named_splits`.

        Args:
            source: the value of `--data`, `--eval-data` or `--test-data`.
        """
        return named_splits(source)

    def learn_labels(self, rows: Dataset, source: str) -> None:  # noqa: B027 - not every task has labels
        """Determine how labels map to numbers, from `rows`, for every split. Called once, before any `encode`.

        Args:
            rows: the rows of the first split that is read.
            source: name of the rows in error messages.

        Raises:
            InputError: a label that the model does not have, or labels of one class only.
        """

    @abstractmethod
    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode rows as examples with columns that `collate` reads, among them `length` (in tokens).

        Args:
            rows: rows as read from a file or a data set.
            source: name of the rows in error messages.

        Raises:
            InputError: a column is missing, a value is not what the task reads, or no token remains.
        """

    def usual_texts(self, rows: Dataset) -> tuple[str, ...]:
        """The columns of text that have usual names, where rows with and without labels need as many; else empty."""
        return ()

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode rows whose labels are not used, e.g. to run the model on them; labels may be placeholders.

        Args:
            rows: rows with any labels, or without labels where the task permits it.
            source: name of the rows in error messages.
        """
        return self.encode(rows, source)

    def locate(self, encoded: Dataset, origin: RowOrigin) -> Dataset:
        """All rows that `encode` returned; columns that name a row in later errors name it by its origin."""
        return encoded

    def check_files(self, examples: Dataset) -> None:  # noqa: B027 - few tasks have files
        """Read the files that encoded rows refer to and `collate` reads, if there are some, so that errors come early.

        Raises:
            InputError: a file cannot be read.
        """

    @abstractmethod
    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """One batch, padded to its longest example: the model's inputs, and the labels under `label_name`."""

    def loss_inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a collated batch to the arguments from which the model computes its own loss."""
        return batch

    def model_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A collated batch without labels of the task's own kind.

        `labels` stay: they say which positions are scored, and a decoder's inputs may follow from them.
        """
        return {name: value for name, value in batch.items() if name == LABELS or name != self.label_name}

    def example_means(self, values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean `[examples]` of the values `[rows]` of the rows that each example of a collated batch consists of.

        Args:
            values: one for each row that the model reads.
            batch: the collated batch with its labels.
        """
        return values

    def row_counts(self, rows: Dataset) -> tuple[int, int]:
        """Number of rows that the model reads for encoded examples, and of their tokens."""
        return len(rows), sum(rows["length"][:])

    def scored_outputs(self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Outputs of an engine with those that the task scores, which may be computed from others.

        Args:
            outputs: arrays by name.
            batch: the inputs of the engine.
        """
        return outputs

    def logits(self, outputs: Mapping[str, Any]) -> np.ndarray:
        """The logits among the outputs of one forward, in PyTorch or of an engine; several are stacked on a last axis.

        Raises:
            InputError: the model lacks one of `Task.outputs`.
        """
        missing = next((name for name in self.outputs if name not in outputs), None)
        if missing is not None:
            raise InputError(
                f"the model has no output {missing}, which {self.name} scores; use a model that has it",
                code=ErrorCode.UNSUPPORTED_MODEL,
                output=missing,
                task=self.name,
            )
        values = [outputs[name] for name in self.outputs]
        arrays = [value.float().cpu().numpy() if isinstance(value, Tensor) else value for value in values]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)

    def measure(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Sufficient statistics of some examples, `[examples, k]` float64, from which `score` computes the metric.

        One forward computes them, unless the task overrides this method.

        Args:
            forward: runs the model.
            examples: encoded rows.
        """
        batch = self.collate(examples)
        labels = self.pop_labels(batch, len(examples))
        statistics = self.per_example(forward(batch), labels)
        if getattr(statistics, "ndim", 0) != 2 or len(statistics) != len(examples):
            raise self.returns_wrong("per_example", f"an array [examples, k] for {len(examples)} examples")
        return statistics

    def pop_labels(self, batch: dict[str, Tensor], count: int) -> np.ndarray:
        """Take the labels out of a collated batch.

        Args:
            batch: the batch; its labels are removed.
            count: number of its examples.

        Raises:
            UsageError: it has no labels, or not one element for each example.
        """
        labels = batch.pop(self.label_name, None) if isinstance(batch, MutableMapping) else None
        if labels is None or not labels.ndim or len(labels) != count:
            raise self.returns_wrong(
                "collate", f"tensors, {self.label_name!r} with an element for each of {count} rows"
            )
        return labels.numpy()

    def returns_wrong(self, method: str, expected: str) -> UsageError:
        """The error of a method that returns something else than it has to, as that of a custom task may.

        Args:
            method: name of the method.
            expected: what it has to return.
        """
        path = f"{type(self).__module__}:{type(self).__qualname__}.{method}"
        text = f"--task {path} returns something else than {expected}; correct the method"
        return UsageError(text, code=ErrorCode.TASK_FAILED, field="task", value=path)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray | None:
        """The answers to one batch as integers, by which those of two engines are compared; None: they are not.

        Args:
            logits: the logits of the batch.
            batch: its inputs, without labels.
        """
        return None

    def size_limits(self, examples: Dataset) -> tuple[int, int]:
        """The most rows that the model reads for one of these encoded examples, and the most tokens of such a row."""
        return 1, max(examples["length"][:], default=1)

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """Why the metric is not defined on the encoded rows of a split, in a few words; None: it is defined."""
        return None

    def constant_score(self, statistics: np.ndarray) -> float | None:
        """The best score of an answer that is the same for every row; None for a task without such an answer.

        Args:
            statistics: statistics of the scored rows, `[examples, k]`.
        """
        return None

    def order_text(self, statistics: np.ndarray, split: str) -> str | None:
        """Why labels seem to number the classes in another order than the model, and what to do; None: they do not.

        Args:
            statistics: those of the dense model, `[examples, k]`.
            split: the rows that were scored.
        """
        return None

    @abstractmethod
    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Sufficient statistics `[examples, k]` from the logits of one collated batch and its labels."""

    def answers(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """What the model answers to some examples, as text for a reader of the report.

        One forward computes the answers, unless the task overrides this method.

        Args:
            forward: runs the model.
            examples: encoded rows.
        """
        batch = self.collate(examples)
        labels = self.pop_labels(batch, len(examples))
        return self.answer_texts(forward(batch), labels)

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The answer to each example as text, from the logits of one collated batch and its labels.

        Empty where answers have no text: the report then shows none.
        """
        return ()

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The expected answer to an encoded row as text: the first of its `reference`; empty where it has none."""
        reference = example.get("reference", "")
        return str(reference if isinstance(reference, str) else next(iter(reference), ""))

    def summarize(self, statistics: np.ndarray) -> np.ndarray:
        """Sufficient statistics of the metric, `[k, statistics]`, from those of all examples, `[examples, ...]`.

        They are the same, unless the metric compares examples with each other.
        """
        return statistics

    def score(self, statistics: np.ndarray) -> float:
        """The metric from statistics `[examples, k]`, e.g. of examples that a bootstrap resampled."""
        return self._metric.value(statistics)
