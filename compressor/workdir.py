"""Where a run works until it is done: `<out>.partial`, one run at a time, renamed to `<out>` at the end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from compressor.errors import CompressorError, InputError, UsageError
from graph_passes.files import atomic_replace

MAPS = Path("blocks", "maps.safetensors")
"""Watched attention maps, in `WorkDir.learning`."""
_STAMP = ".compress"
_OURS = (("report.json", "plan.json"), ("training.json",))
"""Files by which a folder that a run wrote, or a training, is known."""


class WorkDir:
    """The folders of one run.

    Attributes:
        out: what the user asked for; it is not there, or is what stood there before, until `finish`.
        path: `<out>.partial`.
        result: what becomes `out`.
        scratch: graphs and engines that nobody keeps.
        learning: checkpoints and what was learned; all that an interrupted run leaves behind.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out.with_name(f"{out.name}.partial")
        self.result = self.path / "result"
        self.scratch = self.path / "scratch"
        self.learning = self.path / "learning"

    def reserve(self, needed: int) -> None:
        """Raise InputError unless `needed` bytes are free where the run works."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise InputError(
                f"{self.path}: {free / 1e9:.2f} GB are free and the run needs {needed / 1e9:.2f}; free some space, or"
                " write elsewhere (-o)"
            )

    def finish(self) -> None:
        """Make `result` the output folder: it is there whole, or what stood there before is."""
        for file in self.result.rglob("*"):
            if file.is_file():  # safetensors writes for its owner alone, and who serves the folder may be another
                shutil.copymode(self.path / _STAMP, file)
        replace_folder(self.result, self.out, aside=_aside(self.out))
        shutil.rmtree(self.path, ignore_errors=True)


def replace_folder(new: Path, out: Path, *, aside: Path) -> None:
    """Make the folder `new` the folder `out`; what stood there goes, by way of `aside`, or stays if that fails."""
    # Ctrl-C between the two renames would leave nothing under the name.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        if out.exists():
            out.rename(aside)
        try:
            new.rename(out)
        except OSError:
            if aside.exists():
                aside.rename(out)
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def open_workdir(out: Path, *, force: bool) -> Iterator[WorkDir]:
    """The work folder of a run that will write `out`; what cannot be resumed is removed when the run ends.

    Raises:
        UsageError: `out` is there and may not be replaced.
        InputError: another run is at work there, the folder cannot be written, or the disk is full.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100  (a last `..` or `.` must go, a symbolic link must not)
    work = WorkDir(out)
    _check_ours(work.path)
    work.path.mkdir(parents=True, exist_ok=True)
    with locked(work.path):
        try:
            _recover(out)
            _check_target(out, force)
        except Exception:
            with contextlib.suppress(OSError):  # whatever an earlier run left in it stays
                work.path.rmdir()
            raise
        (work.path / _STAMP).touch()
        for folder in (work.result, work.scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        try:
            yield work
        except KeyboardInterrupt as interrupt:
            hint = f"; the same command goes on from {work.path}" if _leave(work) else ""
            raise KeyboardInterrupt(f"interrupted{hint}") from interrupt
        except Exception as error:
            kept = f" (what was learned is kept in {work.path})" if _leave(work) else ""
            if _is_full(error):
                raise InputError(
                    f"{work.path}: the disk is full; free some space and run the same command again{kept}"
                ) from error
            if kept and isinstance(error, CompressorError):
                raise type(error)(f"{error}{kept}", code=error.code, **error.details) from error
            raise


def _leave(work: WorkDir) -> bool:
    """Remove what cannot be resumed; say whether anything can."""
    for folder in (work.result, work.scratch):
        shutil.rmtree(folder, ignore_errors=True)
    ended = (work.learning / "done.json", work.learning / MAPS)
    if any(work.learning.rglob("checkpoint-*")) or any(path.is_file() for path in ended):
        return True
    shutil.rmtree(work.path, ignore_errors=True)
    return False


def _recover(out: Path) -> None:
    """Put back what a run that was killed between its two last renames had moved aside."""
    old = _aside(out)
    if old.exists() and not out.exists():
        old.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _aside(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")


def _check_target(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not force:
        raise UsageError(f"{out}: is there already; add --force to replace it, or name another folder (-o)")
    if not out.is_dir() or not any(all((out / name).is_file() for name in names) for names in _OURS):
        raise UsageError(f"{out}: no run wrote this folder, so --force does not replace it; name another (-o)")


def _check_ours(path: Path) -> None:
    if path.exists() and not (path / _STAMP).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path}: stands in the way and no run has left it; move it, or name another output (-o)")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the folder for this run. The lock goes with the process, however that ends."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{path}: another run is at work there; wait for it, or name another output (-o)") from error
    else:
        yield
    finally:
        os.close(handle)


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error: libraries in C++ and Rust report it as text, in types of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(error) for words in ("No space left on device", "os error 28", "inline_container.cc")):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_json(path: Path, content: object) -> None:
    """Write a file that is there whole or not at all."""
    with atomic_replace(path) as place:
        place.write_text(json.dumps(content))
