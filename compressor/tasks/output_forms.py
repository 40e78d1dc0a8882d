"""The meanings of a graph's outputs: classes, classes of tokens, numbers or vectors, with their labels and metrics."""

from __future__ import annotations

import re
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from compressor.answers import IGNORED, SPAN_ENDS
from compressor.errors import ErrorCode, InputError
from compressor.graph.signature import OutputSpec
from compressor.tasks.metrics import ACCURACY, PEARSON, SPEARMAN, TOKEN_ACCURACY, Metric, column_mean

_OF_VECTORS = re.compile(r"embed|hidden|state|pool|feature", re.IGNORECASE)
"""Names of outputs that are vectors, whatever their size."""
_OF_CLASSES = re.compile(r"logit|prob|class|score|label|softmax", re.IGNORECASE)
"""Names of outputs that are classes, whatever their number."""
_MAX_CLASSES = 1000
_WIDTHS = 64
"""The last axis of an output of another name is classes up to a maximum size, unless its size is a multiple of a
number, as the widths of models are."""


class Form(ABC):
    """What an output of a graph means: how it is scored, and the labels that it is compared with.

    Attributes:
        description: what is scored, for a note.
        metrics: the metrics, the default first.
        compares_answers: whether answers are integers, by which engines are compared.
        is_vector: whether all numbers of a row are a vector, whose difference is the loss without labels.
        label_type: type of a label in the column of examples.
        has_texts: whether an answer is short enough to be shown.
        placeholder: the label of a row without labels.
    """

    description: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    compares_answers: ClassVar[bool] = True
    is_vector: ClassVar[bool] = False
    has_texts: ClassVar[bool] = True
    label_type: ClassVar[np.dtype[Any]] = np.dtype(np.int64)
    placeholder: ClassVar[Any] = 0

    @abstractmethod
    def fits(self, name: str, output: OutputSpec) -> bool:
        """Whether an output of floats has the axes of this form."""

    @abstractmethod
    def takes(self, labels: np.ndarray) -> bool:
        """Whether labels of all rows have the type and axes of this form."""

    def first_wrong(self, labels: np.ndarray, output: OutputSpec) -> int | None:
        """The index of the first row whose label no answer can equal, or None."""
        return None

    def column(self, labels: np.ndarray) -> pa.Array:
        """Labels of rows as a column of examples."""
        return pa.array(labels.reshape(len(labels)).astype(self.label_type))

    def batch(self, labels: Sequence[Any], mask: np.ndarray | None) -> np.ndarray:
        """The labels of a batch, `[batch, ...]`, from cells of their column and the mask of the output's positions."""
        return np.array(labels, np.int64 if self.label_type.kind == "i" else np.float32)

    def per_example(self, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Sufficient statistics `[batch, k]` of the metrics."""
        return np.stack([np.array(self.answers(outputs, None)), labels], axis=-1).astype(np.float64)

    @abstractmethod
    def answers(self, outputs: np.ndarray, mask: np.ndarray | None) -> list[Any]:
        """The cells of the column of labels for which these outputs are right, from the mask of scored positions."""

    def ids(self, outputs: np.ndarray, mask: np.ndarray | None) -> np.ndarray | None:
        """The answers as integers, see `Task.answer_ids`."""
        return None

    def obstacle(self, labels: Sequence[Any]) -> str | None:
        """Why the metric is not defined for these labels, see `Task.metric_obstacle`."""
        return None

    def constant(self, statistics: np.ndarray, metric: Metric) -> float | None:
        """See `Task.constant_score`."""
        return None

    def reference(self, label: Any) -> str:
        """A label, or an answer, as text."""
        return ""


class Classes(Form):
    """A logit for each class, `[row, class]`; the answer is the largest. Labels are integers `[row]`."""

    description = "a class of each row"
    metrics = (ACCURACY,)

    def fits(self, name: str, output: OutputSpec) -> bool:
        return len(output.shape) == 2 and output.shape[1] != 1

    def takes(self, labels: np.ndarray) -> bool:
        return labels.ndim == 1 and labels.dtype.kind in "biu"

    def first_wrong(self, labels: np.ndarray, output: OutputSpec) -> int | None:
        return _first((labels < 0) | (False if output.shape[-1] is None else labels >= output.shape[-1]))

    def answers(self, outputs: np.ndarray, mask: np.ndarray | None) -> list[Any]:
        return list(map(int, outputs.argmax(-1)))

    def ids(self, outputs: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        return outputs.argmax(-1)

    def constant(self, statistics: np.ndarray, metric: Metric) -> float | None:
        counts = np.unique(statistics[:, 1], return_counts=True)[1]
        return float(counts.max(initial=0) / max(1, len(statistics)))

    def reference(self, label: Any) -> str:
        return f"class {label}"


class TokenClasses(Form):
    """A logit for each class of each token, `[row, position, class]`.

    Labels are integers `[row, position]`; -100 and padded positions are not scored.
    """

    description = "a class of each token"
    metrics = (TOKEN_ACCURACY,)
    has_texts = False
    placeholder = ()

    def fits(self, name: str, output: OutputSpec) -> bool:
        return len(output.shape) == 3 and output.shape[2] != 1

    def takes(self, labels: np.ndarray) -> bool:
        return labels.ndim == 2 and labels.dtype.kind in "iu" and labels.shape[1] > 1

    def first_wrong(self, labels: np.ndarray, output: OutputSpec) -> int | None:
        above = False if output.shape[-1] is None else labels >= output.shape[-1]
        return _first((((labels < 0) & (labels != IGNORED)) | above).any(1))

    def column(self, labels: np.ndarray) -> pa.Array:
        ends = np.arange(len(labels) + 1, dtype=np.int32) * labels.shape[1]
        return pa.ListArray.from_arrays(ends, labels.astype(np.int64).ravel())

    def batch(self, labels: Sequence[Any], mask: np.ndarray | None) -> np.ndarray:
        width = max(1, *map(len, labels)) if mask is None else mask.shape[1]
        values = np.full((len(labels), width), IGNORED, np.int64)
        for row, cells in enumerate(labels):  # without labels, every token counts
            values[row, : len(cells) or width] = cells[:width] if cells else 0
        return values if mask is None else np.where(mask == 0, IGNORED, values)

    def per_example(self, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        labels = with_positions(labels, outputs.shape[1], IGNORED)
        is_scored = labels != IGNORED
        is_right = is_scored & (outputs.argmax(-1) == labels)
        return np.stack([is_right.sum(1), is_scored.sum(1)], axis=-1).astype(np.float64)

    def answers(self, outputs: np.ndarray, mask: np.ndarray | None) -> list[Any]:
        classes = outputs.argmax(-1)
        return np.where(True if mask is None else mask, classes, IGNORED).tolist()

    def ids(self, outputs: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        classes = outputs.argmax(-1)
        return classes.ravel() if mask is None else classes[mask]

    def obstacle(self, labels: Sequence[Any]) -> str | None:
        is_scored = any(label != IGNORED for row in labels for label in row)
        return None if is_scored or not any(map(len, labels)) else f"every token has the label {IGNORED}"


class Numbers(Form):
    """A number for each row, `[row]` or `[row, 1]`, and so are labels."""

    description = "a number of each row"
    metrics = (SPEARMAN, PEARSON)
    compares_answers = False
    label_type = np.dtype(np.float64)
    placeholder = 0.0

    def fits(self, name: str, output: OutputSpec) -> bool:
        return len(output.shape) > 0 and output.shape[1:] in ((), (1,))

    def takes(self, labels: np.ndarray) -> bool:
        return labels.shape[1:] in ((), (1,))

    def first_wrong(self, labels: np.ndarray, output: OutputSpec) -> int | None:
        return _first(~np.isfinite(labels.reshape(len(labels))))

    def answers(self, outputs: np.ndarray, mask: np.ndarray | None) -> list[Any]:
        return list(map(float, outputs.reshape(len(outputs))))

    def obstacle(self, labels: Sequence[Any]) -> str | None:
        return None if len(set(labels)) > 1 else f"every row has the label {labels[0]:g}"

    def constant(self, statistics: np.ndarray, metric: Metric) -> float | None:
        return metric.value(statistics * [0, 1])

    def reference(self, label: Any) -> str:
        return f"{label:.4g}"


class Vectors(Form):
    """All numbers of a row, `[row, ...]`, without padded positions of `[row, position, ...]`.

    They are compared with the outputs of the whole graph, whose vectors of norm one are kept in a temporary file; the
    column of labels has their indices.
    """

    description = "a vector of each row"
    metrics = (Metric("cosine", partial(column_mean, 0), maximum=1.0),)
    compares_answers = False
    is_vector = True
    has_texts = False
    placeholder = -1

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as this object is in use
        weakref.finalize(self, self._file.close)
        self._spans: list[tuple[int, tuple[int, ...]]] = []

    def fits(self, name: str, output: OutputSpec) -> bool:
        return len(output.shape) > 1 and output.shape[1:] != (1,) and name not in SPAN_ENDS

    def takes(self, labels: np.ndarray) -> bool:
        return False

    def column(self, labels: np.ndarray) -> pa.Array:
        raise AssertionError("no labels are vectors")

    def batch(self, labels: Sequence[Any], mask: np.ndarray | None) -> np.ndarray:
        if self.placeholder in labels:
            return np.zeros(len(labels), np.float32)
        vectors = []
        for start, shape in (self._spans[number] for number in labels):
            self._file.seek(start)
            stored = np.frombuffer(self._file.read(2 * int(np.prod(shape))), np.float16)
            vectors.append(stored.reshape(shape).astype(np.float32))  # NaN at positions that are not scored
        longest = max(map(len, vectors))
        return np.concatenate([with_positions(vector[None], longest, np.nan) for vector in vectors])

    def per_example(self, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        labels = with_positions(labels, outputs.shape[1], np.nan)
        is_scored = ~np.isnan(labels)
        pairs = (np.where(is_scored, values, 0).reshape(len(labels), -1) for values in (outputs, labels))
        first, second = (values.astype(np.float64) for values in pairs)
        norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
        return ((first * second).sum(1) / np.maximum(norms, np.finfo(np.float64).tiny))[:, None]

    def answers(self, outputs: np.ndarray, mask: np.ndarray | None) -> list[Any]:
        first = len(self._spans)
        for row, values in enumerate(outputs):
            kept = values if mask is None else values[: int(np.flatnonzero(mask[row]).max(initial=0)) + 1]
            vector = np.array(kept, np.float32)
            if mask is not None:
                vector[~mask[row, : len(vector)]] = 0
            if not np.isfinite(vector).all():
                raise InputError(
                    "the whole graph returns NaN or infinity for a row, so nothing can be compared with it; check its "
                    "weights and the row",
                    code=ErrorCode.NOT_FINITE,
                )
            norm = np.sqrt(np.square(vector, dtype=np.float64).sum())
            vector = (vector / max(norm, np.finfo(np.float32).tiny)).astype(np.float16)
            if mask is not None:
                vector[~mask[row, : len(vector)]] = np.nan
            self._spans.append((self._file.seek(0, 2), vector.shape))
            self._file.write(vector.tobytes())
        return list(range(first, len(self._spans)))


def _first(is_wrong: np.ndarray) -> int | None:
    """The index of the first row that is wrong, or None."""
    return int(is_wrong.argmax()) if is_wrong.any() else None


def with_positions(values: np.ndarray, positions: int, fill: float) -> np.ndarray:
    """Values `[batch, position, ...]`, cut or filled to a number of positions."""
    missing = positions - values.shape[1]
    if missing <= 0:
        return values[:, :positions]
    return np.pad(values, [(0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)], constant_values=fill)


def are_classes(name: str, output: OutputSpec) -> bool:
    """Whether the last axis of an output is classes, by its name, else by its size."""
    if _OF_VECTORS.search(name) or not output.shape:
        return False
    size = output.shape[-1]
    is_usual = size is not None and size <= _MAX_CLASSES and size % _WIDTHS != 0
    return is_usual or _OF_CLASSES.search(name) is not None
