"""Read the splits of files or a data set, and select training, evaluation and test rows by the names of splits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from compressor.errors import ErrorCode, InputError, RowError
from compressor.silence_libraries import one_line, quiet_hub
from compressor.tasks.columns import is_text
from compressor.tasks.row_files import is_file_name, read_rows, row_files, stem_of
from compressor.tasks.row_store import RowOrigin, SplitRows

Split = Literal["train", "eval", "test"]

_SAVED = ("state.json", "dataset_dict.json")  # files that `datasets` saves with a data set, without and with splits
_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "eval": ("dev", "validation", "valid", "val", "eval", "dev_matched", "validation_matched"),
    "test": ("test", "testing", "test_matched"),
}


def named_splits(source: str) -> SplitRows:
    """The rows of a file, of a folder of files, or of a data set of Hugging Face, by the name of their split.

    A file is divided by its column `split`, if that holds the usual name of a split; otherwise it is a single split
    named `""`. The files of a folder are concatenated, by split if their names begin with those of splits:
    `train-0.tsv`, `train-1.tsv`, `dev.tsv`.

    Args:
        source: path of a file, of a folder of files or of a saved data set, or `owner/name` or
            `owner/name:configuration` of a data set.

    Raises:
        InputError: the rows cannot be read, only some files of a folder are named after a split, or the data set is
            neither on this machine nor available.
    """
    path = Path(source)
    if not is_file_name(source):
        return SplitRows(_load_from_hub(source))
    if is_saved(path):
        try:
            saved = load_from_disk(str(path))
        except Exception as error:
            # `datasets` raises errors of many types for damaged files.
            text = f"{path}: the saved data set cannot be loaded ({one_line(error)}); save it again"
            raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path) from error
        return SplitRows(_by_name(saved) if isinstance(saved, DatasetDict) else {"": saved})
    files = row_files(path) if path.is_dir() else [path]
    by_split = files_by_split(files, source) if path.is_dir() else {"": files}
    if len(by_split) == 1:
        return _divide(*read_rows(files), source)
    read = {split: read_rows(paths) for split, paths in by_split.items()}
    return SplitRows(
        {split: rows for split, (rows, _) in read.items()}, {split: origin for split, (_, origin) in read.items()}
    )


def files_by_split(files: Iterable[Path], source: str) -> dict[str, list[Path]]:
    """The files of a folder by the split that their names begin with, such as `dev` or `dev-0`, or all under `""`.

    Raises:
        InputError: only some files are named after a split.
    """
    by_split: dict[str, list[Path]] = {}
    for file in files:
        usual = (names[0] for split, names in _NAMES.items() if pick([stem_of(file)], split) is not None)
        by_split.setdefault(next(usual, ""), []).append(file)
    if len(by_split) > 1 and "" in by_split:
        text = (
            f"{source}: {by_split[''][0].name} is named after no split, but other files are; begin its name with "
            f"train, dev or test, or move it"
        )
        raise InputError(text, code=ErrorCode.INVALID_VALUE, path=by_split[""][0])
    return by_split


def _divide(rows: Dataset, origin: RowOrigin, source: str) -> SplitRows:
    """Rows by their column `split`, if that holds the usual name of a split; raise InputError if a cell is empty."""
    if "split" not in rows.column_names or not is_text(rows, "split"):
        return SplitRows({"": rows}, {"": origin})
    column = rows.data.column("split")
    names = [name for name in column.unique().to_pylist() if name is not None]
    if not any(pick(names, split) for split in _NAMES):
        return SplitRows({"": rows}, {"": origin})
    without = np.flatnonzero(pc.or_kleene(pc.is_null(column), pc.equal(column, "")))
    if len(without):
        problem = "it belongs to no split; fill its column 'split' or remove the row"
        with origin.located():
            raise RowError.of(source, int(without[0]) + 1, problem, column="split")
    selections = {name: partial(lambda name: np.flatnonzero(pc.equal(column, name)), name) for name in names}
    return SplitRows(
        {name: rows.select(indices()) for name, indices in selections.items()},
        {name: origin.select(indices) for name, indices in selections.items()},
    )


def pick(splits: Collection[str], split: Split) -> str | None:
    """The name among `splits` that means `split`: a usual name, else one that begins with it (`test_2016_flickr`)."""
    pairs = [(usual, name) for usual in _NAMES[split] for name in splits]
    same = (name for usual, name in pairs if name.lower() == usual)
    longer = (name for usual, name in pairs if name.lower().startswith((f"{usual}_", f"{usual}-", f"{usual}.")))
    return next(itertools.chain(same, longer), None)


def pick_any(splits: Collection[str], *preferred: Split) -> str:
    """The name among `splits` that means the first of the preferred purposes; without such a name, the first."""
    return next(filter(None, (pick(splits, split) for split in preferred)), next(iter(splits)))


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a data set that `datasets` saved."""
    return any((folder / name).is_file() for name in _SAVED)


def _by_name(splits: DatasetDict) -> dict[str, Dataset]:
    return {str(split): rows for split, rows in splits.items()}


def _load_from_hub(source: str) -> dict[str, Dataset]:
    path, _, configuration = source.partition(":")
    try:
        with quiet_hub():
            splits = load_dataset(path, configuration or None)
    except Exception as error:
        # `datasets` and its network libraries raise errors of many types.
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        text = (
            f"{source}: no such file, and not a Hugging Face data set that can be loaded{offline} ({one_line(error)});"
            " check the path or the name, or download the rows into a .tsv, .csv or .jsonl file"
        )
        raise InputError(text, code=ErrorCode.FILE_MISSING, source=source) from error
    if not isinstance(splits, DatasetDict):
        text = f"{source}: a streamed data set has no rows to select; name another configuration"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, source=source)
    return _by_name(splits)
