"""Which rows are for learning, for choosing and for reporting."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from datasets import Dataset, DatasetDict, load_dataset

from compressor.errors import InputError
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

    A file with a column `split` that holds a known split's name is divided by it; any other file is one split, named
    `""`.

    Raises:
        InputError: the file cannot be read, or the data set is neither on this machine nor to be had.
    """
    if not is_file_name(source):
        return _from_hub(source)
    rows = read_file(Path(source))
    if "split" not in rows.column_names:
        return {"": rows}
    column = [str(value) for value in rows["split"]]
    names = list(dict.fromkeys(column))
    if not any(pick(names, split) for split in _NAMES):
        return {"": rows}
    where: dict[str, list[int]] = {name: [] for name in names}
    for index, name in enumerate(column):
        where[name].append(index)
    return {name: rows.select(indices) for name, indices in where.items()}


def pick(splits: Iterable[str], split: Split) -> str | None:
    """The one of `splits` that means `split`: by a usual name, else by a usual beginning (`test_2016_flickr`)."""
    names = list(splits)
    for known in _NAMES[split]:
        for name in names:
            if name.lower() == known:
                return name
    for known in _NAMES[split]:
        for name in names:
            if name.lower().startswith((f"{known}_", f"{known}-", f"{known}.")):
                return name
    return None


def _from_hub(name: str) -> dict[str, Dataset]:
    """`owner/name` or `owner/name:configuration`."""
    path, _, configuration = name.partition(":")
    try:
        with quiet_hub():
            found = load_dataset(path, configuration or None)
    except Exception as error:
        # The library and the network beneath it raise dozens of types; whichever it is, this name cannot be used.
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise InputError(
            f"{name}: no such file, and as a Hugging Face data set it cannot be loaded{offline} ({one_line(error)});"
            " check the path or the name, or download the rows into a .tsv, .csv or .jsonl file"
        ) from error
    if not isinstance(found, DatasetDict):
        raise InputError(f"{name}: is streamed, not a data set of rows; name another configuration")
    return {str(split): rows for split, rows in found.items()}
