"""From a recipe and a model folder to encoded rows for learning, choosing and reporting."""

from __future__ import annotations

import hashlib

import numpy as np
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import InputError
from compressor.model_folder import ModelFolder
from compressor.tasks.base import Data, Task
from compressor.tasks.columns import text_column
from compressor.tasks.labels import withheld
from compressor.tasks.registry import make_task
from compressor.tasks.splits import Split, named_splits, pick

_HELD_OUT = 0.1
"""Share of the training rows that become evaluation rows where none are given."""


def open_data(request: RowsConfig, folder: ModelFolder, seed: int = 0) -> Data:
    """Read, check, encode and divide the rows of a run.

    Raises:
        InputError: a file, a column or a label cannot be used; one line names it and the mend.
    """
    sources, notes = _sources(request)
    task = make_task(folder, request)
    task.learn_labels(*next(iter(sources.values())))
    notes += task.notes
    rows = {split: task.encode(found, source) for split, (found, source) in sources.items()}
    if "eval" not in rows and "train" in rows:
        rows["train"], rows["eval"] = _set_aside(rows["train"], _HELD_OUT, seed, "training", task)
        notes.append(_note("evaluation", "training", rows["eval"], seed, task))
    if "test" not in rows:
        rows["eval"], rows["test"] = _set_aside(rows["eval"], 0.5, seed, "evaluation", task)
        notes.append(_note("test", "evaluation", rows["test"], seed, task))
    none = rows["test"].select([])
    train = rows.get("train", none)
    chosen_on = rows.get("eval", none)
    return Data(train, chosen_on, rows["test"], task, tuple(notes), rows_hash(train), rows_hash(chosen_on))


def training_texts(request: RowsConfig) -> list[str]:
    """The texts of the training rows as they stand there, e.g. to make a tokenizer from.

    Raises:
        InputError: the file cannot be read, or there is no one column of text.
    """
    sources, _ = _sources(request)
    rows, source = sources["train"]
    return list(rows[text_column(rows, request.text_columns, source)])


def _sources(request: RowsConfig) -> tuple[dict[Split, tuple[Dataset, str]], list[str]]:
    """Rows, and what to call them in a message, for each split that was given; and what was chosen unasked."""
    given: dict[Split, str | None] = {"train": request.data, "eval": request.eval_data, "test": request.test_data}
    files = {source: named_splits(source) for source in given.values() if source is not None}
    if not files:
        raise InputError("no rows were given, so nothing can be learned or scored; give them with --data")
    found: dict[Split, tuple[Dataset, str]] = {}
    notes = []
    for split, source in given.items():
        if source is not None:
            found[split] = _meant_for(split, files[source], source)
        elif request.data is not None and (name := pick(files[request.data], split)) is not None:
            if withheld(files[request.data][name]):
                notes.append(f"the split {name!r} of {request.data} is not used, its labels are withheld")
                continue
            found[split] = (files[request.data][name], f"{request.data} [{name}]")
            notes.append(f"the {split} rows are the split {name!r} of {request.data}")
    return found, notes


def _meant_for(split: Split, splits: dict[str, Dataset], source: str) -> tuple[Dataset, str]:
    """The rows for one use; a source of a single split serves any."""
    name = pick(splits, split)
    if name is None and len(splits) > 1:
        raise InputError(
            f"{source}: none of its splits ({', '.join(splits)}) is for {split}; name one train, dev or test, or give"
            " a file of these rows alone"
        )
    if name is None:
        name = next(iter(splits))
    return splits[name], f"{source} [{name}]" if name else source


def _set_aside(examples: Dataset, share: float, seed: int, kind: str, task: Task) -> tuple[Dataset, Dataset]:
    """What stays and what goes: `share` of the rows, at least one, drawn; both parts keep the rows' order.

    Rows that follow each other are cut in two: the last of them go.
    """
    count = max(1, round(share * len(examples)))
    if count >= len(examples):
        flag = "--eval-data" if kind == "training" else "--test-data"
        raise InputError(f"{len(examples)} {kind} row is too few to set one aside; give more rows, or {flag}")
    last_first = np.arange(len(examples))[::-1]
    order = last_first if task.in_order else np.random.default_rng(seed).permutation(len(examples))
    return examples.select(np.sort(order[count:])), examples.select(np.sort(order[:count]))


def _note(new: str, old: str, rows: Dataset, seed: int, task: Task) -> str:
    which = "the last ones" if task.in_order else f"drawn with seed {seed}"
    return f"no {new} data was given: {len(rows)} of the {old} rows, {which}, were set aside for it"


def rows_hash(examples: Dataset) -> str | None:
    """`sha256:...` over encoded rows as tokens, labels and, where there are any, reference texts; None without rows."""
    if not len(examples):
        return None
    digest = hashlib.sha256()
    told = [name for name in ("input_ids", "labels", "reference") if name in examples.column_names]
    for batch in examples.select_columns(told).iter(batch_size=1000):
        for row in zip(*(batch[name] for name in told), strict=True):
            digest.update(repr(row).encode())
    return f"sha256:{digest.hexdigest()}"
