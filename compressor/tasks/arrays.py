"""Arrays: the rows of a bare graph are arrays by the names of its inputs, and its outputs decide how it is scored."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.fingerprint import generate_random_fingerprint

from compressor.answers import DECODER_MASK, IGNORED, LABELS, MASK, SPAN_ENDS, declare_vector, scored_mask
from compressor.config.sections import RowsConfig
from compressor.config.values import ARRAYS
from compressor.errors import ErrorCode, InputError, RowError, suggestion
from compressor.graph.signature import HasSignature, InputSpec, OutputSpec
from compressor.results import Note, NoteCode
from compressor.silence_libraries import one_line
from compressor.tasks.base import Batch, Task
from compressor.tasks.labelled_rows import label_order
from compressor.tasks.metrics import Metric
from compressor.tasks.output_forms import Classes, Form, Numbers, TokenClasses, Vectors, are_classes, with_positions
from compressor.tasks.row_store import RowOrigin, SplitRows
from compressor.tasks.splits import files_by_split

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from compressor.model_folder import ModelFolder

_SINGLE = ".npy"
_CHUNK_BYTES = 2**24  # size of the rows whose values are checked at once
_DAMAGED = (ValueError, EOFError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Errors of numpy and `zipfile` for files that are damaged, encrypted, or no arrays."""


@dataclass(frozen=True, eq=False)
class RowArrays:
    """The arrays of a .npz file, or of a folder of .npy files, which are memory-mapped.

    Attributes:
        path: the file or the folder.
        arrays: the inputs, and labels if there are any, `[row, ...]` each.
    """

    path: Path
    arrays: Mapping[str, np.ndarray]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.arrays.values())))


def names_arrays(source: str) -> bool:
    """Whether rows are arrays: a .npz file, or a folder of .npz or .npy files."""
    path = Path(source)
    if path.is_dir():
        return any(any(path.glob(f"*{suffix}")) for suffix in (ARRAYS, _SINGLE))
    return path.suffix.lower() == ARRAYS


def read_arrays(source: str) -> dict[str, list[RowArrays]]:
    """The arrays of a .npz file, or of a folder of .npy or of .npz files, by the name of their split.

    The files of a folder of .npz are of one split named `""`, unless their names begin with those of splits, such as
    `train-0.npz` and `dev.npz`.

    Raises:
        InputError: there is no such file, it is damaged, has objects that would be unpickled, has no rows or empty
            ones, or is something else.
    """
    splits = _read_splits(source)
    for part in (part for parts in splits.values() for part in parts):
        if any(array.shape[:1] == (0,) for array in part.arrays.values()):
            text = f"{part.path}: has no rows; give at least one row"
            raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, path=part.path, rows=0)
        for name, array in part.arrays.items():
            if not array.size:
                text = f"{part.path}: rows of the array {name!r} are empty ({_axes(array.shape)}); give numbers"
                raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, path=part.path, array=name, shape=array.shape)
    return splits


def _read_splits(source: str) -> dict[str, list[RowArrays]]:
    """See `read_arrays`; arrays may have no rows."""
    path = Path(source)
    if not path.is_dir():
        if path.exists() and path.suffix.lower() != ARRAYS:
            raise _no_arrays(path, ErrorCode.INVALID_VALUE)
        return {"": [_read_archive(path)]}
    files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    archives, singles = ([file for file in files if file.suffix.lower() == end] for end in (ARRAYS, _SINGLE))
    if archives and singles:
        text = f"{path}: has {archives[0].name} and {singles[0].name}; keep one kind of files in the folder"
        raise InputError(text, code=ErrorCode.CONTRADICTION, path=path)
    if singles:
        arrays = {}
        for single in singles:
            with _reading(single), single.open("rb") as file:
                shape = _require_numbers(single, single.stem, file)
                mode: Literal["r"] | None = None if 0 in shape else "r"
                arrays[single.stem] = np.load(single, mmap_mode=mode, allow_pickle=False)
        return {"": [RowArrays(path, arrays)]}
    if not archives:
        raise _no_arrays(path, ErrorCode.FILE_MISSING)
    return {split: [_read_archive(file) for file in named] for split, named in files_by_split(archives, source).items()}


def check_arrays(part: RowArrays, inputs: Mapping[str, InputSpec], labels: Collection[str]) -> None:
    """Check that arrays are what a graph reads, so that `cast` converts them; names in `labels` are no inputs.

    Raises:
        InputError: an input has no array, an array belongs to no input, or has another number of rows, type or axes.
        RowError: a row has a number that its type cannot hold, an id below zero, no token, or NaN or infinity.
    """
    arrays, path = part.arrays, part.path
    for name in (name for name in inputs if name not in arrays):
        text = f"{path}: no array is named {name!r}, an input of the graph; add it"
        raise InputError(text, code=ErrorCode.COLUMN_MISSING, path=path, input=name, columns=tuple(arrays))
    for name in (name for name in arrays if name not in inputs and name not in labels):
        text = f"{path}: the array {name!r} is no input of the graph, and no label; {suggestion(name, list(inputs))}"
        raise InputError(text, code=ErrorCode.UNKNOWN_NAME, path=path, array=name, known=tuple(inputs))
    for name, array in arrays.items():
        if not array.ndim:
            raise _mismatch(part, name, "is a single number", "[row, ...]", shape=())
        if len(array) != part.rows:
            first = next(iter(arrays))
            text = f"{path}: {name!r} has {len(array)} rows, {first!r} has {part.rows}; give each array the same rows"
            details = {"path": path, "array": name, "rows": len(array), "expected": part.rows}
            raise InputError(text, code=ErrorCode.INVALID_ROWS, **details)
    integers = [name for name, spec in inputs.items() if spec.dtype.kind in "iu"]
    for name, spec in inputs.items():
        array = arrays[name]
        _check_type(part, name, spec)
        are_ids = name in integers and ("ids" in name.lower() or len(integers) == 1)
        count = max(1, _CHUNK_BYTES * len(array) // max(1, array.nbytes))
        for start in range(0, len(array), count):
            _check_values(part, name, spec, start, array[start : start + count], are_ids=are_ids)


def _no_arrays(path: Path, code: ErrorCode) -> InputError:
    text = (
        f"{path}: no arrays; the rows of a graph without a tokenizer are a {ARRAYS} file with an array per input, a"
        f" folder of them, or a folder with a {_SINGLE} file per input"
    )
    return InputError(text, code=code, path=path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = ErrorCode.FILE_MISSING if isinstance(error, FileNotFoundError) else ErrorCode.FILE_UNREADABLE
        text = f"{path}: cannot be read ({error.strerror or one_line(error)}); check the path"
        raise InputError(text, code=code, path=path) from error
    except _DAMAGED as error:
        reason = one_line(error)
        text = f"{path}: is damaged, or no file of numpy ({reason}); save it again"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path, reason=reason) from error


def _read_archive(path: Path) -> RowArrays:
    with _reading(path):
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(_SINGLE) for name in archive.namelist() if name.endswith(_SINGLE)]
            for name in names:
                with archive.open(f"{name}{_SINGLE}") as member:
                    _require_numbers(path, name, member)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names}
    if not arrays:
        raise _no_arrays(path, ErrorCode.FILE_UNREADABLE)
    return RowArrays(path, arrays)


def _require_numbers(path: Path, name: str, file: IO[bytes]) -> tuple[int, ...]:
    """The shape that the header of an array declares; raise InputError unless it holds numbers, ValueError if damaged.

    Nothing of an array of objects is unpickled.
    """
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.kind not in "biuf":
        kind = "objects" if dtype.hasobject else dtype
        text = f"{path}: the array {name!r} holds {kind}, not numbers; save it with a type of integers or floats"
        raise InputError(text, code=ErrorCode.INVALID_ROWS, path=path, array=name, dtype=str(dtype))
    return tuple(shape)


def _mismatch(part: RowArrays, name: str, problem: str, needed: str, **details: Any) -> InputError:
    text = f"{part.path}: the array {name!r} {problem}; the graph reads {needed}"
    return InputError(text, code=ErrorCode.TENSOR_MISMATCH, path=part.path, array=name, **details)


def _check_type(part: RowArrays, name: str, spec: InputSpec) -> None:
    """Raise InputError unless an array has the axes of its input, and integers for integers or floats for floats."""
    array = part.arrays[name]
    if (array.dtype.kind == "f") != (spec.dtype.kind == "f"):
        raise _mismatch(part, name, f"is {array.dtype}", str(spec.dtype), dtype=array.dtype, expected=spec.dtype)
    fits = array.ndim == len(spec.shape) and all(
        size > 0 and wanted in (None, size) for size, wanted in zip(array.shape[1:], spec.shape[1:], strict=True)
    )
    if not fits:
        details = {"shape": array.shape, "expected": spec.shape}
        raise _mismatch(part, name, f"is {_axes(array.shape)}", _axes(spec.shape), **details)


def _axes(shape: Sequence[int | None]) -> str:
    """The axes of an input or an output, e.g. `[row, 3, any]`; `[]`: a single number, or no tensor."""
    return f"[{', '.join(['row', *('any' if size is None else str(size) for size in shape[1:])])}]" if shape else "[]"


def _check_values(part: RowArrays, name: str, spec: InputSpec, start: int, rows: np.ndarray, *, are_ids: bool) -> None:
    """Raise RowError for the first of these consecutive rows with a number that the graph cannot read."""
    if spec.dtype.kind == "f":
        with np.errstate(over="ignore"):
            wrong, problem = ~np.isfinite(rows.astype(spec.dtype, copy=False)), f"is not finite as {spec.dtype}"
        code = ErrorCode.NOT_FINITE
    else:
        info = None if spec.dtype.kind == "b" else np.iinfo(spec.dtype)
        lowest, highest = (0, 1) if info is None else (int(info.min), int(info.max))
        lowest = max(0, lowest) if are_ids or spec.ids is not None else lowest
        highest = highest if spec.ids is None else spec.ids - 1
        wrong, problem = (rows < lowest) | (rows > highest), f"is no number from {lowest} to {highest}"
        code = ErrorCode.INVALID_ROWS if spec.ids is None else ErrorCode.ID_OUTSIDE_TABLE
    flat = wrong.reshape(len(rows), -1)
    if flat.any():
        row = int(flat.any(1).argmax())
        value = rows[row].reshape(-1)[int(flat[row].argmax())].item()
        text = f"{value} in {name!r} {problem}; correct it or remove the row"
        raise RowError.of(str(part.path), start + row + 1, text, code=code, file=part.path, array=name, value=value)
    if name == MASK and rows.ndim > 1 and not (kept := rows.reshape(len(rows), -1).any(1)).all():
        row = int(kept.argmin())
        text = f"every number in {name!r} is zero; give the row a token or remove it"
        raise RowError.of(str(part.path), start + row + 1, text, file=part.path, array=name, value=0)


_LABEL_NAMES = (LABELS, "label")  # names of arrays of labels, if they are no inputs of the graph
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
        mask = self._inputs.get(MASK)
        self._padded: set[str] = set()  # the inputs whose second axis may be that of a mask of any length
        if mask is not None and len(mask.shape) == 2 and mask.shape[1] is None:
            free = (name for name, spec in self._inputs.items() if len(spec.shape) > 1 and spec.shape[1] is None)
            self._padded = {name for name in free if not name.startswith(_OF_DECODER)}
        self._vectors = Vectors()
        self._read_notes: tuple[Note, ...] = ()
        self._score_by(*self._default(folder))

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        return isinstance(folder.model, HasSignature)

    @classmethod
    def check_processor(cls, folder: ModelFolder) -> None:
        """No processor is needed: rows are inputs of the graph."""

    @property
    def compares_answers(self) -> bool:
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
        """The rows of a .npz file, or of a folder of .npz or .npy files; see `read_arrays`."""
        rows, origins = {}, {}
        labels = _LABEL_NAMES if self._request.label_column is None else (*_LABEL_NAMES, self._request.label_column)
        casts: dict[str, None] = {}
        for split, parts in read_arrays(source).items():
            first = len(self._parts)
            for part in parts:
                check_arrays(part, self._inputs, labels)
                types = {name: (part.arrays[name].dtype, spec.dtype) for name, spec in self._inputs.items()}
                casts |= {f"{name} ({old} to {new})": None for name, (old, new) in types.items() if old != new}
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
        if labels.dtype.kind == "f" and not (finite := np.isfinite(labels)).all():
            row = int((~finite).reshape(len(labels), -1).any(1).argmax())
            text = f"a number in {name!r} is NaN or infinite; correct it or remove the row"
            raise RowError.of(source, row + 1, text, code=ErrorCode.NOT_FINITE, array=name)
        choice = self._choice(requested, labels)
        if choice is None:
            problem = (
                f"{'no metric' if requested is None else requested} compares such labels with an output "
                f"({self._listed()}); give integers [row] or [row, position] for classes, or numbers [row] for an "
                f"output [row] or [row, 1]"
            )
            raise _wrong_kind(name, labels, source, problem)
        if isinstance(choice[1], Classes) and len(np.unique(labels)) == 1:
            text = (
                f"{source}: {name!r} is {labels[0]} in every row; give rows of two classes or more, or omit the array"
            )
            raise InputError(text, code=ErrorCode.INVALID_ROWS, array=name, value=labels[0].item())
        self._score_by(*choice)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        part = self._part(rows)
        name = self._label_name(part, source)
        indices = np.asarray(rows["index"][:])
        widths = {len(row) for row in self._rows_of(name, indices) if row.ndim == 1}
        # Labels of tokens are padded to the longest row of all files.
        padded = (with_positions(row[None], max(widths), IGNORED) for row in self._rows_of(name, indices))
        labels = self._gather(name, indices) if len(widths) < 2 else np.concatenate(list(padded))
        if not self._form.takes(labels):
            raise _wrong_kind(name, labels, source, "other rows have labels of another kind; use one kind for all rows")
        output = self._outputs[self.outputs[0]]
        if (row := self._form.first_wrong(labels, output)) is not None:
            problem = (
                f"{labels[row]} in {name!r} is no label of the output {self.outputs[0]} {_axes(output.shape)}; correct"
                " it or remove the row"
            )
            details = {"array": name, "value": labels[row].tolist()}
            raise RowError.of(source, row + 1, problem, code=ErrorCode.LABEL_MISMATCH, **details)
        return self._examples(rows, self._form.column(labels))

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        placeholder = self._form.placeholder
        values = [list(placeholder) if isinstance(placeholder, tuple) else placeholder] * len(rows)
        return self._examples(rows, pa.array(values, pa.list_(pa.int64()) if isinstance(placeholder, tuple) else None))

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """The inputs of the graph, `[batch, ...]` each, and `labels`.

        Raises:
            InputError: rows of several files have different axes.
        """
        indices = np.array([example["index"] for example in examples], np.int64)
        longest = max(int(example["positions"]) for example in examples)
        batch: Batch = {}
        for name, spec in self._inputs.items():
            values = self._gather(name, indices, longest if name in self._padded else None)
            batch[name] = values.astype(spec.dtype, copy=False)
        # The mask of a decoder is that of the positions of its output.
        mask = DECODER_MASK if any(name.startswith(_OF_DECODER) for name in self._inputs) else MASK
        has_positions = mask in batch and self._outputs[self.outputs[0]].shape[1:-1] == self._inputs[mask].shape[1:]
        labels = [example[LABELS] for example in examples]
        return {**batch, LABELS: self._form.batch(labels, batch[mask] if has_positions else None)}

    def size_limits(self, examples: Dataset) -> tuple[int, int]:
        """One input a row, and the positions of the longest."""
        return 1, max(examples["positions"][:], default=1)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return self._form.per_example(logits, labels)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The classes of rows or tokens; None for other outputs."""
        return self._form.ids(logits, self._scored(logits, batch))

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> list[Any]:
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
        return list(map(self._form.reference, self._form.answers(logits, None))) if self._form.has_texts else ()

    def reference_text(self, example: Mapping[str, Any]) -> str:
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
            fit = "no metric fits" if requested is None else f"the metric {requested} does not fit"
            text = (
                f"{folder.source}: {fit} the outputs of floats of the graph ({self._listed()}); use a graph that"
                " returns logits, numbers or vectors of each row, or another metric"
            )
            details = {"path": folder.source, "outputs": tuple(self._outputs), "metric": requested}
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, **details)
        return choice

    def _listed(self) -> str:
        return ", ".join(f"{name} {_axes(output.shape)}" for name, output in self._outputs.items()) or "none"

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
        self.outputs, self._form = (output,), form
        self._metric = next((known for known in form.metrics if known.name == self._request.metric), form.metrics[0])
        self.declare_answers(self._config)
        self._update_notes()

    def _update_notes(self) -> None:
        (output,) = self.outputs
        ignored = [name for name in self._outputs if name not in (output, *self.loss_outputs)]
        text = (
            f"the output {output} {_axes(self._outputs[output].shape)} is scored as {self._form.description}"
            f" ({self._metric.name}; the task has {', '.join(metric.name for metric in self.metrics)})"
        )
        text += f"; {', '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} not compared" if ignored else ""
        self.notes = (*self._read_notes, Note(text=text, code=NoteCode.METRIC_CHOSEN))

    def _add(self, part: RowArrays, first: RowArrays) -> None:
        """Add arrays to those of all rows; raise InputError if they have other names or axes than the first file."""
        for name in sorted({*part.arrays} ^ {*first.arrays}):
            text = f"{part.path}: {name!r} is in {'this file' if name in part.arrays else first.path.name} only"
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

    def _examples(self, rows: Dataset, labels: pa.Array) -> Dataset:
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

    def _scored(self, outputs: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The scored positions of an output `[batch, position, ...]`; None for an output of other axes."""
        return scored_mask(batch, *outputs.shape[:2]) if outputs.ndim > 2 else None


def _wrong_kind(name: str, labels: np.ndarray, source: str, problem: str) -> InputError:
    text = f"{source}: {name!r} is {labels.dtype} of shape {list(labels.shape)}, and {problem}"
    return InputError(text, code=ErrorCode.LABEL_MISMATCH, array=name, dtype=str(labels.dtype), shape=labels.shape)
