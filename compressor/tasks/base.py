"""The interface of a task: it converts rows to batches, and outputs to statistics of a metric; the task of a folder."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from datasets import Dataset

from compressor.answers import LABELS
from compressor.config.sections import RowsConfig
from compressor.config.tasks import READ_AS, TASK_NAMES, TASKS
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.graph.signature import HasSignature
from compressor.model_folder.processor import require_processor
from compressor.results import MetricUnit, Note, NoteCode
from compressor.silence_libraries import one_line
from compressor.tasks.metrics import Metric
from compressor.tasks.row_store import RowOrigin, SplitRows
from compressor.tasks.splits import named_splits

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from compressor.model_folder import ModelFolder

Batch = dict[str, np.ndarray]
"""Inputs of a model and labels by name, `[batch, ...]` each."""
Forward = Callable[[Batch], np.ndarray]
"""Runs a batch without labels; returns logits `[batch, ...]`."""
Values = TypeVar("Values")


class Vocabulary(NamedTuple):
    """The tokens of a tokenizer.

    Attributes:
        special_ids: ids of the special tokens, which separate texts, without that of unknown words.
        text_ids: ids of the model that are neither special nor added tokens.
    """

    special_ids: frozenset[int]
    text_ids: np.ndarray


class Task(ABC):
    """A task of a model folder.

    A task is a class in its own module and a line in `compressor.config.tasks.TASKS`, or a class outside of this
    package (`compressor.config.tasks`). The class declares its columns, collation, scored outputs, and metrics with
    their units. Every task is created from three arguments: `folder`, whose tokenizer or processor encodes rows, and
    whose configuration names classes; `request`, the columns and the maximum length of a recipe; and `metric`.

    Attributes:
        name: the name of the task, e.g. `text-classification`.
        metrics: the metrics of the task, the default first.
        in_order: whether examples follow each other in a text and must not be shuffled.
        reads_streams: whether the model keeps a memory of earlier examples, so that scoring and training read a text in
            parallel streams (`causal_lm.Streams`).
        embeds: whether the scored output is an embedding of each text.
        generates: whether it is a task of models that generate, whose engines with key/value caches are scored.
        joined_rows: number of consecutive rows that are encoded as one text, and drawn together.
        outputs: the model outputs that are scored, in the order in which the model returns them. `start_logits` and
            `end_logits` are logits over positions; any other output `[examples, n]` is logits of n classes.
        label_name: the key of the labels in a collated batch, `[examples, ...]`.
        model_task: for a custom task, the value of `--task` with which a model folder is loaded; None: it is loaded as
            the class that it was saved as.
        scores_agreement: whether labels are the answers of the whole model, so that the metric is the agreement with it
            (`agreement_on`).
        notes: how rows are read and scored; complete after all rows are encoded.
        set_aside_by: column of the examples; examples with equal values there are set aside together for another
            split. None: examples are set aside independently.
        beams: number of hypotheses of an example that the model processes at once.
        max_new_tokens: maximum number of tokens generated for an example; 0 if the metric needs a single forward.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    in_order: ClassVar[bool] = False
    reads_streams: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    joined_rows: ClassVar[int] = 1
    outputs: tuple[str, ...] = ("logits",)
    label_name: ClassVar[str] = "labels"
    model_task: ClassVar[str | None] = None

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self.scores_agreement = False
        self.notes: tuple[Note, ...] = ()
        self.set_aside_by: str | None = None
        self.beams = 1
        self.max_new_tokens = 0

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        """Whether this class supports a folder of its task; the first class that does is used."""
        return True

    @property
    def metric(self) -> str:
        """Name of the metric that `score` computes, e.g. `accuracy`."""
        return f"agreement ({self._metric.name})" if self.scores_agreement else self._metric.name

    @property
    def metric_unit(self) -> MetricUnit:
        """Unit in which values of the metric are shown."""
        return self._metric.unit

    @property
    def metric_heading(self) -> str:
        """The metric with its unit, for the heading of a column: `accuracy, %`."""
        return self._metric.heading

    @property
    def metric_maximum(self) -> float:
        """The largest possible value of the metric; may be infinite."""
        return self._metric.maximum

    def point_of(self, whole: Callable[[], float]) -> float:
        """A loss that is as large as a point of accuracy; see `Metric.point_of`."""
        return self._metric.point_of(whole)

    @property
    def higher_is_better(self) -> bool:
        """False for a loss or a perplexity."""
        return self._metric.higher_is_better

    @property
    def chooser(self) -> Task:
        """The task whose metric selects heads and checkpoints: this task, if its metric needs a single forward."""
        return self

    def agreement_on(self, examples: Dataset) -> Task:
        """This task for examples whose labels are the answers of the whole model; see `labels_by`."""
        task = copy.copy(self)
        task.scores_agreement = True
        return task

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokens of texts that may be cut, joined and changed to further examples; None: they may not."""
        return None

    @property
    def retrieves(self) -> bool:
        """Whether the metric is one of retrieval, which compares all examples with each other."""
        return False

    @property
    def compares_answers(self) -> bool:
        """Whether the single answers of engines are compared (`answer_ids`)."""
        return type(self).answer_ids is not Task.answer_ids

    @property
    def loss_outputs(self) -> tuple[str, ...]:
        """The model outputs whose divergence from the dense model's is the loss without labels."""
        return self.outputs

    @classmethod
    def check_processor(cls, folder: ModelFolder) -> None:
        """Raise an error unless a folder has a tokenizer or processor, which converts rows to inputs of the model."""
        require_processor(folder.processor, folder.path)

    def read(self, source: str) -> SplitRows:
        """The rows of the value of `--data`, `--eval-data` or `--test-data` by split; see `splits.named_splits`."""
        return named_splits(source)

    def learn_labels(self, rows: Dataset, source: str) -> None:  # noqa: B027 - not every task has labels
        """Learn from the rows of the first split how labels map to numbers in every split; called before any `encode`.

        Rows for which it raises `COLUMN_MISSING`, as `LabelColumn.find` does, are rows without labels.

        Raises:
            InputError: the column of labels is missing, the model does not have a label, or all labels are equal.
        """

    def declare_answers(self, config: PretrainedConfig) -> None:  # noqa: B027 - few tasks know more than the model
        """Write the kind of answers into the configuration of a model, or of its teacher, where it is missing.

        The loss without labels depends on it (`classifiers.several_answers`).
        """

    @abstractmethod
    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode rows as examples with columns that `collate` reads, among them `length` (in tokens).

        A column `labels` holds what `labels_of` returns; the answers of the whole model replace it in rows without
        labels.

        Raises:
            InputError: a column is missing, a value is not what the task reads, or no token remains.
        """

    def usual_texts(self, rows: Dataset) -> tuple[str, ...]:
        """The columns of text with usual names, if rows without labels need as many as rows with labels; else empty."""
        return ()

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode rows whose labels are not used or, where the task permits it, missing; examples have placeholders."""
        return self.encode(rows, source)

    def locate(self, encoded: Dataset, origin: RowOrigin) -> Dataset:
        """The examples that `encode` returned, where columns that later errors read name the origin of each row."""
        return encoded

    def check_files(self, examples: Dataset) -> None:  # noqa: B027 - few tasks have files
        """Read the files, if any, that examples refer to and `collate` reads, so that errors are raised early.

        Raises:
            InputError: a file cannot be read.
        """

    @abstractmethod
    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch, padded to its longest example: the model's inputs, and the labels as `label_name`."""

    def loss_inputs(self, batch: Batch) -> Batch:
        """The arguments from which the model computes its own loss, from a collated batch."""
        return batch

    def model_inputs(self, batch: Mapping[str, Values]) -> dict[str, Values]:
        """A collated batch, of arrays or of tensors, without `label_name`.

        An entry `labels` stays: it marks scored positions, and a decoder may derive its inputs from it.
        """
        return {name: value for name, value in batch.items() if name == LABELS or name != self.label_name}

    def example_means(self, values: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """Average values `[inputs]` over the texts or windows of each example of a batch with labels, `[examples]`."""
        return values

    def input_counts(self, rows: Dataset) -> tuple[int, int]:
        """Number of texts or windows that the model reads for examples, and of their tokens."""
        return len(rows), sum(rows["length"][:])

    def scored_outputs(self, outputs: Mapping[str, Any], batch: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Outputs of an engine on a batch, with outputs that the task scores and computes from them."""
        return outputs

    def note(self, text: str, code: NoteCode) -> None:
        """Add a note on how rows are read and scored."""
        self.notes = (*self.notes, Note(text=text, code=code))

    def use_outputs(self, names: Sequence[str]) -> None:
        """Score an output of a graph under another name than the task's; `names` are the outputs of floats in order.

        Raises:
            InputError: the graph has several outputs of floats, and none has the name of the task's output.
        """
        missing = [name for name in self.outputs if name not in names]
        if not missing:
            return
        if len(self.outputs) > 1 or len(names) > 1:
            text = (
                f"the graph has the outputs {', '.join(names)}, and {self.name} scores {' and '.join(self.outputs)};"
                " rename its outputs, or give rows as arrays (.npz)"
            )
            details = {"output": missing[0], "outputs": tuple(names), "task": self.name}
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, **details)
        text = f"the output {names[0]} of the graph is scored as {self.outputs[0]}, because no other output has floats"
        self.outputs = (names[0],)
        self.note(text, NoteCode.OUTPUT_CHOSEN)

    def logits(self, outputs: Mapping[str, Any]) -> np.ndarray:
        """The logits among the outputs of an engine, or of a PyTorch model; several are stacked on a last axis.

        Raises:
            InputError: the model lacks an output of `Task.outputs`.
        """
        missing = next((name for name in self.outputs if name not in outputs), None)
        if missing is not None:
            text = f"the model has no output {missing}, which {self.name} scores; use a model that has it"
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, output=missing, task=self.name)
        values = [outputs[name] for name in self.outputs]
        arrays = [value if isinstance(value, np.ndarray) else value.float().cpu().numpy() for value in values]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)

    def measure(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Sufficient statistics of examples, `[examples, k]` float64, from which `score` computes the metric.

        A single forward computes them, unless the task overrides this method.
        """
        statistics = self.per_example(*self.logits_and_labels(forward, examples))
        if getattr(statistics, "ndim", 0) != 2 or len(statistics) != len(examples):
            raise self.returns_wrong("per_example", f"an array [examples, k] for {len(examples)} examples")
        return statistics

    def logits_and_labels(
        self, forward: Forward, examples: Sequence[Mapping[str, Any]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The logits of examples, `[batch, ...]`, and their labels, `[examples, ...]`."""
        batch = self.collate(examples)
        labels = self.pop_labels(batch, len(examples))
        return forward(batch), labels

    def pop_labels(self, batch: Batch, count: int) -> np.ndarray:
        """Remove the labels from a collated batch, and return them.

        Raises:
            UsageError: it has no labels, or not an element for each of `count` examples.
        """
        labels = batch.pop(self.label_name, None) if isinstance(batch, MutableMapping) else None
        if not isinstance(labels, np.ndarray) or not labels.ndim or len(labels) != count:
            expected = f"arrays of numpy, {self.label_name!r} with an element for each of {count} rows"
            raise self.returns_wrong("collate", expected)
        return labels

    def returns_wrong(self, method: str, expected: str) -> UsageError:
        """The error of a method, e.g. of a custom task, that returns something else than it must (`expected`)."""
        path = f"{type(self).__module__}:{type(self).__qualname__}.{method}"
        text = f"--task {path} returns something else than {expected}; correct the method"
        return UsageError(text, code=ErrorCode.TASK_FAILED, field="task", value=path)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The answers to a batch without labels as integers, by which engines are compared; None: they are not."""
        return None

    def labels_by(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[Any]] | None:
        """The columns of examples for which a model answers every example rightly; None: the task has none.

        The labels of the examples are placeholders. The column is `labels`, from `labels_of`, unless the task overrides
        this method.
        """
        labels = self.labels_of(self.logits_and_labels(forward, examples)[0], examples)
        return None if labels is None else {LABELS: labels}

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> Sequence[Any] | None:
        """The labels for which a model with these logits answers every example rightly; None: the task has none."""
        return None

    def targets_by(
        self, model: PreTrainedModel, examples: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Sequence[Any]] | None:
        """The columns of training examples without targets that a decoder reads, as the whole model generates them.

        None if examples have targets, or the model reads none.
        """
        return None

    def size_limits(self, examples: Dataset) -> tuple[int, int]:
        """The most texts or windows that the model reads for an example, and the most tokens of a text or window."""
        return 1, max(examples["length"][:], default=1)

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """Why the metric is not defined on the examples of a split, in a few words; None: it is defined."""
        return None

    def constant_score(self, statistics: np.ndarray) -> float | None:
        """The best score of the same answer to every example, from statistics `[examples, k]`; None: there is none."""
        return None

    def order_text(self, statistics: np.ndarray, split: str) -> str | None:
        """Why labels seem to number classes in another order than the model, by its metric sums; None: they do not."""
        return None

    @abstractmethod
    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Sufficient statistics `[examples, k]` from the logits of a collated batch and its labels."""

    def answers(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """The model's answers to examples, as text for a reader of the report.

        A single forward computes them, unless the task overrides this method.
        """
        return self.answer_texts(*self.logits_and_labels(forward, examples))

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The answer to each example as text, from the logits of a collated batch and its labels.

        Empty if answers have no text; the report then shows none.
        """
        return ()

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The expected answer to an example as text: the first of its `reference`; empty without that column."""
        reference = example.get("reference", "")
        return str(reference if isinstance(reference, str) else next(iter(reference), ""))

    def summarize(self, statistics: np.ndarray) -> np.ndarray:
        """Sufficient statistics of the metric, `[k, statistics]`, from those of all examples, `[examples, ...]`.

        Both are the same, unless the metric compares examples with each other.
        """
        return statistics

    def score(self, statistics: np.ndarray) -> float:
        """The metric from statistics `[examples, k]`, e.g. of examples that a bootstrap resampled."""
        return self._metric.value(statistics)


def task_classes() -> tuple[type[Task], ...]:
    """The class of every entry of `compressor.config.tasks.TASKS`, in order."""
    return tuple(entry.load() for entry in TASKS)


def make_task(folder: ModelFolder, request: RowsConfig) -> Task:
    """The task of a folder, with the columns, maximum length and metric of a recipe.

    Raises:
        InputError: rows cannot be read for the task, or the folder has no tokenizer or image processor.
        UsageError: the task does not have the metric.
    """
    unsupported: dict[str, Any] = {"code": ErrorCode.UNSUPPORTED_MODEL, "path": folder.source}
    if folder.own_task is not None:
        task_class = folder.own_task.task_class
        if not task_class.accepts(folder):
            text = f"{folder.source}: {task_class.name} does not accept this model; name another task (--task)"
            raise InputError(text, task=task_class.name, **unsupported)
    elif (task_name := READ_AS.get(folder.task, folder.task)) in TASK_NAMES:
        classes = (entry.load() for entry in TASKS if entry.name == task_name)
        task_class = next(task for task in classes if task.accepts(folder))
    else:
        text = (
            f"{folder.source}: rows cannot be read for the task {folder.task}, only for {', '.join(TASK_NAMES)}; name"
            " one of these or a custom task (--task), or run without data and with a plan"
        )
        raise InputError(text, task=folder.task, **unsupported)
    task_class.check_processor(folder)
    metrics = {metric.name: metric for metric in task_class.metrics}
    name = request.metric or task_class.metrics[0].name
    if name not in metrics:
        text = f"--metric {name}: {task_class.name} has the metrics {', '.join(metrics)}; name one of these"
        raise UsageError(text, code=ErrorCode.UNKNOWN_NAME, field="metric", value=name, known=tuple(metrics))
    try:
        task: Task = task_class(folder, request, metrics[name])
    except TypeError as error:
        if folder.own_task is None:
            raise
        path = folder.own_task.path
        text = (
            f"--task {path}: cannot be created ({one_line(error)}); take the arguments of compressor.tasks.Task:"
            " folder, request and metric"
        )
        raise UsageError(text, code=ErrorCode.TASK_FAILED, field="task", value=path) from error
    if isinstance(folder.model, HasSignature) and folder.sentence is None:
        outputs = folder.model.output_specs
        task.use_outputs([name for name, output in outputs.items() if output.dtype.kind == "f"])
    return task
