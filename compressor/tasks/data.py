"""Read, divide and encode the rows of a run: training, evaluation and test rows, and rows without labels."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import generate_random_fingerprint

from compressor.config.sections import RowsConfig
from compressor.config.values import TABLES
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.graph.program import HasSignature
from compressor.model_folder import ModelFolder
from compressor.results import Note, NoteCode
from compressor.tasks.base import LABELS, Task
from compressor.tasks.causal_lm import CausalLM
from compressor.tasks.id_tables import IdTables
from compressor.tasks.labels import are_withheld
from compressor.tasks.registry import make_task
from compressor.tasks.row_origin import RowOrigin, SplitRows
from compressor.tasks.scoring import draw_indices, draw_rows, with_answers, with_targets
from compressor.tasks.splits import Split, named_splits, pick

logger = logging.getLogger(__name__)

_CANDIDATES = 2**17
_CANDIDATES_PER_ROW = 2
"""Training rows that are encoded at most: the larger of this number, and of so many for each row that a run draws."""
_REPEATED = 10
_REPEATED_SHARE = 0.1
"""Minimum number and share of scored rows that another split repeats, for a note."""
PURPOSES: dict[Split, str] = {"train": "training", "eval": "evaluation", "test": "test"}
"""Adjectives of the splits in messages."""
_EVAL_SHARE = 0.1
"""Share of the training rows that become evaluation rows if the recipe names none."""
_TEST_SHARE = 0.5
"""Share of the evaluation rows that become test rows if the recipe names none."""


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
        if task is not self.eval_task:
            _require_metric(task, {split: part for split, part in rows.items() if len(part)})
        return self.with_task(task)


def open_data(
    request: RowsConfig,
    folder: ModelFolder,
    seed: int = 0,
    *,
    drawn_rows: int | None = None,
    scores_answers: bool = False,
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
        scores_answers: whether evaluation and test rows without labels get those that the model of the folder answers,
            see `scoring.with_answers`; those of an ONNX file always do.

    Raises:
        InputError: a file, a column or a label cannot be used.
        UsageError: the task does not have the metric, or labels are read and there is `unlabelled_data`.
    """
    task = make_task(folder, request)
    splits, notes = read_splits(request, task.read)
    if drawn_rows is not None and "train" in splits:
        splits["train"], drawn_notes = _draw_candidates(splits["train"], drawn_rows, seed, task)
        notes += drawn_notes
    scores_answers |= isinstance(folder.model, HasSignature)  # rows of a file often have no labels
    labels = _learn_labels(task, splits, request, allows_none=drawn_rows is not None, scores_answers=scores_answers)
    tables = IdTables.of(folder.model, folder.processor)
    encoded = {
        name: encode_rows(task, split, tables, is_labelled=labels[name] is Labels.ROWS)
        for name, split in splits.items()
        if name != "test" or labels[name] is not Labels.NONE  # nothing but the metric is computed on test rows
    }
    further = None
    if request.unlabelled_data is not None:
        further, further_notes = _open_further(request, splits.get("train"), drawn_rows, seed, task, tables)
        notes += further_notes
    notes += task.notes
    if unlabelled := [split.source for name, split in splits.items() if labels[name] is not Labels.ROWS]:
        text = (
            f"{', '.join(unlabelled)}: the rows have no labels, and none are needed to choose units, to refit weights,"
            " to learn a teacher's outputs or to quantize"
        )
        notes.append(Note(text=text, code=NoteCode.ROWS_UNLABELLED))
    notes += _fill_splits(encoded, splits, labels, seed, task)
    notes += _answer(encoded, labels, folder, task)
    if drawn_rows is not None and "train" in encoded:
        encoded["train"] = _with_targets(encoded["train"], drawn_rows, seed, folder, task)
    if further is not None and drawn_rows is not None:
        further = _with_targets(further, drawn_rows, seed, folder, task)
        encoded["train"] = join_rows(encoded["train"], further, str(request.unlabelled_data))
    tasks = {
        split: task.agreement_on(rows) if labels[split] is Labels.ANSWERS else task for split, rows in encoded.items()
    }
    scored = [split for split in encoded if split != "train" and labels[split] is not Labels.NONE]
    for name in scored:
        _require_metric(tasks[name], {name: encoded[name]})
    for split, rows in encoded.items():
        if split != "train" or drawn_rows is None:
            task.check_files(rows)
    contents = {split: _contents(rows) for split, rows in encoded.items()}
    if not task.in_order:  # windows of running text repeat each other without being the same rows
        pairs: list[tuple[Split, Split]] = [("test", "train"), ("test", "eval")]
        notes += _repeated_rows(contents, pairs if further is None else [*pairs, ("eval", "train")])
    empty = next(iter(encoded.values())).select([])
    train, evaluation, test = (encoded.get(split, empty) for split in PURPOSES)
    sizes = tuple(map(len, (train, evaluation, test)))
    logger.debug("%s: %d training, %d evaluation and %d test rows, scored by %s", task.name, *sizes, task.metric)
    train_hash, eval_hash = (contents[name][0] if name in contents else None for name in ("train", "eval"))
    return Data(
        *(train, evaluation, test, tasks.get("test", task), tuple(notes)),
        *(train_hash, eval_hash, folder.processor, "eval" in scored, tasks.get("eval")),
    )


def _answer(
    encoded: dict[Split, Dataset], labels: dict[Split, Labels], folder: ModelFolder, task: Task
) -> Iterator[Note]:
    """Label the examples whose labels are to be the model's answers, with notes; drop test examples that cannot be.

    `labels` gets `NONE` for splits that cannot be labelled.
    """
    for name in [name for name in encoded if labels[name] is Labels.ANSWERS]:
        labelled = with_answers(task, encoded[name], folder.model)
        if labelled is not None:
            encoded[name] = labelled
            metric = task.agreement_on(labelled).metric
            text = (
                f"the {len(labelled)} {PURPOSES[name]} rows have no labels: what the whole model answers counts as"
                f" right, and the metric is the {metric}; if a column holds labels, name it (--label-column)"
            )
            yield Note(text=text, code=NoteCode.ANSWERS_AS_LABELS)
            continue
        labels[name] = Labels.NONE
        if name == "test":
            del encoded[name]


def _with_targets(examples: Dataset, drawn_rows: int, seed: int, folder: ModelFolder, task: Task) -> Dataset:
    """Training examples with the targets that the model generates, of as many as the run draws, if they need any."""
    drawn = with_targets(task, draw_rows(examples, drawn_rows, seed), folder.model)
    return examples if drawn is None else drawn


def _open_further(
    request: RowsConfig, train: SourceRows | None, drawn_rows: int | None, seed: int, task: Task, tables: IdTables
) -> tuple[Dataset, list[Note]]:
    """The examples of `unlabelled_data`, with notes; raise UsageError if training labels are read, or without rows."""
    if drawn_rows is None or train is None:
        problem = "there are no training rows" if train is None else "labels of training rows are read"
        raise UsageError(
            f"--unlabelled-data {request.unlabelled_data}: {problem}, so that these rows cannot be used; omit it",
            code=ErrorCode.CONTRADICTION,
            field="unlabelled_data",
            value=request.unlabelled_data,
        )
    source, split_notes = _read_unlabelled(request, task.read)
    source, drawn_notes = _draw_candidates(source, drawn_rows, seed, task)
    encoded = _encode_unlabelled(task, request, source, train, tables)
    text = f"{len(encoded)} rows of {source.source} are added to the training rows, without labels"
    return encoded, [*split_notes, *drawn_notes, Note(text=text, code=NoteCode.ROWS_UNLABELLED)]


def _draw_candidates(train: SourceRows, drawn_rows: int, seed: int, task: Task) -> tuple[SourceRows, list[Note]]:
    """The training rows that are encoded: all, or enough of many to draw lengths that are served from."""
    count = max(_CANDIDATES, _CANDIDATES_PER_ROW * drawn_rows)
    if len(train.rows) <= count or task.in_order or task.set_aside_by:  # running texts and queries stay whole
        return train, []
    indices = draw_indices(len(train.rows), count, seed, task.joined_rows)
    text = (
        f"{train.source}: {len(indices)} of its {len(train.rows)} rows, drawn with seed {seed}, are used; the run needs"
        " no more"
    )
    origin = train.origin.select(lambda: indices)
    return SourceRows(train.rows.select(indices), train.source, origin), [Note(text=text, code=NoteCode.ROWS_DRAWN)]


def _learn_labels(
    task: Task,
    splits: Mapping[Split, SourceRows],
    request: RowsConfig,
    *,
    allows_none: bool,
    scores_answers: bool,
) -> dict[Split, Labels]:
    """Learn the labels of the first split that has some; those before it have none of their own.

    A split that is set aside from another has labels as that has. Evaluation and test rows without labels of their own
    have the answers of the model if `scores_answers`.

    Raises:
        InputError: labels are missing in training rows that need them, in rows that the recipe names for scores, or in
            all rows although the recipe names their column.
    """
    named = {"eval": request.eval_data, "test": request.test_data}
    unlabelled: list[Split] = []
    for name, split in splits.items():
        try:
            with split.origin.located():
                task.learn_labels(split.rows, split.source)
            break
        except InputError as error:
            is_last = len(unlabelled) == len(splits) - 1
            is_scored = named.get(name) is not None and not scores_answers
            needs_labels = not allows_none or is_scored
            if error.code is not ErrorCode.COLUMN_MISSING or needs_labels or (is_last and request.label_column):
                raise
            unlabelled.append(name)
    labels: dict[Split, Labels] = {}
    lacks_labels = False
    for name in PURPOSES:
        lacks_labels = name in unlabelled if name in splits else lacks_labels
        without = Labels.ANSWERS if scores_answers and name != "train" else Labels.NONE
        labels[name] = without if lacks_labels else Labels.ROWS
    return labels


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


def _read_unlabelled(request: RowsConfig, read: Callable[[str], SplitRows]) -> tuple[SourceRows, list[Note]]:
    """The rows of `unlabelled_data`, with notes; a single column, such as lines of text, is the column of texts."""
    source = request.unlabelled_data
    assert source is not None
    named = read(source)
    name, chosen = _select_split("train", named, source)
    rows, columns = chosen.rows, request.text_columns
    notes = []
    if len(columns) == len(rows.column_names) == 1 and columns[0] not in rows.column_names:
        if rows.info.builder_name in TABLES:
            text = f"the column {rows.column_names[0]!r:.60} of {source} is read as {columns[0]!r}"
            notes.append(Note(text=text, code=NoteCode.TEXT_COLUMNS))
        rows = rows.rename_column(rows.column_names[0], columns[0])
    if unused := [split for split in named if split != name]:
        text = f"of {source}, the split {name!r} is used, and not {', '.join(map(repr, unused))}"
        notes.append(Note(text=text, code=NoteCode.SPLIT_UNUSED))
    return SourceRows(rows, chosen.source, chosen.origin), notes


def _encode_unlabelled(
    task: Task, request: RowsConfig, rows: SourceRows, train: SourceRows, tables: IdTables
) -> Dataset:
    """Encode rows without labels; raise InputError if they have another number of texts, or the task needs labels."""
    if not request.text_columns:  # the recipe's columns are those of both
        texts, of_train = (task.usual_texts(part.rows) for part in (rows, train))
        if texts and len(texts) != len(of_train):
            raise InputError(
                f"{rows.source}: a row has {len(texts)} text(s) ({', '.join(texts)}), and a training row has"
                f" {len(of_train)}; give rows of one form, or name the columns of text (--text-columns)",
                code=ErrorCode.FILE_MISMATCH,
                field="text_columns",
                columns=texts,
            )
    try:
        return encode_rows(task, rows, tables, is_labelled=False)
    except InputError as error:
        if error.details.get("field") != "label_column":
            raise
        raise InputError(
            f"{rows.source}: {task.name} encodes rows together with their labels, and there are none; add labels, or"
            " omit these rows (--unlabelled-data)",
            code=error.code,
            field="unlabelled_data",
            source=rows.source,
        ) from error


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
        text = (
            f"{source}: the task encodes these rows as {_types(further)}, the training rows as {_types(train)}; let"
            " encode and encode_unlabelled of the task return equal columns"
        )
        raise InputError(text, code=ErrorCode.FILE_MISMATCH, field="unlabelled_data", source=source) from error
    # The fingerprint of the content, which is the default, would take it into memory.
    return concatenate_datasets([train, Dataset(table, fingerprint=generate_random_fingerprint())])


def _types(rows: Dataset) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in rows.features.arrow_schema)


def _require_metric(task: Task, scored: Mapping[Split, Dataset]) -> None:
    """Raise InputError unless the metric of a task is defined on the examples of each split."""
    for split, rows in scored.items():
        if (obstacle := task.metric_obstacle(rows)) is not None:
            raise InputError(
                f"{obstacle} in the {PURPOSES[split]} rows, so that there is no {task.metric}; name other rows"
                f" (--{split}-data)",
                code=ErrorCode.INVALID_ROWS,
                field=f"{split}_data",
            )


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
    if not has_inputs:
        return _hash_of_columns(examples), ()
    for batch in examples.select_columns(names).iter(batch_size=1000):
        for row in zip(*(batch[name] for name in names), strict=True):
            digest.update(repr(row).encode())
            rows.append(hash(repr(row[0])))
    return f"sha256:{digest.hexdigest()}", rows


def _hash_of_columns(examples: Dataset) -> str:
    """`sha256:...` of all columns as they are stored, before `datasets` decodes them."""
    digest = hashlib.sha256()
    columns = examples.select_columns(sorted(examples.column_names)).with_format("arrow")
    for table in columns.iter(batch_size=64):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        digest.update(sink.getvalue())
    return f"sha256:{digest.hexdigest()}"


def _repeated_rows(
    contents: Mapping[Split, tuple[str | None, Sequence[int]]], pairs: Iterable[tuple[Split, Split]]
) -> list[Note]:
    """Notes on scored rows of which another split repeats many, as in a file that is named twice."""
    notes = []
    for scored, split in pairs:
        if split not in contents or scored not in contents:
            continue
        rows, known = contents[scored][1], set(contents[split][1])
        repeated = sum(content in known for content in rows)
        if rows and repeated >= max(_REPEATED, _REPEATED_SHARE * len(rows)):
            text = (
                f"{repeated} of {len(rows)} {PURPOSES[scored]} rows are among the {PURPOSES[split]} rows too, so that"
                f" they do not show what is lost on new rows; name other rows (--{scored}-data)"
            )
            notes.append(Note(text=text, code=NoteCode.ROWS_REPEATED))
    return notes


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
        raise InputError(
            "no rows were named, so nothing can be learned or scored; name them with --data",
            code=ErrorCode.MISSING_VALUE,
            field="data",
        )
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
    """The rows of a split by its name."""
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


def _fill_splits(
    encoded: dict[Split, Dataset],
    splits: Mapping[Split, SourceRows],
    labels: Mapping[Split, Labels],
    seed: int,
    task: Task,
) -> list[Note]:
    """Set evaluation examples aside from training examples, and test examples from those, where the recipe names none.

    `encoded` gets the missing splits; without labels no test examples are needed.
    """
    notes = []
    if "eval" not in encoded and "train" in encoded:
        least = 1 if "test" in encoded or labels["eval"] is Labels.NONE else 2  # half of them become test examples
        source = splits["train"].source
        encoded["train"], encoded["eval"] = _set_aside(
            encoded["train"], source, _EVAL_SHARE, seed, "train", task, least
        )
        notes.append(_set_aside_note("eval", "train", encoded["eval"], seed, task))
    if "test" not in encoded and labels["eval"] is not Labels.NONE:
        source = splits["eval" if "eval" in splits else "train"].source
        encoded["eval"], encoded["test"] = _set_aside(encoded["eval"], source, _TEST_SHARE, seed, "eval", task)
        notes.append(_set_aside_note("test", "eval", encoded["test"], seed, task))
    return notes


def _set_aside(
    examples: Dataset, source: str, share: float, seed: int, split: Split, task: Task, least: int = 1
) -> tuple[Dataset, Dataset]:
    """Divide examples into those that remain, and a share, at least `least`, for another split.

    The share is drawn at random, or is the last part if the task reads examples in order. Both parts keep the order.
    Examples that belong together (`Task.set_aside_by`) are drawn together. Raise InputError if none would remain.
    """
    together = np.arange(len(examples))
    if task.set_aside_by is not None:
        together = np.unique(np.asarray(examples[task.set_aside_by]), return_inverse=True)[1]
    groups = int(together.max(initial=-1)) + 1
    count = max(least, round(share * groups))
    if count >= groups:
        field = "eval_data" if split == "train" else "test_data"
        kind = "rows" if task.set_aside_by is None else f"different values of {task.set_aside_by!r}"
        text = (
            f"{source}: {groups} {PURPOSES[split]} {kind} are too few to set {least} aside; give more rows, or"
            f" --{field.replace('_', '-')}"
        )
        raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, source=source, rows=groups, minimum=least + 1, field=field)
    order = np.arange(groups)[::-1] if task.in_order else np.random.default_rng(seed).permutation(groups)
    is_aside = np.isin(together, order[:count])
    return examples.select(np.flatnonzero(~is_aside)), examples.select(np.flatnonzero(is_aside))


def _set_aside_note(split: Split, origin: Split, rows: Dataset, seed: int, task: Task) -> Note:
    """The note on rows of the split `origin` that were set aside for `split`."""
    choice = "the last ones" if task.in_order else f"drawn with seed {seed}"
    text = (
        f"no {PURPOSES[split]} data was named: {len(rows)} of the {PURPOSES[origin]} rows, {choice}, were set aside"
        " for it"
    )
    if origin == "train":
        text += "; a model that was trained on these rows scores higher on them than on new ones"
    return Note(text=text, code=NoteCode.ROWS_SET_ASIDE)
