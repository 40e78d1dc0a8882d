"""The terminal: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from compressor.progress import ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from compressor.results import Note


class _Stdout(RichConsole):
    """Stdout, which raises BrokenPipeError for a reader that has gone; rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Console:
    """Prints results, notes, progress and errors, according to the common flags.

    Attributes:
        quiet: print no progress and no notes.
        debug: print the traceback of an error, and warnings of libraries.
        json: print results as JSON.

    Args:
        log_seconds: where stderr is no terminal, the time after which a stage prints another line of its progress.
        name: the command, which the line of an error begins with.
    """

    def __init__(self, log_seconds: float = 60.0, name: str = "compress") -> None:
        self.quiet = self.debug = self.json = False
        self._log_seconds, self._name = log_seconds, name

    def result(self, content: RenderableType, data: Any) -> None:
        """Print a result: `data` as JSON under `--json`, else `content`."""
        if self.json:
            print(self.as_json(data), flush=True)
        else:
            _Stdout(soft_wrap=not sys.stdout.isatty()).print(content)

    @staticmethod
    def as_json(content: Any) -> str:
        """`content` as the JSON text that commands print; numbers that JSON lacks are texts, as in report.json."""
        return json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False)

    def note(self, note: Note | str) -> None:
        """Print something that the reader of a result must know; that nothing holds is said by the error at the end."""
        if not self.quiet and getattr(note, "code", None) != "nothing-holds":
            _stderr().print(Text(f"note: {_printable(str(note))}", style="dim"))

    def error(self, text: str) -> None:
        """Print an error as one line."""
        print(f"{self._name}: {_printable(text)}", file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        """Show a progress bar while the stage runs, or regularly print a line in a log; print its time at the end."""
        if self.quiet:
            yield ignore_progress
            return
        console, start = _stderr(), time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task, printed = bar.add_task(name, total=None), start

            def update(finished: int, total: int) -> None:
                nonlocal printed
                bar.update(task, completed=finished, total=total)
                if not console.is_terminal and time.perf_counter() - printed >= self._log_seconds:
                    printed = time.perf_counter()
                    console.print(Text(f"{name}: {finished:,} of {total:,} after {printed - start:.0f} s"))

            yield update
        console.print(Text.assemble((f"{name:<42}", "bold"), f"{time.perf_counter() - start:8.1f} s"))


def text_table(*headings: str) -> Table:
    """An empty table with these columns; a narrow terminal folds its cells and cuts none."""
    return Table(*(Column(heading, overflow="fold") for heading in headings), box=None, pad_edge=False)


def _stderr() -> RichConsole:
    # The stream of this moment: a stage may replace it to discard what libraries print, and the bar goes on.
    return RichConsole(file=sys.stderr, soft_wrap=True)


def _finite(content: Any) -> Any:
    """JSON content with NaN and infinities as texts."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    return content


def _printable(text: str) -> str:
    """A message on one line without control characters, which values of rows may have and terminals execute."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))
