"""Read, divide and encode the rows of a run: training, evaluation and test rows, and rows without labels."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import generate_random_fingerprint

from compressor.answers import LABELS
from compressor.config.sections import RowsConfig
from compressor.config.values import TABLES
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.graph.signature import HasSignature
from compressor.results import Note, NoteCode
from compressor.silence_libraries import quiet_hub
from compressor.tasks.base import Task, make_task
from compressor.tasks.causal_lm import CausalLM
from compressor.tasks.id_tables import IdTables
from compressor.tasks.labels import are_withheld
from compressor.tasks.row_store import RowOrigin, SplitRows
from compressor.tasks.scoring import BATCH_SIZE, draw_indices, draw_rows, forward_of, indices_by_length
from compressor.tasks.splits import Split, named_splits, pick

if TYPE_CHECKING:
    from compressor.model_folder import ModelFolder

logger = logging.getLogger(__name__)

_CANDIDATES = 2**17
_CANDIDATES_PER_ROW = 2
"""Maximum number of training rows to encode: the larger of the first number, and of the second for each row that a
run draws."""
_REPEATED = 10
_REPEATED_SHARE = 0.1  # minimum number and share of scored rows that another split repeats, for a note
PURPOSES: dict[Split, str] = {"train": "training", "eval": "evaluation", "test": "test"}
"""Adjectives of the splits in messages."""
_SHARES: dict[Split, float] = {"eval": 0.1, "test": 0.5}
"""Shares of the training and of the evaluation rows that become rows of a split if the recipe names none."""
_BOUNDED_SHARE, _BOUNDED_ROWS = 0.3, 1500
"""Share of the training rows that become evaluation rows if these have to show a small loss, and the maximum number
of rows: if 5% of answers change, the standard error of an accuracy is 0.7 points on 900 rows and 1.3 on 300."""


class Labels(Enum):
    """Where the labels of a split are from."""

    ROWS = "rows"
    ANSWERS = "answers"
    NONE = "none"


@dataclass(frozen=True)
class Data:
    """Encoded examples of a run, ready for `Task.collate`.

    Attributes:
        train: examples to learn from; empty if the run follows a plan.
        eval: examples that select heads and checkpoints; empty if the recipe names only test rows.
        test: examples whose metric is reported, and which select nothing; empty if no rows have labels.
        task: the task that encoded them, with the metric of the test examples.
        notes: facts for the reader, e.g. that test rows were set aside from the evaluation rows.
        train_hash: `sha256:...` of the training examples, independent of their file; None without examples.
        eval_hash: `sha256:...` of the evaluation examples; None without examples.
        tokenizer: the tokenizer of the folder, which decodes examples for a reader; None if the folder has none.
        scores_eval: whether the evaluation examples have labels, so that the metric can be computed on them.
        separate_eval_task: the task with the metric of the evaluation examples; None: it is that of the test examples.
            They differ where only one of both splits has labels of its own (`Task.agreement_on`).
    """

    train: Dataset
    eval: Dataset
    test: Dataset
    task: Task
    notes: tuple[Note, ...]
    train_hash: str | None
    eval_hash: str | None
    tokenizer: Any = None
    scores_eval: bool = True
    separate_eval_task: Task | None = None

    @property
    def eval_task(self) -> Task:
        """The task with the metric of the evaluation examples."""
        return self.separate_eval_task or self.task

    def with_task(self, task: Task) -> Data:
        """The same examples with another metric for all of them, such as `eval_task`."""
        return replace(self, task=task, separate_eval_task=None)

    def of_chooser(self) -> Data:
        """The same examples with the task that selects units (`Task.chooser`).

        Raises:
            InputError: its metric is not defined on the training or evaluation examples.
        """
        task = self.eval_task.chooser
        rows: dict[Split, Dataset] = {"train": self.train, "eval": self.eval}
        for split, part in rows.items():
            if len(part) and task is not self.eval_task:
                _require_metric(task, split, part)
        return self.with_task(task)


def open_data(
    request: RowsConfig,
    folder: ModelFolder,
    seed: int = 0,
    *,
    drawn_rows: int | None = None,
    bounds_loss: bool = False,
) -> Data:
    """Read, check, encode and divide the rows of a run.

    Rows that exceed the memory are memory-mapped (`RowStore`).

    Args:
        request: files, columns, metric and maximum length. Rows of `unlabelled_data` follow those of `data`.
        folder: its task and tokenizer encode the rows.
        seed: seed of the draw of rows that are set aside.
        drawn_rows: maximum number of training rows that the run draws. It does not read their labels, which these rows
            and further splits of the same data may lack; only some of many rows are encoded, and the caller checks
            files that rows refer to (`Task.check_files`). None: the run reads all training rows, with labels.
        bounds_loss: whether the run bounds the loss of the metric. Then more evaluation rows are set aside, and
            evaluation and test rows without labels get those that the model of the folder answers (`Task.labels_by`);
            those of an ONNX file always do.

    Raises:
        InputError: a file, a column or a label cannot be used.
        UsageError: the task does not have the metric, or labels are read and there is `unlabelled_data`.
    """
    return _Reading(request, folder, seed, drawn_rows, bounds_loss=bounds_loss).data()


class _Reading:
    """The rows of a run while they are read, and the notes on them; see `open_data`."""

    def __init__(
        self, request: RowsConfig, folder: ModelFolder, seed: int, drawn_rows: int | None, *, bounds_loss: bool
    ) -> None:
        self._request, self._folder, self._seed, self._drawn_rows = request, folder, seed, drawn_rows
        self._bounds_loss = bounds_loss
        # Rows of a file often have no labels.
        self._scores_answers = bounds_loss or isinstance(folder.model, HasSignature)
        self._task = make_task(folder, request)
        self._tables = IdTables.of(folder.model, folder.processor)
        self._splits, self._notes = read_splits(request, self._task.read)
        if drawn_rows is not None and "train" in self._splits:
            self._splits["train"] = self._draw_candidates(self._splits["train"], drawn_rows)
        self._labels = self._learn_labels()
        self._encoded = {
            name: encode_rows(self._task, split, self._tables, is_labelled=self._labels[name] is Labels.ROWS)
            for name, split in self._splits.items()
            if name != "test" or self._labels[name] is not Labels.NONE  # only the metric is computed on test rows
        }

    def data(self) -> Data:
        """The examples of all splits, complete and checked."""
        task, labels, encoded = self._task, self._labels, self._encoded
        further = self._open_further()
        self._notes += task.notes
        if unlabelled := [split.source for name, split in self._splits.items() if labels[name] is not Labels.ROWS]:
            text = (
                f"{', '.join(unlabelled)}: the rows have no labels; choosing units, refitting weights, learning a "
                f"teacher's outputs and quantizing need no labels"
            )
            self._note(text, NoteCode.ROWS_UNLABELLED)
        if "eval" not in encoded and "train" in encoded:
            # Half of the examples become test examples, unless there are some or none are needed.
            self._set_aside("eval", "train", 1 if "test" in encoded or labels["eval"] is Labels.NONE else 2)
        if "test" not in encoded and labels["eval"] is not Labels.NONE:
            self._set_aside("test", "eval")
        self._answer()
        if self._drawn_rows is not None and "train" in encoded:
            encoded["train"] = self._with_targets(encoded["train"], self._drawn_rows)
            if further is not None:
                further = self._with_targets(further, self._drawn_rows)
                encoded["train"] = join_rows(encoded["train"], further, str(self._request.unlabelled_data))
        tasks = {
            name: task.agreement_on(rows) if labels[name] is Labels.ANSWERS else task for name, rows in encoded.items()
        }
        scored = [name for name in encoded if name != "train" and labels[name] is not Labels.NONE]
        for name in scored:
            _require_metric(tasks[name], name, encoded[name])
        for split, rows in encoded.items():
            if split != "train" or self._drawn_rows is None:
                task.check_files(rows)
        contents = {name: _contents(rows) for name, rows in encoded.items()}
        if not task.in_order:  # windows of running text repeat each other without being the same rows
            pairs: list[tuple[Split, Split]] = [("test", "train"), ("test", "eval")]
            self._note_repeated(contents, pairs if further is None else [*pairs, ("eval", "train")])
        empty = next(iter(encoded.values())).select([])
        train, evaluation, test = (encoded.get(name, empty) for name in PURPOSES)
        sizes = tuple(map(len, (train, evaluation, test)))
        logger.debug("%s: %d training, %d evaluation and %d test rows, scored by %s", task.name, *sizes, task.metric)
        train_hash, eval_hash = (contents[name][0] if name in contents else None for name in ("train", "eval"))
        return Data(
            *(train, evaluation, test, tasks.get("test", task), tuple(self._notes)),
            *(train_hash, eval_hash, self._folder.processor, "eval" in scored, tasks.get("eval")),
        )

    def _note(self, text: str, code: NoteCode) -> None:
        self._notes.append(Note(text=text, code=code))

    def _note_repeated(
        self, contents: Mapping[Split, tuple[str | None, Sequence[int]]], pairs: Iterable[tuple[Split, Split]]
    ) -> None:
        """Note scored rows of which another split repeats many, as in a file that is named twice."""
        for scored, split in (pair for pair in pairs if contents.keys() >= set(pair)):
            rows, known = contents[scored][1], set(contents[split][1])
            repeated = sum(content in known for content in rows)
            if rows and repeated >= max(_REPEATED, _REPEATED_SHARE * len(rows)):
                text = (
                    f"{repeated} of {len(rows)} {PURPOSES[scored]} rows are among the {PURPOSES[split]} rows too, so"
                    f" they do not show the loss on new rows; name other rows (--{scored}-data)"
                )
                self._note(text, NoteCode.ROWS_REPEATED)

    def _draw_candidates(self, train: SourceRows, drawn_rows: int) -> SourceRows:
        """The training rows that are encoded: all, or enough of many to draw lengths that are served from."""
        task, count = self._task, max(_CANDIDATES, _CANDIDATES_PER_ROW * drawn_rows)
        if len(train.rows) <= count or task.in_order or task.set_aside_by:  # running texts and queries stay whole
            return train
        indices = draw_indices(len(train.rows), count, self._seed, task.joined_rows)
        text = (
            f"{train.source}: {len(indices)} of its {len(train.rows)} rows, drawn with seed {self._seed}, are used; the"
            " run needs no more"
        )
        self._note(text, NoteCode.ROWS_DRAWN)
        return SourceRows(train.rows.select(indices), train.source, train.origin.select(lambda: indices))

    def _learn_labels(self) -> dict[Split, Labels]:
        """Learn the labels of the first split that has some; those before it have none of their own.

        A split that is set aside from another has labels as that has. Evaluation and test rows without labels of their
        own have the answers of the model if `scores_answers`.

        Raises:
            InputError: labels are missing in training rows that need them, in rows that the recipe names for scores,
                or in all rows although the recipe names their column.
        """
        named = {"eval": self._request.eval_data, "test": self._request.test_data}
        unlabelled: list[Split] = []
        for name, split in self._splits.items():
            try:
                with split.origin.located():
                    self._task.learn_labels(split.rows, split.source)
                break
            except InputError as error:
                is_last = len(unlabelled) == len(self._splits) - 1
                is_scored = named.get(name) is not None and not self._scores_answers
                needs_labels = self._drawn_rows is None or is_scored
                needs_labels |= is_last and self._request.label_column is not None
                if error.code is not ErrorCode.COLUMN_MISSING or needs_labels:
                    raise
                unlabelled.append(name)
        labels: dict[Split, Labels] = {}
        lacks_labels = False
        for purpose in PURPOSES:
            lacks_labels = purpose in unlabelled if purpose in self._splits else lacks_labels
            without = Labels.ANSWERS if self._scores_answers and purpose != "train" else Labels.NONE
            labels[purpose] = without if lacks_labels else Labels.ROWS
        return labels

    def _open_further(self) -> Dataset | None:
        """The examples of `unlabelled_data`; a single column, such as lines of text, is the column of texts.

        Raises:
            InputError: its rows have another number of texts than training rows, or the task needs labels.
            UsageError: labels of training rows are read, or there are none.
        """
        request, train, named = self._request, self._splits.get("train"), self._request.unlabelled_data
        if named is None:
            return None
        if self._drawn_rows is None or train is None:
            problem = "there are no training rows" if train is None else "labels of training rows are read"
            text = f"--unlabelled-data {named}: {problem}, so these rows cannot be used; omit the option"
            raise UsageError(text, code=ErrorCode.CONTRADICTION, field="unlabelled_data", value=named)
        splits = self._task.read(named)
        name, chosen = _select_split("train", splits, named)
        rows, columns = chosen.rows, request.text_columns
        if len(columns) == len(rows.column_names) == 1 and columns[0] not in rows.column_names:
            if rows.info.builder_name in TABLES:
                text = f"the column {rows.column_names[0]!r:.60} of {named} is read as {columns[0]!r}"
                self._note(text, NoteCode.TEXT_COLUMNS)
            rows = rows.rename_column(rows.column_names[0], columns[0])
        if unused := [split for split in splits if split != name]:
            text = f"of {named}, the split {name!r} is used, and not {', '.join(map(repr, unused))}"
            self._note(text, NoteCode.SPLIT_UNUSED)
        further = self._draw_candidates(replace(chosen, rows=rows), self._drawn_rows)
        texts, of_train = (self._task.usual_texts(part.rows) for part in (further, train))
        if not columns and texts and len(texts) != len(of_train):  # the recipe's columns are those of both
            text = (
                f"{further.source}: a row has {len(texts)} text(s) ({', '.join(texts)}), and a training row has"
                f" {len(of_train)}; give rows of one form, or name the columns of text (--text-columns)"
            )
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, field="text_columns", columns=texts)
        try:
            encoded = encode_rows(self._task, further, self._tables, is_labelled=False)
        except InputError as error:
            if error.details.get("field") != "label_column":
                raise
            text = (
                f"{further.source}: {self._task.name} encodes rows together with their labels, and there are none; add "
                f"labels, or omit --unlabelled-data"
            )
            raise InputError(text, code=error.code, field="unlabelled_data", source=further.source) from error
        text = f"{len(encoded)} rows of {further.source} are added to the training rows, without labels"
        self._note(text, NoteCode.ROWS_UNLABELLED)
        return encoded

    def _set_aside(self, split: Split, origin: Split, least: int = 1) -> None:
        """Divide the examples of `origin` into those that remain, and a share, at least `least`, for `split`.

        The share is drawn at random, or is the last part if the task reads examples in order. Both parts keep the
        order. Examples that belong together (`Task.set_aside_by`) are drawn together. Raise InputError if none would
        remain.
        """
        task, examples = self._task, self._encoded[origin]
        together = np.arange(len(examples))
        if task.set_aside_by is not None:
            together = np.unique(np.asarray(examples[task.set_aside_by]), return_inverse=True)[1]
        groups = int(together.max(initial=-1)) + 1
        count = max(least, round(_SHARES[split] * groups))
        if split == "eval" and self._bounds_loss:
            count = max(count, min(_BOUNDED_ROWS, round(_BOUNDED_SHARE * groups)))
        if count >= groups:
            source = self._splits[origin if origin in self._splits else "train"].source
            kind = "rows" if task.set_aside_by is None else f"different values of {task.set_aside_by!r}"
            text = (
                f"{source}: {groups} {PURPOSES[origin]} {kind} are too few to set {least} aside; give more rows, or"
                f" --{split}-data"
            )
            details = {"source": source, "rows": groups, "minimum": least + 1, "field": f"{split}_data"}
            raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, **details)
        order = np.arange(groups)[::-1] if task.in_order else np.random.default_rng(self._seed).permutation(groups)
        is_aside = np.isin(together, order[:count])
        for name, indices in ((origin, np.flatnonzero(~is_aside)), (split, np.flatnonzero(is_aside))):
            self._encoded[name] = examples.select(indices)
        choice = "the last ones" if task.in_order else f"drawn with seed {self._seed}"
        text = (
            f"no {PURPOSES[split]} data was named: {len(self._encoded[split])} of the {PURPOSES[origin]} rows,"
            f" {choice}, were set aside for it"
        )
        if origin == "train":
            text += "; a model that was trained on these rows scores higher on them than on new ones"
        self._note(text, NoteCode.ROWS_SET_ASIDE)

    def _answer(self) -> None:
        """Label the examples whose labels are to be the model's answers; drop test examples that cannot be labelled."""
        task, encoded, labels = self._task, self._encoded, self._labels
        for name in [name for name in encoded if labels[name] is Labels.ANSWERS]:
            labelled = _with_columns(encoded[name], partial(task.labels_by, forward_of(task, self._folder.model)))
            if labelled is not None:
                encoded[name] = labelled
                metric = task.agreement_on(labelled).metric
                text = (
                    f"the {len(labelled)} {PURPOSES[name]} rows have no labels: the answers of the whole model count "
                    f"as right, and the metric is the {metric}; if a column holds labels, name it (--label-column)"
                )
                self._note(text, NoteCode.ANSWERS_AS_LABELS)
                continue
            labels[name] = Labels.NONE
            if name == "test":
                del encoded[name]

    def _with_targets(self, examples: Dataset, drawn_rows: int) -> Dataset:
        """Training examples, as many as the run draws, with the targets that the model generates, if they need any."""
        model = self._folder.model
        drawn = _with_columns(draw_rows(examples, drawn_rows, self._seed), partial(self._task.targets_by, model))
        return examples if drawn is None else drawn


def _with_columns(
    examples: Dataset, columns_of: Callable[[list[dict[str, Any]]], Mapping[str, Sequence[Any]] | None]
) -> Dataset | None:
    """Examples with columns that are computed from batches of them; None where these have none."""
    columns: dict[str, list[Any]] = {}
    for indices in indices_by_length(examples, BATCH_SIZE):
        computed = columns_of([examples[index] for index in indices])
        if computed is None:
            return None
        for name, values in computed.items():
            column = columns.setdefault(name, [None] * len(examples))
            for index, value in zip(indices, values, strict=True):
                column[index] = value
    with quiet_hub():  # columns are added to a copy, with a progress bar
        examples = examples.remove_columns([name for name in columns if name in examples.column_names])
        for name, column in columns.items():
            examples = examples.add_column(name, column)
    return examples


def training_texts(request: RowsConfig) -> list[str]:
    """The texts of the training rows, e.g. to build a tokenizer from them.

    Raises:
        InputError: the file cannot be read, or does not have exactly one column of text.
    """
    splits, _ = read_splits(request, named_splits)
    train = splits["train"]
    with train.origin.located():
        (name,) = CausalLM.text_columns.find(train.rows, request.text_columns, train.source)
    return train.rows[name][:]


def join_rows(train: Dataset, further: Dataset, source: str) -> Dataset:
    """Append further examples to training examples, with their columns and types.

    Placeholders of another type than labels, such as zero for a list of tags, become the label of the first example.

    Raises:
        InputError: a custom task encodes both as different columns or types.
    """
    columns, schema = further.with_format("arrow")[:], train.features.arrow_schema
    try:
        if LABELS in schema.names and columns.schema.field(LABELS).type != schema.field(LABELS).type and len(train):
            label = train.select_columns(LABELS).with_format("arrow")[:1].column(0).combine_chunks()
            labels = label.take(pa.array(np.zeros(len(columns), np.int64)))
            columns = columns.set_column(columns.schema.get_field_index(LABELS), LABELS, labels)
        table = columns.select(train.column_names).cast(schema)
    except (KeyError, pa.ArrowException) as error:
        types = [
            ", ".join(f"{column.name} ({column.type})" for column in rows.features.arrow_schema)
            for rows in (further, train)
        ]
        text = (
            f"{source}: the task encodes these rows as {types[0]}, the training rows as {types[1]}; let encode and"
            " encode_unlabelled of the task return equal columns"
        )
        raise InputError(text, code=ErrorCode.FILE_MISMATCH, field="unlabelled_data", source=source) from error
    # The fingerprint of the content, which is the default, would take it into memory.
    return concatenate_datasets([train, Dataset(table, fingerprint=generate_random_fingerprint())])


def _require_metric(task: Task, split: Split, rows: Dataset) -> None:
    """Raise InputError unless the metric of a task is defined on the examples of a split."""
    if (obstacle := task.metric_obstacle(rows)) is not None:
        problem = f"{obstacle} in the {PURPOSES[split]} rows, so there is no {task.metric}"
        text = f"{problem}; name other rows (--{split}-data)"
        raise InputError(text, code=ErrorCode.INVALID_ROWS, field=f"{split}_data")


def rows_hash(examples: Dataset) -> str | None:
    """`sha256:...` of the tokens or images, labels and reference texts of examples; None without examples.

    Examples of a custom task without tokens and images are hashed with all columns.
    """
    return _contents(examples)[0]


def _contents(examples: Dataset) -> tuple[str | None, Sequence[int]]:
    """The hash of examples, see `rows_hash`; and a hash of the tokens or the image of each."""
    if not len(examples):
        return None, ()
    digest, rows = hashlib.sha256(), list[int]()
    names = [name for name in ("input_ids", "digest", "labels", "reference") if name in examples.column_names]
    has_inputs = not {"input_ids", "digest"}.isdisjoint(names)  # they are the first
    if not has_inputs:  # all columns count as they are stored, before `datasets` decodes them
        columns = examples.select_columns(sorted(examples.column_names)).with_format("arrow")
        for table in columns.iter(batch_size=64):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table.combine_chunks())
            digest.update(sink.getvalue())
        return f"sha256:{digest.hexdigest()}", ()
    for batch in examples.select_columns(names).iter(batch_size=1000):
        for row in zip(*(batch[name] for name in names), strict=True):
            digest.update(repr(row).encode())
            rows.append(hash(repr(row[0])))
    return f"sha256:{digest.hexdigest()}", rows


@dataclass(frozen=True)
class SourceRows:
    """The rows of a split, the name of their source in messages, and their origin."""

    rows: Dataset
    source: str
    origin: RowOrigin


def read_splits(request: RowsConfig, read: Callable[[str], SplitRows]) -> tuple[dict[Split, SourceRows], list[Note]]:
    """The rows of each requested split and of further splits of the training data, with notes on the latter."""
    requested: dict[Split, str | None] = {"train": request.data, "eval": request.eval_data, "test": request.test_data}
    sources = {source: read(source) for source in dict.fromkeys(requested.values()) if source is not None}
    if not sources:
        text = "no rows were named, so nothing can be learned or scored; name rows with --data"
        raise InputError(text, code=ErrorCode.MISSING_VALUE, field="data")
    splits: dict[Split, SourceRows] = {}
    notes = []
    training, used = None, set[tuple[str, str]]()
    for split, source in requested.items():
        if source is not None:
            name, splits[split] = _select_split(split, sources[source], source)
            training = name if split == "train" else training
            used.add((source, name))
        elif request.data is not None:
            further = {name: rows for name, rows in sources[request.data].items() if name != training}
            picked = pick(further, split)
            if picked is None:
                continue
            used.add((request.data, picked))
            if are_withheld(further[picked]):
                text = f"the split {picked!r} of {request.data} is not used, its labels are withheld"
                notes.append(Note(text=text, code=NoteCode.SPLIT_UNUSED))
                continue
            splits[split] = _source_rows(sources[request.data], picked, request.data)
            text = f"the {split} rows are the split {picked!r} of {request.data}"
            notes.append(Note(text=text, code=NoteCode.SPLIT_CHOSEN))
    for source, named in sources.items():
        for name, rows in named.items():
            if (source, name) not in used:
                text = f"the split {name!r} of {source} ({len(rows)} rows) is not used"
                notes.append(Note(text=text, code=NoteCode.SPLIT_UNUSED))
    return splits, notes


def _source_rows(splits: SplitRows, name: str, source: str) -> SourceRows:
    return SourceRows(splits[name], f"{source} [{name}]" if name else source, splits.origins[name])


def _select_split(split: Split, named: SplitRows, source: str) -> tuple[str, SourceRows]:
    """The split of a source for a purpose, or its only split, with its name; raise InputError without such a split."""
    name = pick(named, split)
    if name is None and len(named) > 1:
        text = (
            f"{source}: none of its splits ({', '.join(named)}) is for {split}; rename one to train, dev or test, or"
            " name a file of these rows alone"
        )
        raise InputError(text, code=ErrorCode.UNKNOWN_NAME, split=split, splits=tuple(named))
    name = next(iter(named)) if name is None else name
    return name, _source_rows(named, name, source)


def encode_rows(task: Task, split: SourceRows, tables: IdTables, *, is_labelled: bool) -> Dataset:
    """Encode the rows of a split; errors name a row by its file and its number there.

    Args:
        task: the task that encodes them.
        split: the rows.
        tables: the sizes of the model's embedding tables, for which every id of the rows must be small enough.
        is_labelled: whether labels are encoded too.

    Raises:
        InputError: a row cannot be encoded, or the model has no embedding for one of its ids.
    """
    encode = task.encode if is_labelled else task.encode_unlabelled
    with split.origin.located():
        encoded = encode(split.rows, split.source)
        if (
            not isinstance(encoded, Dataset)
            or "length" not in encoded.column_names
            or len(encoded) < min(1, len(split.rows))
        ):
            raise task.returns_wrong(encode.__name__, "a datasets.Dataset of at least one row with a column 'length'")
        tables.check(task, encoded, split.rows, split.source)
    return task.locate(encoded, split.origin)
