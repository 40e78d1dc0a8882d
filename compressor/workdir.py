"""The work folder of a run: `<out>.partial`, for one run at a time; its result is renamed to `<out>` at the end.

It is locked against other processes; `file_lock` locks other files and folders too.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from graph_passes.files import write_text
from graph_passes.interrupts import interrupts_deferred

QUANTIZED_GRAPH = "model.int8.onnx"
"""File of the portable quantized graph in the output folder of a run."""
SYMMETRIC_GRAPH, FP8_GRAPH = "model.int8.symmetric.onnx", "model.fp8.onnx"
"""Files of the symmetric quantized graphs, in int8 and in fp8."""
QUANTIZED_GRAPHS = (QUANTIZED_GRAPH, SYMMETRIC_GRAPH, FP8_GRAPH)
RESULT_KEY = "done.json"
"""The file in the folder of a stored result, with everything that the result depends on; see `compressor.store`."""
ATTEMPTS = "attempts.json"
"""File of the attempts of a step that bisects by the metric."""
_STAMP = ".compress"
_OUTPUT_FILES = (("report.json", "plan.json"), ("training.json",))
"""Files by which the output folder of a run, or of a training, is recognized."""
MAPS, MAPS_FILE = "maps", "maps.safetensors"
"""Name of attention maps in the store of a step, and their file."""
LADDER = "ladder"
"""Folder of the output of a run for slower engines that keep the metric too."""
_LADDER = "frontier.json"
"""File by which the folder of a ladder is recognized."""
_LIBRARY_NAMES = {"engine.xml": "openvino/openvino_model.xml", "engine.bin": "openvino/openvino_model.bin"}
"""File of an engine -> name under which sentence-transformers searches it."""
_LIBRARY_SETTINGS = {"sentence_transformers", "sbert_ce_default_activation_function"}
"""Keys of `config.json` for settings of sentence-transformers, such as the activation of a reranker; the second is that
of older versions."""


class WorkDir:
    """The folders of one run.

    Attributes:
        out: the folder to write; until `finish` it does not exist, or has its former content.
        path: `<out>.partial`.
        result: the folder that becomes `out`.
        scratch: graphs and engines that are not kept.
        learning: checkpoints and results of learning; the only part that remains after an interrupted run.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out.with_name(f"{out.name}.partial")
        self.result = self.path / "result"
        self.scratch = self.path / "scratch"
        self.learning = self.path / "learning"

    def rung(self, name: str) -> WorkDir:
        """The folders of a slower engine of the run, whose result is a folder inside that of the run."""
        rung = copy.copy(self)
        rung.result, rung.scratch = self.result / LADDER / name, self.scratch / LADDER / name
        for folder in (rung.result, rung.scratch):
            folder.mkdir(parents=True)
        return rung

    @contextlib.contextmanager
    def aside(self) -> Iterator[WorkDir]:
        """The folders of an engine that is removed when the context ends."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            work = copy.copy(self)
            work.result, work.scratch = Path(folder) / "result", Path(folder) / "scratch"
            work.result.mkdir()
            work.scratch.mkdir()
            yield work

    @contextlib.contextmanager
    def with_scratch(self, folder: Path) -> Iterator[WorkDir]:
        """The folders of the run with another one for graphs that are not kept, which later runs may read too."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        work = copy.copy(self)
        work.scratch = folder
        try:
            yield work
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def reserve(self, needed: int) -> None:
        """Raise InputError unless `needed` bytes are free where the run works."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise InputError.of_file(
                self.path,
                f"{free / 1e9:.2f} GB are free, but the run needs {needed / 1e9:.2f}; free some space, or"
                " write to another folder (-o)",
                ErrorCode.DISK_FULL,
            )

    def finish(self) -> None:
        """Make `result` the output folder, completely or not at all."""
        for file in self.result.rglob("*"):
            if file.is_file():  # safetensors writes files for their owner alone, but another user may serve them
                shutil.copymode(self.path / _STAMP, file)
        replace_folder(self.result, self.out, aside=_aside(self.out))
        shutil.rmtree(self.path, ignore_errors=True)


def replace_folder(new: Path, out: Path, *, aside: Path) -> None:
    """Rename the folder `new` to `out`.

    Args:
        new: the new folder.
        out: its path afterwards; a former folder there is removed, or restored if renaming fails.
        aside: path of the former folder in the meantime.
    """
    # An interrupt between the two renames would leave no folder at `out`.
    with interrupts_deferred(signal.SIGINT, signal.SIGTERM):
        if out.exists():
            out.rename(aside)
        try:
            new.rename(out)
        except BaseException:
            if aside.exists():
                aside.rename(out)
            raise
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def open_workdir(out: Path, *, force: bool) -> Iterator[WorkDir]:
    """The work folder of a run that writes `out`; files that cannot be resumed from are removed when the run ends.

    Raises:
        UsageError: `out` exists and may not be replaced.
        InputError: another run writes there, the folder cannot be written, or the disk is full.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100  (`..` and `.` are resolved, symbolic links to parents are not)
    out = out.resolve() if out.is_symlink() else out
    if not out.name:
        raise UsageError(
            f"{out}: no folder that can be written; name one (-o)", code=ErrorCode.INVALID_VALUE, field="out", value=out
        )
    work = WorkDir(out)
    try:
        _check_work_folder(work.path)
        work.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError.of_file(
            out,
            f"the folder cannot be created ({error.strerror}); check the path and its permissions, or write to"
            " another folder (-o)",
            ErrorCode.FILE_UNWRITABLE,
        ) from error
    with locked(work.path):
        try:
            _recover(out)
            _check_output(out, force)
        except Exception:
            with contextlib.suppress(OSError):  # not empty: files of an earlier run remain
                work.path.rmdir()
            raise
        (work.path / _STAMP).touch()
        earlier = _resumable(work)
        for folder in (work.result, work.scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        try:
            yield work
        except KeyboardInterrupt as interrupt:
            hint = f"; the same command resumes from {work.path}" if _remove_unresumable(work) else ""
            raise KeyboardInterrupt(f"interrupted{hint}") from interrupt
        except (Exception, SystemExit) as error:  # a custom task may end the process
            results = "results of an earlier run" if _resumable(work) == earlier else "the results of learning"
            kept = f" ({results} are kept in {work.path})" if _remove_unresumable(work) else ""
            is_reported = isinstance(error, CompressorError) and error.code is ErrorCode.DISK_FULL
            if _is_full(error) and not is_reported:
                text = f"the disk is full; free some space and run the same command again{kept}"
                raise InputError.of_file(work.path, text, ErrorCode.DISK_FULL) from error
            if kept and isinstance(error, CompressorError):
                raise type(error)(f"{error}{kept}", code=error.code, **error.details) from error
            raise


def _remove_unresumable(work: WorkDir) -> bool:
    """Remove files that cannot be resumed from; return whether others remain."""
    for folder in (work.result, work.scratch):
        shutil.rmtree(folder, ignore_errors=True)
    if _resumable(work):
        return True
    shutil.rmtree(work.path, ignore_errors=True)
    return False


def _resumable(work: WorkDir) -> dict[Path, int]:
    """The files and folders from which a run is resumed -> when each was changed."""
    names = ("checkpoint-*", RESULT_KEY)
    return {path: path.stat().st_mtime_ns for name in names for path in work.learning.rglob(name)}


def _recover(out: Path) -> None:
    """Restore the folder of a run that was killed between its last two renames."""
    old = _aside(out)
    if old.exists() and not out.exists():
        old.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _aside(out: Path) -> Path:
    """Path of the former output folder while it is replaced."""
    return out.with_name(f".{out.name}.replaced")


def _check_output(out: Path, force: bool) -> None:
    """Raise UsageError unless the output folder is missing, empty, or may be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if (out / _LADDER).is_file():
        reason = "holds the rungs of a ladder, which --force does not replace"
    elif not out.is_dir() or not any(all((out / name).is_file() for name in names) for names in _OUTPUT_FILES):
        reason = "exists, and no run wrote it, so --force would not replace it"
    elif not force:
        reason = "exists; add --force to replace it, or"
    else:
        return
    raise UsageError.of_file(
        out, f"{reason}{'' if reason.endswith('or') else ';'} write to another folder (-o)", ErrorCode.OUTPUT_EXISTS
    )


def _check_work_folder(path: Path) -> None:
    """Raise InputError if the path of the work folder is used for something else."""
    if path.exists() and not (path / _STAMP).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise InputError.of_file(
            path, "exists, but no run left it; move it, or write to another folder (-o)", ErrorCode.OUTPUT_EXISTS
        )


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = True, create: bool = False) -> Iterator[None]:
    """Lock a file or a folder against other processes. The lock ends with the context, or with the process.

    Args:
        path: a folder, or a file, whose content stays.
        wait: wait while another process holds the lock.
        create: create the file where it is missing.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
        OSError: the path cannot be opened, or lies on a share without locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder for this run. The lock ends with the context, or with the process.

    Raises:
        InputError: another run holds the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(path, wait=False))
        except BlockingIOError as error:
            raise InputError.of_file(
                path,
                "another run is writing there; wait for it, or write to another folder (-o)",
                ErrorCode.FOLDER_BUSY,
            ) from error
        yield


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk caused an error; libraries in C++ and Rust report it only in the message."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(error) for words in ("No space left on device", "os error 28", "inline_container.cc")):
            return True
        error = error.__cause__ or error.__context__
    return False


def link_library_files(out: Path) -> None:
    """Link an engine for OpenVINO under the name that sentence-transformers loads, if the folder is one of the library.

    Folders of older rerankers have no `modules.json`, but settings of the library in `config.json`. The library's ONNX
    backend reads `model.onnx`, which is in every output folder. Links of an earlier engine are replaced.
    """
    config = read_json(out / "config.json")
    has_settings = isinstance(config, dict) and not _LIBRARY_SETTINGS.isdisjoint(config)
    if not has_settings and not (out / "modules.json").is_file():
        return
    for name, library_name in _LIBRARY_NAMES.items():
        link = out / library_name
        link.unlink(missing_ok=True)
        if (out / name).is_file():
            link.parent.mkdir(exist_ok=True)
            try:
                link.hardlink_to(out / name)
            except OSError:  # a file system without links
                shutil.copyfile(out / name, link)


def read_json(path: Path) -> Any | None:
    """The content of a JSON file; None without one, or where it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: object) -> None:
    """Write `content` as a JSON file, completely or not at all."""
    write_text(path, json.dumps(content))
