"""Arrays: the rows of a bare graph are arrays by the names of its inputs, and its outputs decide how it is scored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from datasets.fingerprint import generate_random_fingerprint
from torch import Tensor
from transformers import PretrainedConfig

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, RowError
from compressor.graph.program import HasSignature, InputSpec, OutputSpec
from compressor.model_folder import ModelFolder
from compressor.models.classifiers import declare_vector
from compressor.results import Note, NoteCode
from compressor.tasks.array_files import MASK, RowArrays, check_arrays, needed_casts, read_arrays
from compressor.tasks.base import Task
from compressor.tasks.forwards import DECODER_MASK, IGNORED, LABELS, SPAN_ENDS, scored_mask
from compressor.tasks.labelled_rows import label_order
from compressor.tasks.metrics import Metric
from compressor.tasks.output_forms import Classes, Form, Numbers, TokenClasses, Vectors, are_classes, with_positions
from compressor.tasks.row_origin import RowOrigin, SplitRows

_LABEL_NAMES = (LABELS, "label")
"""Names of arrays of labels, if they are no inputs of the graph."""
_LABELLED: tuple[Form, ...] = (Classes(), TokenClasses(), Numbers())
"""The forms that labels may have, in the order in which they are tried."""
_OF_DECODER = "decoder_"
"""Beginning of the names of a decoder's inputs, whose positions are not those of the attention mask."""


class Arrays(Task):
    """Rows of a bare graph: an array `[row, ...]` for each input, and possibly one of labels.

    The first output of floats that labels or the metric fit is scored, see `Form`; without both, the first output of
    floats. Labels are the array `labels` or `label`. Rows without labels are compared with the answers of the whole
    graph.

    Rows are padded to the same length in a file. Where a graph reads `attention_mask` and its positions have a free
    axis, a batch has as many positions as its longest row. Arrays stay in their files or in memory; examples have the
    columns `index`, the number of the row among all rows that were read; `digest`, the hash of its inputs; `length`,
    the tokens of the mask, else the size of the second axis of the first input of integers, else 1; `positions`, up to
    the last of these tokens; and `labels`.

    Raises:
        InputError: the graph has no output that a metric fits.
    """

    name = "arrays"
    metrics: ClassVar[tuple[Metric, ...]] = (*Classes.metrics, *Numbers.metrics, *Vectors.metrics)

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        signature: Any = folder.model
        self._config: PretrainedConfig = folder.model.config
        self._inputs: Mapping[str, InputSpec] = signature.input_specs
        outputs: Mapping[str, OutputSpec] = signature.output_specs
        self._outputs = {name: output for name, output in outputs.items() if output.dtype.kind == "f"}
        self._request = request
        self._parts: list[RowArrays] = []
        self._ends = np.zeros(0, np.int64)
        self._padded = self._possibly_padded()
        self._vectors = Vectors()
        self._read_notes: tuple[Note, ...] = ()
        output, form = self._default(folder)
        self._score_by(output, form)

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        """Whether the model is a bare graph."""
        return isinstance(folder.model, HasSignature)

    @classmethod
    def check_processor(cls, folder: ModelFolder) -> None:
        """No processor is needed: rows are inputs of the graph."""

    @property
    def compares_answers(self) -> bool:
        """Whether answers are classes."""
        return self._form.compares_answers

    @property
    def loss_outputs(self) -> tuple[str, ...]:
        """The scored output, or both ends of a span."""
        has_span = self.outputs[0] in SPAN_ENDS and set(SPAN_ENDS) <= self._outputs.keys()
        return SPAN_ENDS if has_span else self.outputs

    def declare_answers(self, config: PretrainedConfig) -> None:
        """Declare whether the scored output is a vector."""
        declare_vector(config, is_vector=self._form.is_vector)

    def read(self, source: str) -> SplitRows:
        """The rows of a .npz file, or of a folder of .npz or .npy files; see `array_files.read_arrays`."""
        rows, origins = {}, {}
        labels = _LABEL_NAMES if self._request.label_column is None else (*_LABEL_NAMES, self._request.label_column)
        casts: dict[str, None] = {}
        for split, parts in read_arrays(source).items():
            first = len(self._parts)
            for part in parts:
                check_arrays(part, self._inputs, labels)
                casts |= dict.fromkeys(needed_casts(part, self._inputs))
                self._add(part, parts[0])
            start = int(self._ends[first] - self._parts[first].rows)
            rows[split] = Dataset(
                pa.table({"index": np.arange(start, int(self._ends[-1]))}), fingerprint=generate_random_fingerprint()
            )
            origins[split] = RowOrigin(tuple((part.path, part.rows) for part in parts))
        if casts:
            text = f"{source}: arrays are converted to the types that the graph reads: {', '.join(casts)}"
            self._read_notes = (*self._read_notes, Note(text=text, code=NoteCode.ARRAYS_CONVERTED))
            self._update_notes()
        return SplitRows(rows, origins)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Choose the output and the metric by the labels, and check them.

        Raises:
            InputError: there are no labels, or the metric compares with the whole graph; no output fits the labels.
            RowError: the graph has no such class.
        """
        requested = self._request.metric
        name = self._label_name(self._part(rows), source)
        if requested in [metric.name for metric in Vectors.metrics]:
            text = f"{source}: the metric {requested} reads no labels; omit them, or choose another metric"
            raise InputError(text, code=ErrorCode.COLUMN_MISSING, field="metric", value=requested)
        labels = self._part(rows).arrays[name]
        choice = self._choice(requested, labels)
        if choice is None:
            kinds = ", ".join(f"{output} {_axes(spec)}" for output, spec in self._outputs.items())
            problem = (
                f"{'no metric' if requested is None else requested} compares them with an output ({kinds}); give"
                " integers [row] or [row, position] for classes, or numbers [row] for an output [row] or [row, 1]"
            )
            raise _wrong_kind(name, labels, source, problem)
        self._score_by(*choice)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """The examples of rows, with their labels."""
        part = self._part(rows)
        name = self._label_name(part, source)
        labels = self._labels(name, np.asarray(rows["index"][:]))
        if not self._form.takes(labels):
            raise _wrong_kind(name, labels, source, "other rows have labels of another kind; give all rows the same")
        output = self._outputs[self.outputs[0]]
        if (row := self._form.first_wrong(labels, output)) is not None:
            problem = (
                f"{labels[row]} in {name!r} is none of the output {self.outputs[0]} {_axes(output)}; correct it or"
                " remove the row"
            )
            raise RowError.of(
                source, row + 1, problem, code=ErrorCode.LABEL_MISMATCH, array=name, value=labels[row].tolist()
            )
        return self._examples(rows, self._form.column(labels))

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """The examples of rows, whose labels are placeholders."""
        placeholder = self._form.placeholder
        values = [list(placeholder) if isinstance(placeholder, tuple) else placeholder] * len(rows)
        return self._examples(rows, pa.array(values, pa.list_(pa.int64()) if isinstance(placeholder, tuple) else None))

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The inputs of the graph, `[batch, ...]` each, and `labels`.

        Raises:
            InputError: rows of several files have other axes.
        """
        indices = np.array([example["index"] for example in examples], np.int64)
        longest = max(int(example["positions"]) for example in examples)
        batch = {name: torch.from_numpy(self._input(name, indices, longest)) for name in self._inputs}
        labels = [example[LABELS] for example in examples]
        return {**batch, LABELS: self._form.batch(labels, self._mask_of(batch))}

    def size_limits(self, examples: Dataset) -> tuple[int, int]:
        """One input a row, and the positions of the longest."""
        return 1, max(examples["positions"][:], default=1)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """See `Form.per_example`."""
        return self._form.per_example(logits, labels)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray | None:
        """The classes of rows or tokens; None for other outputs."""
        return self._form.ids(logits, self._scored(logits, batch))

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The classes, numbers or vectors that a model with these outputs answers."""
        batch = self.model_inputs(self.collate(examples))
        batch.pop(LABELS)
        return self._form.answers(logits, self._scored(logits, batch))

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """A correlation needs different labels, and the accuracy of tokens one that is scored."""
        return self._form.obstacle(examples[LABELS][:])

    def constant_score(self, statistics: np.ndarray) -> float | None:
        """The score of the most frequent class, or of the same number for every row; None for other outputs."""
        return self._form.constant(statistics, self._metric)

    def order_text(self, statistics: np.ndarray, split: str) -> str | None:
        """Why labels seem to number the classes in another order than the graph."""
        classes = self._outputs[self.outputs[0]].shape[-1]
        if not isinstance(self._form, Classes) or classes is None:
            return None
        order = label_order(statistics, classes)
        if order is None:
            return None
        return (
            f"the labels of the {split} rows seem to have another order than the classes of the graph: it is right more"
            f" often if its classes 0 to {classes - 1} are the labels {', '.join(map(str, order))}; number the labels"
            " as the graph does"
        )

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The class or the number of each row; none for other outputs."""
        return self._form.texts(logits)

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The class or the number that is right."""
        return self._form.reference(example[LABELS])

    def _default(self, folder: ModelFolder) -> tuple[str, Form]:
        """The output that is scored without labels, and its form; raise InputError without such an output."""
        if LABELS in self._inputs:
            text = f"{folder.source}: reads {LABELS!r} as an input, as a graph for training does; use one for inference"
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=folder.source, input=LABELS)
        requested = self._request.metric
        usual = ((name, form) for name in self._outputs if (form := self._usual(name)) is not None)
        choice = next(usual, None) if requested is None else self._choice(requested)
        if choice is None:
            listed = ", ".join(f"{name} {_axes(output)}" for name, output in self._outputs.items()) or "none"
            fit = "no metric fits" if requested is None else f"the metric {requested} does not fit"
            text = (
                f"{folder.source}: {fit} the outputs of floats of the graph ({listed}); use a graph that"
                " returns logits, numbers or vectors of each row, or another metric"
            )
            details = {"path": folder.source, "outputs": tuple(self._outputs), "metric": requested}
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, **details)
        return choice

    def _usual(self, name: str) -> Form | None:
        """The form that the name and the axes of an output suggest; None: no form has its axes."""
        output = self._outputs[name]
        forms: list[Form] = [Numbers(), self._vectors]
        if name in SPAN_ENDS or are_classes(name, output):
            forms = [Classes(), *([TokenClasses()] if MASK in self._inputs else []), *forms]
        return next((form for form in forms if form.fits(name, output)), None)

    def _choice(self, metric: str | None, labels: np.ndarray | None = None) -> tuple[str, Form] | None:
        """The first form for a metric and labels that an output has, and the output; None: there is none.

        Outputs whose usual form it is come first.
        """
        for form in (*_LABELLED, self._vectors):
            if metric is not None and all(metric != known.name for known in form.metrics):
                continue
            if labels is not None and not form.takes(labels):
                continue
            names = [name for name, output in self._outputs.items() if form.fits(name, output)]
            if names:
                return min(names, key=lambda name: type(self._usual(name)) is not type(form)), form
        return None

    def _score_by(self, output: str, form: Form) -> None:
        """Score an output in a form."""
        self.outputs, self._form = (output,), form
        self._metric = next((known for known in form.metrics if known.name == self._request.metric), form.metrics[0])
        self.declare_answers(self._config)
        self._update_notes()

    def _update_notes(self) -> None:
        (output,) = self.outputs
        others = [name for name in self._outputs if name not in (output, *self.loss_outputs)]
        text = (
            f"the output {output} {_axes(self._outputs[output])} is scored as {self._form.description}"
            f" ({self._metric.name}; the task has {', '.join(metric.name for metric in self.metrics)})"
        )
        text += f"; {', '.join(others)} {'is' if len(others) == 1 else 'are'} not compared" if others else ""
        self.notes = (*self._read_notes, Note(text=text, code=NoteCode.METRIC_CHOSEN))

    def _add(self, part: RowArrays, first: RowArrays) -> None:
        """Add arrays to those of all rows; raise InputError if they have other names or axes than the first file."""
        for name in sorted({*part.arrays} ^ {*first.arrays}):
            text = f"{part.path}: {name!r} is in {'this file' if name in part.arrays else first.path.name} alone"
            text += "; rows of a folder need the same arrays"
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=part.path, array=name)
        self._parts.append(part)
        self._ends = np.cumsum([part.rows for part in self._parts])
        if MASK in self._padded:
            positions = part.arrays[MASK].shape[1]
            self._padded = {name for name in self._padded if part.arrays[name].shape[1] == positions}
        for name in (name for name in self._inputs if name not in self._padded):
            shapes = [rows.arrays[name].shape[1:] for rows in (part, first)]
            if shapes[0] != shapes[1]:
                raise self._axes_differ(name, *shapes)

    def _axes_differ(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> InputError:
        text = f"{name!r} has the axes {list(shape)} and {list(expected)} in several files; pad rows to equal axes"
        return InputError(text, code=ErrorCode.TENSOR_MISMATCH, array=name, shape=shape, expected=expected)

    def _possibly_padded(self) -> set[str]:
        """The inputs whose second axis may be that of the attention mask; none without a mask of any length."""
        mask = self._inputs.get(MASK)
        if mask is None or len(mask.shape) != 2 or mask.shape[1] is not None:
            return set()
        free = (name for name, spec in self._inputs.items() if len(spec.shape) > 1 and spec.shape[1] is None)
        return {name for name in free if not name.startswith(_OF_DECODER)}

    def _part(self, rows: Dataset) -> RowArrays:
        """The arrays of the first row."""
        return self._parts[int(np.searchsorted(self._ends, rows["index"][0], side="right"))]

    def _label_name(self, part: RowArrays, source: str) -> str:
        """The name of the array of labels; raise InputError without one."""
        requested = self._request.label_column
        known = [name for name in part.arrays if name not in self._inputs]
        names = _LABEL_NAMES if requested is None else (requested,)
        name = next((name for name in names if name in known), None)
        if name is None:
            text = f"{source}: no array of labels among {', '.join(part.arrays)}; add one named {names[0]!r}"
            details = {"field": "label_column", "columns": tuple(part.arrays)}
            raise InputError(text, code=ErrorCode.COLUMN_MISSING, **details)
        return name

    def _rows_of(self, name: str, indices: np.ndarray) -> Iterable[np.ndarray]:
        """The rows of an array with some indices among all rows."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        for index, number in zip(indices.tolist(), numbers.tolist(), strict=True):
            part = self._parts[number]
            yield part.arrays[name][index - int(self._ends[number]) + part.rows]

    def _gather(self, name: str, indices: np.ndarray, positions: int | None = None) -> np.ndarray:
        """Rows of an array, `[rows, ...]`; with `positions`, the first ones, filled with zeros."""
        rows = list(self._rows_of(name, indices))
        if positions is not None:
            rows = [with_positions(row[None], positions, 0)[0] for row in rows]
        for row in rows:
            if row.shape != rows[0].shape:
                raise self._axes_differ(name, row.shape, rows[0].shape)
        return np.stack(rows)

    def _labels(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Labels of rows; those of tokens are padded to the longest row of all files."""
        widths = {len(row) for row in self._rows_of(name, indices) if row.ndim == 1}
        if len(widths) < 2:
            return self._gather(name, indices)
        return np.concatenate([with_positions(row[None], max(widths), IGNORED) for row in self._rows_of(name, indices)])

    def _input(self, name: str, indices: np.ndarray, positions: int) -> np.ndarray:
        """An input of the graph for some rows, with so many positions if its rows are padded."""
        values = self._gather(name, indices, positions if name in self._padded else None)
        return values.astype(self._inputs[name].dtype, copy=False)

    def _examples(self, rows: Dataset, labels: pa.Array) -> Dataset:
        """The examples of rows, with a column of labels."""
        indices = np.asarray(rows["index"][:], np.int64)
        lengths, positions = self._lengths(indices)
        columns = {
            "index": pa.array(indices),
            "digest": pa.array(self._digests(indices, positions)),
            "length": pa.array(lengths),
            "positions": pa.array(positions),
            LABELS: labels,
        }
        return Dataset(pa.table(columns), fingerprint=generate_random_fingerprint())

    def _lengths(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The length of rows, and their positions up to the last that the mask keeps."""
        if MASK in self._inputs and len(self._inputs[MASK].shape) == 2:
            masks = (row != 0 for row in self._rows_of(MASK, indices))
            pairs = [
                (int(mask.sum()), int(np.flatnonzero(mask)[-1]) + 1 if self._padded else len(mask)) for mask in masks
            ]
            lengths, positions = np.array(pairs, np.int64).reshape(-1, 2).T
            return lengths, positions
        texts = (name for name, spec in self._inputs.items() if spec.dtype.kind in "iu" and len(spec.shape) > 1)
        name = next(texts, None)
        sizes = [1] * len(indices) if name is None else [len(row) for row in self._rows_of(name, indices)]
        lengths = np.array(sizes, np.int64)
        return lengths, lengths

    def _digests(self, indices: np.ndarray, positions: np.ndarray) -> list[str]:
        """A hash of the inputs of each row without padding, which does not depend on the types in its file."""
        hashes = [hashlib.blake2b(digest_size=16) for _ in indices]
        for name, spec in sorted(self._inputs.items()):
            for row, end, digest in zip(self._rows_of(name, indices), positions.tolist(), hashes, strict=True):
                values = np.ascontiguousarray(row[:end] if name in self._padded else row, spec.dtype)
                digest.update(f"{name} {values.shape} ".encode())
                digest.update(values.tobytes())
        return [digest.hexdigest() for digest in hashes]

    def _mask_of(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """The attention mask of a batch, if the positions of the scored output are those of the mask."""
        output = self._outputs[self.outputs[0]]
        name = DECODER_MASK if any(name.startswith(_OF_DECODER) for name in self._inputs) else MASK
        mask = self._inputs.get(name)
        return batch[name] if mask is not None and output.shape[1:-1] == mask.shape[1:] else None

    def _scored(self, outputs: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray | None:
        """The scored positions of an output `[batch, position, ...]`; None for an output of other axes."""
        return scored_mask(batch, *outputs.shape[:2]).numpy() if outputs.ndim > 2 else None


def _axes(output: OutputSpec) -> str:
    """The axes of an output, e.g. `[row, 3]`; `[]`: a single number, or no tensor."""
    if not output.shape:
        return "[]"
    return f"[{', '.join(['row', *('any' if size is None else str(size) for size in output.shape[1:])])}]"


def _wrong_kind(name: str, labels: np.ndarray, source: str, problem: str) -> InputError:
    """The error of labels whose type or axes do not suit."""
    text = f"{source}: {name!r} is {labels.dtype} of shape {list(labels.shape)}, and {problem}"
    return InputError(text, code=ErrorCode.LABEL_MISMATCH, array=name, dtype=str(labels.dtype), shape=labels.shape)
