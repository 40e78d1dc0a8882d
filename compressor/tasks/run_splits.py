"""The training, evaluation and test rows of a run: splits of the sources that it names, or rows that are set aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.results import Note, NoteCode
from compressor.tasks.base import Task
from compressor.tasks.id_tables import IdTables
from compressor.tasks.labels import are_withheld
from compressor.tasks.row_origin import RowOrigin, SplitRows
from compressor.tasks.splits import Split, pick

PURPOSES: dict[Split, str] = {"train": "training", "eval": "evaluation", "test": "test"}
"""Adjectives of the splits in messages."""
_EVAL_SHARE = 0.1
"""Share of the training rows that become evaluation rows if none are requested."""
_TEST_SHARE = 0.5
"""Share of the evaluation rows that become test rows if none are requested."""


@dataclass(frozen=True)
class SourceRows:
    """The rows of one split, their source as messages name it, and where they come from."""

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
            name, splits[split] = select_split(split, sources[source], source)
            training = name if split == "train" else training
            used.add((source, name))
        elif request.data is not None:
            others = {name: rows for name, rows in sources[request.data].items() if name != training}
            picked = pick(others, split)
            if picked is None:
                continue
            used.add((request.data, picked))
            if are_withheld(others[picked]):
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
    """The rows of the split of this name."""
    return SourceRows(splits[name], f"{source} [{name}]" if name else source, splits.origins[name])


def select_split(split: Split, named: SplitRows, source: str) -> tuple[str, SourceRows]:
    """The split of a source for one purpose, with its name; a source with a single split serves every purpose.

    Raises:
        InputError: the source has several splits, and none is for the purpose.
    """
    name = pick(named, split)
    if name is None and len(named) > 1:
        raise InputError(
            f"{source}: none of its splits ({', '.join(named)}) is for {split}; rename one to train, dev or test, or"
            " name a file of these rows alone",
            code=ErrorCode.UNKNOWN_NAME,
            split=split,
            splits=tuple(named),
        )
    name = next(iter(named)) if name is None else name
    return name, _source_rows(named, name, source)


def encode_rows(task: Task, split: SourceRows, tables: IdTables, *, is_labelled: bool) -> Dataset:
    """The encoded rows of a split; errors, also later ones, name a row by its file and its number there.

    Args:
        task: the task that encodes them.
        split: the rows.
        tables: those of the model, in which every id of the rows must have a row.
        is_labelled: whether labels are encoded too.

    Raises:
        InputError: a row cannot be encoded, or the model has no row for one of its ids.
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


def fill_splits(
    encoded: dict[Split, Dataset],
    splits: Mapping[Split, SourceRows],
    unlabelled: Sequence[Split],
    seed: int,
    task: Task,
) -> list[Note]:
    """Set evaluation rows, and test rows with labels, aside from encoded rows where there are none.

    Args:
        encoded: the encoded rows of each split; completed here.
        splits: the rows as they were read.
        unlabelled: the splits without labels, also of rows that are set aside here.
        seed: seed of the draw.
        task: the task that encoded the rows.

    Raises:
        InputError: there are too few rows.
    """
    notes = []
    if "eval" not in encoded and "train" in encoded:
        least = 1 if "test" in encoded or "eval" in unlabelled else 2  # half of them become test rows
        source = splits["train"].source
        encoded["train"], encoded["eval"] = _set_aside(
            encoded["train"], source, _EVAL_SHARE, seed, "train", task, least
        )
        notes.append(_set_aside_note("eval", "train", encoded["eval"], seed, task))
    if "test" not in encoded and "eval" not in unlabelled:
        source = splits["eval" if "eval" in splits else "train"].source
        encoded["eval"], encoded["test"] = _set_aside(encoded["eval"], source, _TEST_SHARE, seed, "eval", task)
        notes.append(_set_aside_note("test", "eval", encoded["test"], seed, task))
    return notes


def _set_aside(
    examples: Dataset, source: str, share: float, seed: int, split: Split, task: Task, least: int = 1
) -> tuple[Dataset, Dataset]:
    """Divide rows into those that remain and those that are set aside for another purpose, at least `least`.

    The rows set aside are drawn at random, and both parts keep the order of rows. If the task reads rows in order, the
    last rows are set aside; rows that belong together (`Task.set_aside_by`) are drawn together.

    Raises:
        InputError: no row would remain.
    """
    together = np.arange(len(examples))
    if task.set_aside_by is not None:
        together = np.unique(np.asarray(examples[task.set_aside_by]), return_inverse=True)[1]
    groups = int(together.max(initial=-1)) + 1
    count = max(least, round(share * groups))
    if count >= groups:
        field = "eval_data" if split == "train" else "test_data"
        kind = "rows" if task.set_aside_by is None else f"different values of {task.set_aside_by!r}"
        raise InputError(
            f"{source}: {groups} {PURPOSES[split]} {kind} are too few to set {least} aside; give more rows, or"
            f" --{field.replace('_', '-')}",
            code=ErrorCode.TOO_FEW_ROWS,
            source=source,
            rows=groups,
            minimum=least + 1,
            field=field,
        )
    order = np.arange(groups)[::-1] if task.in_order else np.random.default_rng(seed).permutation(groups)
    is_aside = np.isin(together, order[:count])
    return examples.select(np.flatnonzero(~is_aside)), examples.select(np.flatnonzero(is_aside))


def _set_aside_note(split: Split, origin: Split, rows: Dataset, seed: int, task: Task) -> Note:
    """The note on `rows` of the split `origin` that were set aside for `split`."""
    choice = "the last ones" if task.in_order else f"drawn with seed {seed}"
    text = (
        f"no {PURPOSES[split]} data was named: {len(rows)} of the {PURPOSES[origin]} rows, {choice}, were set aside"
        " for it"
    )
    if origin == "train":
        text += "; a model that was trained on these rows scores higher on them than on new ones"
    return Note(text=text, code=NoteCode.ROWS_SET_ASIDE)
