"""A study as a folder of cells: each cell runs once, in one process at a time, and its result stays on disk.

A process claims a cell with a lock on a file beside the cell's file; the lock ends with the process. A cell is finished
when its file exists: the file is written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.progress import Listener, ProgressCallback
from compressor.workdir import file_lock
from graph_passes.files import write_text

STAMP = "study.json"

Result = Mapping[str, Any]
"""The contents of a cell's file: `cell`, `settings`, `seconds`, and what `Study.run` returned."""


@dataclass(frozen=True)
class Cell:
    """One unit of work of a study.

    Attributes:
        name: name of its file. The name and the study's recipe determine the result.
        settings: parameters of the cell, which are written into the result.
        needs: names of the cells that must finish first.
    """

    name: str
    settings: Mapping[str, Any]
    needs: tuple[str, ...] = ()


RunCell = Callable[[Cell, Path, ProgressCallback], Mapping[str, Any]]
"""Runs a cell in its working folder, which keeps the files of an interrupted run of the same cell."""


class CellStore:
    """The folder of one study. Several processes may work in it at once.

    Args:
        path: the folder; created if it is missing.
        recipe: everything that the results depend on besides the cells' names, as JSON values. It is written when the
            first cell runs, so that a study that is refused earlier does not occupy the folder.

    Raises:
        UsageError: the folder holds a study of another recipe, or files that no study wrote.
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
        with file_lock(self._cells / ".lock", create=True):
            _check_stamp(self.path, self._recipe)  # another process may have been first
            if not (self.path / STAMP).exists():
                write_text(self.path / STAMP, json.dumps(self._recipe, indent=1))

    def scratch(self, name: str) -> Path:
        """Path of a file or folder that a cell writes for the cells that need it, e.g. weights."""
        (self.path / "kept").mkdir(exist_ok=True)
        return self.path / "kept" / name

    def results(self) -> list[dict[str, Any]]:
        """The results of all finished cells.

        Raises:
            InputError: a cell's file cannot be read.
        """
        return read_results(self.path)

    def run(self, cells: Sequence[Cell], run_cell: RunCell, listener: Listener) -> None:
        """Run the cells that are not finished, and wait for those that other processes run.

        Raises:
            UsageError: another process has claimed the folder for another recipe.
        """
        self._claim()
        total = len(cells)
        while left := [cell for cell in cells if not self._file(cell.name).exists()]:
            ran = False
            for cell in filter(self._ready, left):
                ran |= self._run(cell, run_cell, listener, f"{cells.index(cell) + 1} of {total}")
            if (
                not ran
            ):  # other processes run all that is ready: wait until the first is finished or its process has ended
                first = next(filter(self._ready, left))
                self._run(first, run_cell, listener, f"{cells.index(first) + 1} of {total}", wait=True)

    def _ready(self, cell: Cell) -> bool:
        return all(self._file(name).exists() for name in cell.needs)

    def _run(self, cell: Cell, run_cell: RunCell, listener: Listener, number: str, *, wait: bool = False) -> bool:
        with _claimed(self._file(cell.name), wait) as free:
            if not free:
                return False
            work = self._file(cell.name).with_suffix(".partial")
            work.mkdir(exist_ok=True)
            with listener.stage(f"{cell.name} ({number})") as on_progress:
                results = {"cell": cell.name, "settings": dict(cell.settings), **run_cell(cell, work, on_progress)}
            write_text(self._file(cell.name), json.dumps(results))
            shutil.rmtree(work, ignore_errors=True)
            return True

    def _file(self, name: str) -> Path:
        return self._cells / f"{name}.json"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results of all finished cells in the folder of a study, by the names of their files.

    Raises:
        InputError: a cell's file cannot be read.
    """
    results = []
    for file in sorted((folder / "cells").glob("*.json")):
        try:
            results.append(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise InputError(
                f"{file}: is damaged ({error}); remove it and run the study again",
                code=ErrorCode.FILE_UNREADABLE,
                path=file,
            ) from error
    return results


def _check_stamp(path: Path, recipe: Mapping[str, Any]) -> None:
    stamp = path / STAMP
    if not stamp.exists():
        return
    try:
        content = json.loads(stamp.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UsageError(
            f"{stamp}: is damaged; remove the study's folder, or name another (-o)",
            code=ErrorCode.RUN_DIFFERS,
            path=path,
        )
    if content != recipe:
        differ = next(name for name in (*recipe, *content) if content.get(name) != recipe.get(name))
        was, now = (_short(values.get(differ)) for values in (content, recipe))
        raise UsageError(
            f"{path}: holds a study of another recipe ({differ} was {was}, now {now}); repeat the former settings, or"
            " name another folder (-o)",
            code=ErrorCode.RUN_DIFFERS,
            path=path,
        )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def _claimed(file: Path, wait: bool) -> Iterator[bool]:
    """Whether this process holds the claim of the cell of `file`, and the cell is not finished."""
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(file.with_suffix(".lock"), wait=wait, create=True))
        except BlockingIOError:
            yield False
        else:
            yield not file.exists()
