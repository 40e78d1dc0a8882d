"""The table of advice: what provokes each message that advises, and what following it leads to.

To add an entry, write a function with the key of its message into the module of `entries` that is named after its
package; the failing test of the table prints the keys that lack one:

    @advice("tasks.columns LabelColumn.find text")
    def _(w: World) -> None:
        w.rows("named.tsv", "verdict\\ttext", *TEXTS)
        w.fails("model", "--data", "named.tsv", "--keep", "1", "-o", "out")
        w.right("model", "--data", "named.tsv", "--keep", "1", "-o", "out", "--label-column", "verdict")

`fails` runs a command (or calls a function) that this message, from this place of the source, ends; `notes` one that
notes it. `right` does what the message advises, and succeeds without the note; `clear` does so and meets another
error of the product. One word each for what has to be done: a message that offers two ways has two lines. Commands
work in a copy of a folder with `model`, `rows.tsv`, `plan.json` and `dense.onnx`.

A run succeeds once its model and its rows are loaded and checked, unless the entry says how far it goes:
`w.parses()`, `w.learns()`, `w.whole()`. Entries that take long run in `make zoo` (`zoo=True`). An entry that cannot
be followed on this machine says why (`unfollowed="needs a GPU"`), and provokes its message all the same. Where the
text of a message comes from elsewhere than the place that raises it, its key ends in `text`, and the message that
contains it counts.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from compressor import model_folder
from compressor.cli import main
from compressor.config.fields import FieldConflictError, InvalidValueError, flag_of
from compressor.config.steps import STEPS
from compressor.errors import CompressorError
from compressor.model_folder import load as loaded_afresh
from compressor.results import Note
from compressor.run import pipeline
from compressor.run.steps.base import Graphs
from graph_passes.errors import GraphPassError
from tests.advice.sites import PLACEHOLDER, AdviceSite, advice_sites

LEARN = ("--keep", "1", "--training-steps", "2", "--batch-size", "4", "--max-length", "8", "--batch", "1", "--seq", "8")
"""Flags of a short run that learns."""

SHORT = (*LEARN[4:], "--seconds", "0.01", "--threads", "1")
"""Flags of a short run without a number of heads."""


@dataclass(frozen=True)
class Entry:
    """A message that advises.

    Attributes:
        key: the place of the source that it comes from.
        follow: provokes the message and does what it advises.
        zoo: whether it takes long.
        unfollowed: why the advice cannot be followed here; empty: it is followed.
    """

    key: str
    follow: Callable[[World], None]
    zoo: bool = False
    unfollowed: str = ""

    @property
    def module(self) -> str:
        """The module of the table that the entry is in."""
        return self.follow.__module__


ENTRIES: list[Entry] = []


def advice(
    key: str, *, zoo: bool = False, unfollowed: str = ""
) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Add an entry to the table; a function may follow several messages, one key each."""

    def add(function: Callable[[World], None]) -> Callable[[World], None]:
        ENTRIES.append(Entry(key, function, zoo, unfollowed))
        return function

    return add


class _LoadedError(BaseException):
    """A run has loaded and checked its model and rows."""


@dataclass
class World:
    """What an entry works with: a folder of valid inputs, commands, and what they construct.

    Attributes:
        path: the folder; `model`, `rows.tsv`, `plan.json` and `dense.onnx` lie in it.
        site: the place whose message is expected.
        patch: replaces attributes until the entry ends.
    """

    path: Path
    site: AdviceSite
    patch: pytest.MonkeyPatch
    request: pytest.FixtureRequest
    provoked: int = 0
    followed: int = 0
    _ends: str = "load"
    _noted: bool = False
    _texts: list[str] | None = None

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def out(self) -> Path:
        return self.path / "out"

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the message that the last command constructed."""
        return tuple(self._texts or ())

    def file(self, name: str) -> Path:
        return self.path / name

    def rows(self, name: str, *lines: str) -> Path:
        """Write a file of rows."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, ""]))
        return path

    def run(self, *flags: str | Path) -> tuple[str | Path, ...]:
        """A run of the model on its rows."""
        return (self.model, "--data", self.path / "rows.tsv", *SHORT, "-o", self.out, *flags)

    def keep_one(self, *flags: str | Path) -> tuple[str | Path, ...]:
        """A run of the model on its rows that keeps one head."""
        return self.run("--keep", "1", "--training-steps", "2", *flags)

    def finished(self) -> Path:
        """A copy of the output folder of a run that keeps one head."""
        run: Path = self.request.getfixturevalue("finished_run")
        return shutil.copytree(run, self.path / f"finished-{len(list(self.path.iterdir()))}")

    def pruned(self) -> Path:
        """The output folder of a run under a budget, as far as later runs read it."""
        from compressor.model_folder import example_inputs, load
        from compressor.units import find_groups, keep_all

        folder = load(self.model)
        path = shutil.copytree(self.model, self.path / "pruned", dirs_exist_ok=True)
        keep_all(find_groups(folder.model, example_inputs(folder, 2, 8))).save(path / "plan.json")
        return path

    def stop(self, *arguments: Any, **settings: Any) -> Any:
        """In place of a function that takes long: reaching it is a right run."""
        raise _LoadedError

    def times_nothing(self) -> None:
        """Let `compress bench` of two graphs end before it times them."""
        self.patch.setattr(importlib.import_module("compressor.measure.bench"), "interleave", self.stop)

    def parses(self) -> None:
        """Let runs end once their recipe is valid, for entries on flags alone."""
        self._ends = "parse"

    def learns(self) -> None:
        """Let runs learn heads, without a graph or an engine."""
        self._ends = "learn"

    def whole(self) -> None:
        """Let runs go to their end."""
        self._ends = "whole"

    def fails(self, *command: Any) -> CompressorError | GraphPassError:
        """Run a command or call a function that the message ends."""
        error = self._failure(command)
        assert error is not None, "no error"
        assert self._is_from_site(str(error)), f"another message: {error!r}"
        assert "\n" not in str(error)
        self.provoked += 1
        return error

    def notes(self, *command: Any) -> None:
        """Run a command or call a function that notes the message."""
        error = self._failure(command)
        assert error is None, f"{error!r}"
        assert self._texts, "the note is not constructed"
        self.provoked += 1
        self._noted = True

    def fails_with_note(self, *command: Any) -> None:
        """Run a command that notes the message, or that an error with its text ends."""
        self._failure(command)
        assert self._texts, "the note is not constructed"
        self.provoked += 1

    def fails_inside(self, *command: Any) -> None:
        """Run a command that an error with the text of the message ends."""
        error = self._failure(command)
        assert error is not None
        assert self._is_from_site(str(error)), f"another message: {error!r}"
        self.provoked += 1

    def usage_fails(self, *command: str | Path) -> None:
        """Run a command whose printed line has the text, and that no error of the product ends."""
        captured = self.request.getfixturevalue("capfd")
        captured.readouterr()
        with pytest.raises(AssertionError, match="exit code"):
            self._failure(command)
        printed = captured.readouterr().err
        assert any(text.strip() in printed for text in self.site.texts), printed
        assert self._texts or not self.site.is_call
        self.provoked += 1

    def right(self, *command: Any) -> None:
        """Follow the advice: the command succeeds, and does not note the message again."""
        error = self._failure(command)
        assert error is None, f"following the advice leads to: {error!r}"
        assert not self._texts or not self._noted, f"the same message again: {self._texts}"
        self.followed += 1

    def clear(self, code: str, *command: Any) -> None:
        """Follow the advice to another error of the product, one line with a code."""
        error = self._failure(command)
        assert error is not None, "the advice leads to a right run"
        assert error.code == code, f"{error.code}: {error!r}"
        assert not self._is_from_site(str(error)), f"the same message again: {error!r}"
        assert "\n" not in str(error)
        self.followed += 1

    def _failure(self, command: tuple[Any, ...]) -> CompressorError | GraphPassError | None:
        with _recorded(self.site) as self._texts, self._short_runs():
            if callable(command[0]):
                try:
                    command[0](*command[1:])
                except (CompressorError, GraphPassError) as error:
                    return error
                except _LoadedError:
                    pass
                return None
            try:
                return _command(command)
            finally:
                if self._ends == "learn":  # nothing of this run is for the next one to resume
                    for folder in self.path.glob("*.partial"):
                        shutil.rmtree(folder)

    @contextmanager
    def _short_runs(self) -> Iterator[None]:
        load = pipeline.load_context

        def load_only(*arguments: Any, **settings: Any) -> Any:
            context = load(*arguments, **settings)
            if self._ends == "learn":
                pipeline.walk(context, Graphs(None, None, ()))  # type: ignore[arg-type]
            if self._ends != "whole":
                raise _LoadedError
            return context

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "load_context", load_only)
            if self._ends == "load":
                patch.setattr(model_folder, "load", _loaded_once)
            if self._ends == "parse":
                patch.setattr(pipeline, "compress", self.stop)
            yield

    def _is_from_site(self, message: str) -> bool:
        # A list of steps names an option as `units.macs` where flags name it `--macs`.
        by_flags = _OPTION.sub(lambda option: flag_of(option[1]), message)
        return any(text in message or text in by_flags for text in self._texts or ())


_OPTION = re.compile(rf"\b(?:{'|'.join(STEPS)})\.(\w+)")


_LOADED: dict[tuple[object, ...], model_folder.ModelFolder] = {}
"""Contents and options of a model folder -> the loaded folder."""


def _loaded_once(path: Path, *, task: str | None = None, inputs: Path | None = None, **options: Any) -> Any:
    """Load a folder as runs do, once for equal files: a run that ends when it is checked does not change its model."""
    load = partial(loaded_afresh, path, task=task, inputs=inputs, **options)
    if task is not None or inputs is not None or not path.is_dir():
        return load()
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    key = (*sorted(files.items()), *sorted(options.items()))
    if key not in _LOADED:
        folder = load()
        if folder.notes or folder.base is not None:  # these have the path in their texts
            return folder
        _LOADED[key] = folder
    return replace(_LOADED[key], path=path, load_again=load)


def _command(arguments: tuple[Any, ...]) -> CompressorError | GraphPassError | None:
    """Run a command in this process; its error, or None if it succeeds."""
    try:
        main([str(argument) for argument in arguments])
    except _LoadedError:
        return None
    except SystemExit as end:
        cause = end.__cause__
        if isinstance(cause, CompressorError | GraphPassError):
            return cause
        if end.code:
            raise AssertionError(f"exit code {end.code}: {cause!r}") from cause
    return None


@contextmanager
def _recorded(site: AdviceSite) -> Iterator[list[str]]:
    """The texts of the errors and notes that a place constructs, or, for a text, of those that contain it."""
    texts: list[str] = []

    def record(text: str) -> None:
        if site.is_call:
            if any(_is_at(frame, site) for frame in _frames(sys._getframe(2))):
                texts.append(text)
        elif any(part in text for part in site.texts):
            texts.append(text)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (CompressorError, GraphPassError, FieldConflictError, InvalidValueError):
            patch.setattr(kind, "__init__", _recording(kind.__init__, record, _text_of))
        patch.setattr(Note, "__init__", _recording(Note.__init__, record, lambda self: self.text))
        yield texts


def _text_of(error: Exception) -> str:
    """The text of an error, with a mark at the names of fields in a conflict."""
    return error.message if isinstance(error, FieldConflictError) else str(error)


def _recording(method: Any, record: Callable[[str], None], text_of: Callable[..., str]) -> Any:
    def init(self: Any, *arguments: Any, **settings: Any) -> None:
        method(self, *arguments, **settings)
        record(PLACEHOLDER.sub(lambda field: flag_of(field[1]), text_of(self)))

    return init


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The callers that construct an error: subclasses and factories are between them and the base class."""
    for _ in range(4):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_at(frame: FrameType, site: AdviceSite) -> bool:
    return Path(frame.f_code.co_filename) == site.file and site.lines[0] <= frame.f_lineno <= site.lines[1]


def site_of(key: str) -> AdviceSite:
    sites = advice_sites()
    assert key in sites, f"no message has the key {key!r}"
    return sites[key]
