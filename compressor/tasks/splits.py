"""Named splits of a file or a data set, and the selection of training, evaluation and test rows by their names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from datasets import Dataset, DatasetDict, load_dataset

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line, quiet_hub
from compressor.tasks.row_files import is_file_name, read_file

Split = Literal["train", "eval", "test"]

_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "eval": ("dev", "validation", "valid", "val", "eval", "dev_matched", "validation_matched"),
    "test": ("test", "testing", "test_matched"),
}


def named_splits(source: str) -> dict[str, Dataset]:
    """The rows of a file or of a Hugging Face data set, by the name of their split.

    A file is divided by its column `split`, if that holds the usual name of a split; any other file is one split, named
    `""`.

    Args:
        source: path of a file, or `owner/name` or `owner/name:configuration` of a data set.

    Raises:
        InputError: the file cannot be read, or the data set is neither on this machine nor available.
    """
    if not is_file_name(source):
        return _load_from_hub(source)
    rows = read_file(Path(source))
    if "split" not in rows.column_names:
        return {"": rows}
    column = [str(value) for value in rows["split"]]
    names = list(dict.fromkeys(column))
    if not any(pick(names, split) for split in _NAMES):
        return {"": rows}
    indices: dict[str, list[int]] = {name: [] for name in names}
    for index, name in enumerate(column):
        indices[name].append(index)
    return {name: rows.select(numbers) for name, numbers in indices.items()}


def pick(splits: Iterable[str], split: Split) -> str | None:
    """The name among `splits` that means `split`: a usual name, else one that begins with it (`test_2016_flickr`)."""
    names = list(splits)
    for usual in _NAMES[split]:
        for name in names:
            if name.lower() == usual:
                return name
    for usual in _NAMES[split]:
        for name in names:
            if name.lower().startswith((f"{usual}_", f"{usual}-", f"{usual}.")):
                return name
    return None


def _load_from_hub(source: str) -> dict[str, Dataset]:
    """The splits of `owner/name` or `owner/name:configuration`."""
    path, _, configuration = source.partition(":")
    try:
        with quiet_hub():
            splits = load_dataset(path, configuration or None)
    except Exception as error:
        # `datasets` and its network libraries raise many types of errors; each means that the name cannot be used.
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise InputError(
            f"{source}: no such file, and not a Hugging Face data set that can be loaded{offline} ({one_line(error)});"
            " check the path or the name, or download the rows into a .tsv, .csv or .jsonl file",
            code=ErrorCode.FILE_MISSING,
            source=source,
        ) from error
    if not isinstance(splits, DatasetDict):
        raise InputError(
            f"{source}: a streamed data set has no rows to select; name another configuration",
            code=ErrorCode.FILE_UNREADABLE,
            source=source,
        )
    return {str(split): rows for split, rows in splits.items()}
