"""A study as a folder of cells: each runs once, in one process at a time, and what it found stays.

A claim is a lock on a file beside the cell's own and ends with the process that holds it, however that ends. A cell is
done when its file is there: it is written beside and renamed.
"""

from __future__ import annotations

import csv
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.progress import Listener, ProgressCallback
from graph_passes.files import atomic_replace

STAMP = "study.json"
CSV_NAME = "study.csv"


@dataclass(frozen=True)
class Cell:
    """One thing to find out.

    Attributes:
        name: of its file; with the study's recipe it says all that the result depends on.
        asked: what to do, written into the result.
        needs: names of the cells that must be done before.
    """

    name: str
    settings: Mapping[str, Any]
    needs: tuple[str, ...] = ()


Do = Callable[[Cell, Path, ProgressCallback], Mapping[str, Any]]
"""What runs a cell: given the folder it may work in, which an interrupted run of the same cell has left as it was."""


class StudyFolder:
    """The folder of one study. Several processes may work in it at once.

    Args:
        path: made if it is not there.
        recipe: what every cell's result depends on; values are JSON's. It claims the folder when cells are run, so that
            a study which is refused before leaves nothing that would refuse the next.

    Raises:
        UsageError: the folder holds a study of another recipe, or something that no study wrote.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any]) -> None:
        self.path = path
        self._recipe = json.loads(json.dumps(recipe))
        self._cells = path / "cells"
        if path.exists() and not path.is_dir():
            raise UsageError(
                f"{path}: is a file; name a folder for the study (-o)", code=ErrorCode.INVALID_VALUE, path=path
            )
        if path.is_dir() and not (path / STAMP).is_file() and any(path.iterdir()) and not self._cells.is_dir():
            raise UsageError(
                f"{path}: no study wrote this folder; name another (-o)", code=ErrorCode.OUTPUT_EXISTS, path=path
            )
        _check_stamp(path, self._recipe)

    def _claim(self) -> None:
        self._cells.mkdir(parents=True, exist_ok=True)
        with _locked(self._cells / ".lock"):
            _check_stamp(self.path, self._recipe)  # another process may have been first
            if not (self.path / STAMP).exists():
                write(self.path / STAMP, json.dumps(self._recipe, indent=1))

    def scratch(self, name: str) -> Path:
        """A file or folder that cells leave for the cells that need them, e.g. weights."""
        (self.path / "kept").mkdir(exist_ok=True)
        return self.path / "kept" / name

    def results(self) -> list[dict[str, Any]]:
        """What every cell that is done has found.

        Raises:
            InputError: a cell's file does not read.
        """
        results = []
        for file in sorted(self._cells.glob("*.json")):
            try:
                results.append(json.loads(file.read_text(encoding="utf-8")))
            except ValueError as error:
                raise InputError(
                    f"{file}: is damaged ({error}); remove it and run the study again",
                    code=ErrorCode.FILE_UNREADABLE,
                    path=file,
                ) from error
        return results

    def run(self, cells: Sequence[Cell], do: Do, listen: Listener) -> None:
        """Run the cells that are not done, and wait for those that other processes run.

        Raises:
            UsageError: another process has claimed the folder for another recipe.
        """
        self._claim()
        total = len(cells)
        while left := [cell for cell in cells if not self._file(cell.name).exists()]:
            ran = False
            for cell in filter(self._ready, left):
                ran |= self._run(cell, do, listen, f"{cells.index(cell) + 1} of {total}")
            if not ran:  # others hold all that could be run: wait for the first to be done, or its process to end
                first = next(filter(self._ready, left))
                self._run(first, do, listen, f"{cells.index(first) + 1} of {total}", wait=True)

    def _ready(self, cell: Cell) -> bool:
        return all(self._file(name).exists() for name in cell.needs)

    def _run(self, cell: Cell, do: Do, listen: Listener, number: str, *, wait: bool = False) -> bool:
        with _claimed(self._file(cell.name), wait) as free:
            if not free:
                return False
            work = self._file(cell.name).with_suffix(".partial")
            work.mkdir(exist_ok=True)
            with listen.stage(f"{cell.name} ({number})") as tell:
                results = {"cell": cell.name, "asked": dict(cell.settings), **do(cell, work, tell)}
            write(self._file(cell.name), json.dumps(results))
            shutil.rmtree(work, ignore_errors=True)
            return True

    def _file(self, name: str) -> Path:
        return self._cells / f"{name}.json"


def write(path: Path, text: str) -> None:
    """Write a file beside its place and rename it."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row; the columns are those of all rows, in order of first use."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_replace(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, columns, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def _check_stamp(path: Path, recipe: Mapping[str, Any]) -> None:
    stamp = path / STAMP
    if not stamp.exists():
        return
    try:
        there = json.loads(stamp.read_text(encoding="utf-8"))
    except ValueError:
        there = {}
    if not isinstance(there, dict) or there != recipe:
        names = dict.fromkeys((*recipe, *there)) if isinstance(there, dict) else {}
        differ = next((name for name in names if there.get(name) != recipe.get(name)), "recipe")
        was, now = (_short(values.get(differ)) for values in (there if names else {}, recipe))
        raise UsageError(
            f"{path}: holds a study of another recipe ({differ} was {was}, now {now}); ask for the same again, or name"
            " another folder (-o)",
            code=ErrorCode.RUN_DIFFERS,
            path=path,
        )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def _claimed(file: Path, wait: bool) -> Iterator[bool]:
    """Whether the cell of `file` is still to be run, by this process alone."""
    with file.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield not file.exists()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
