"""Read and encode the rows of a run: training, evaluation and test rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder
from compressor.results import Note, NoteCode
from compressor.tasks.base import Task
from compressor.tasks.causal_lm import CausalLM
from compressor.tasks.id_tables import IdTables
from compressor.tasks.metric_obstacles import require_metric
from compressor.tasks.registry import make_task
from compressor.tasks.row_contents import read_contents, repeated_rows
from compressor.tasks.run_splits import PURPOSES, SourceRows, encode_rows, fill_splits, read_splits
from compressor.tasks.splits import Split, named_splits
from compressor.tasks.unlabelled_rows import encode_unlabelled, join_rows, read_unlabelled

logger = logging.getLogger(__name__)

_CANDIDATES = 2**17
_CANDIDATES_PER_ROW = 2
"""Of more training rows than the first number, and than the second for each that a run draws, only some are encoded."""


@dataclass(frozen=True)
class Data:
    """Encoded rows of one run, ready for `Task.collate`.

    Attributes:
        train: rows to learn from; empty if a given plan is followed.
        eval: rows by which heads and checkpoints are selected; empty if only test rows were requested.
        test: rows whose metric is reported; nothing is selected by them. Empty where no rows have labels.
        task: the task that encoded them.
        notes: facts for the reader, e.g. that test rows were set aside from the evaluation rows.
        train_hash: `sha256:...` of the encoded training rows, independent of their file; None without rows.
        eval_hash: `sha256:...` of the encoded evaluation rows; None without rows.
        tokenizer: the tokenizer of the folder, which decodes rows for a reader; None: there is none.
        scores_eval: whether the evaluation rows have labels, so that the metric can be computed on them.
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

    def of_chooser(self) -> Data:
        """The same rows with the task that selects units (`Task.chooser`).

        Raises:
            InputError: its metric is not defined on the training or evaluation rows, so that it cannot select any.
        """
        task = self.task.chooser
        rows: dict[Split, Dataset] = {"train": self.train, "eval": self.eval}
        if task is not self.task:
            require_metric(task, {split: part for split, part in rows.items() if len(part)})
        return replace(self, task=task)


def open_data(request: RowsConfig, folder: ModelFolder, seed: int = 0, *, drawn_rows: int | None = None) -> Data:
    """Read, check, encode and divide the rows of a run.

    Rows that exceed the memory are memory-mapped (`RowStore`).

    Args:
        request: files, columns, metric and maximum row length. Rows of `unlabelled_data` are behind those of `data`.
        folder: its task and tokenizer encode the rows.
        seed: seed of the draw of rows that are set aside.
        drawn_rows: number of training rows that the run draws at most, without reading their labels, which these rows
            and further splits of the same data may lack; of many rows, only some are encoded, and files that rows refer
            to are left for the caller to check (`Task.check_files`). None: it reads all, with labels.

    Raises:
        InputError: a file, a column or a label cannot be used.
        UsageError: the task does not have the metric, or labels are read and there is `unlabelled_data`.
    """
    task = make_task(folder, request)
    splits, notes = read_splits(request, task.read)
    if drawn_rows is not None and "train" in splits:
        splits["train"], drawn_notes = _draw_candidates(splits["train"], drawn_rows, seed, task)
        notes += drawn_notes
    unlabelled = _learn_labels(task, splits, request, allows_unlabelled=drawn_rows is not None)
    tables = IdTables.of(folder.model, folder.processor)
    encoded = {
        name: encode_rows(task, split, tables, is_labelled=name not in unlabelled)
        for name, split in splits.items()
        if name != "test" or name not in unlabelled  # nothing but the metric is computed on test rows
    }
    further = None
    if request.unlabelled_data is not None:
        further, further_notes = _open_further(request, splits.get("train"), drawn_rows, seed, task, tables)
        notes += further_notes
    notes += task.notes
    if unlabelled:
        notes.append(_unlabelled_note([splits[name].source for name in unlabelled]))
    if "train" in unlabelled and "eval" not in splits:
        unlabelled += ("eval",)
    notes += fill_splits(encoded, splits, unlabelled, seed, task)
    if further is not None:
        encoded["train"] = join_rows(encoded["train"], further, str(request.unlabelled_data))
    scored: dict[Split, Dataset] = {
        split: rows for split, rows in encoded.items() if split != "train" and split not in unlabelled
    }
    require_metric(task, scored)
    for split, rows in encoded.items():
        if split != "train" or drawn_rows is None:
            task.check_files(rows)
    contents = {split: read_contents(rows) for split, rows in encoded.items()}
    if not task.in_order:  # windows of running text repeat each other without being the same rows
        pairs: list[tuple[Split, Split]] = [("test", "train"), ("test", "eval")]
        notes += repeated_rows(contents, pairs if further is None else [*pairs, ("eval", "train")])
    empty = next(iter(encoded.values())).select([])
    train, evaluation, test = (encoded.get(split, empty) for split in PURPOSES)
    logger.debug(
        "%s: %d training, %d evaluation and %d test rows, scored by %s",
        task.name,
        len(train),
        len(evaluation),
        len(test),
        task.metric,
    )
    train_hash, eval_hash = (contents[name].digest if name in contents else None for name in ("train", "eval"))
    scores_eval = "eval" in scored
    return Data(
        train, evaluation, test, task, tuple(notes), train_hash, eval_hash, folder.processor, scores_eval=scores_eval
    )


def _unlabelled_note(sources: Sequence[str]) -> Note:
    text = (
        f"{', '.join(sources)}: the rows have no labels, and none are needed to choose units, to refit weights, to"
        " learn a teacher's outputs or to quantize"
    )
    return Note(text=text, code=NoteCode.ROWS_UNLABELLED)


def _open_further(
    request: RowsConfig, train: SourceRows | None, drawn_rows: int | None, seed: int, task: Task, tables: IdTables
) -> tuple[Dataset, list[Note]]:
    """The encoded rows of `unlabelled_data`, with notes on them.

    Raises:
        UsageError: there are no training rows, or their labels are read.
        InputError: the rows cannot be used.
    """
    if drawn_rows is None or train is None:
        problem = "there are no training rows" if train is None else "labels of training rows are read"
        raise UsageError(
            f"--unlabelled-data {request.unlabelled_data}: {problem}, so that these rows cannot be used; omit it",
            code=ErrorCode.CONTRADICTION,
            field="unlabelled_data",
            value=request.unlabelled_data,
        )
    source, split_notes = read_unlabelled(request, task.read)
    source, drawn_notes = _draw_candidates(source, drawn_rows, seed, task)
    encoded = encode_unlabelled(task, request, source, train, tables)
    text = f"{len(encoded)} rows of {source.source} are added to the training rows, without labels"
    return encoded, [*split_notes, *drawn_notes, Note(text=text, code=NoteCode.ROWS_UNLABELLED)]


def _draw_candidates(train: SourceRows, drawn_rows: int, seed: int, task: Task) -> tuple[SourceRows, list[Note]]:
    """The training rows that are encoded: all, or enough of many to draw the lengths from that are served."""
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
    task: Task, splits: Mapping[Split, SourceRows], request: RowsConfig, *, allows_unlabelled: bool
) -> tuple[Split, ...]:
    """Learn the labels from the first split that has them; return the splits before it, which have none.

    Raises:
        InputError: labels are missing in training rows that need them, in rows that are named to be scored, or in all
            rows though their column is named.
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
            needs_labels = not allows_unlabelled or named.get(name) is not None
            if error.code is not ErrorCode.COLUMN_MISSING or needs_labels or (is_last and request.label_column):
                raise
            unlabelled.append(name)
    return tuple(unlabelled)


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


def draw_rows(rows: Dataset, count: int, seed: int) -> Dataset:
    """Rows drawn at random, in their order; all if there are no more.

    Args:
        rows: encoded rows.
        count: number of rows to draw.
        seed: seed of the draw.
    """
    return rows if len(rows) <= count else rows.select(draw_indices(len(rows), count, seed))


def draw_indices(rows: int, count: int, seed: int, together: int = 1) -> np.ndarray:
    """The indices of rows drawn at random, in their order.

    Args:
        rows: number of rows, more than `count`.
        count: number of rows to draw, up to a group.
        seed: seed of the draw.
        together: number of consecutive rows that are drawn as a group.
    """
    groups, drawn = -(-rows // together), -(-count // together)
    firsts = together * np.sort(np.random.default_rng(seed).choice(groups, drawn, replace=False, shuffle=False))
    numbers = (firsts[:, None] + np.arange(together)).ravel()
    return numbers[numbers < rows]
