"""Results that are computed once: `memo` computes what is missing, or goes on where an interrupted run stopped.

A result has a folder, which appears whole or not at all, and a key of everything that it depends on. Unfinished work
has a folder beside it, which is removed when the result is stored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pydantic import TypeAdapter
from safetensors import SafetensorError

from compressor.errors import ErrorCode, InputError
from compressor.workdir import RESULT_KEY, file_lock, read_json, replace_folder, write_json

FORM = 1
"""Form of the folders; results of another form are not read."""
_UNFINISHED, _UNFINISHED_KEY = ".unfinished", "key.json"
_FULL, _NO_LOCKS = (errno.ENOSPC, errno.EDQUOT), (errno.ENOLCK, errno.EOPNOTSUPP)

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def versioned(version: int, *modules: str) -> Callable[[FunctionT], FunctionT]:
    """Declare the version of the code that computes a result, which is part of the key of the result.

    Args:
        version: a number that grows with every change of the code after which results may differ. A test compares the
            code with a record, so that no change is forgotten.
        modules: modules and packages whose code decides the result too, besides the module of the function.
    """

    def declare(function: FunctionT) -> FunctionT:
        function.version = version  # type: ignore[attr-defined]
        return function

    return declare


def version_of(function: Callable[..., Any]) -> int | None:
    """The version that `versioned` declares of a function; None: it declares none."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "version", None)


def digest(content: object) -> str:
    """A hash of content that can be written as JSON, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Files(Protocol[T]):
    """How a result is written as files.

    `load` raises OSError, ValueError or SafetensorError for damaged files; the result is then computed again.
    """

    def save(self, result: T, folder: Path) -> None:
        """Write a result into an empty folder."""

    def load(self, folder: Path) -> T:
        """Read the result that `save` wrote."""


class File(Generic[T]):
    """A result that is written as one file.

    Args:
        name: name of the file.
        write: writes the result to a path.
        read: reads it again.
    """

    def __init__(self, name: str, write: Callable[[T, Path], object], read: Callable[[Path], T]) -> None:
        self._name, self._write, self._read = name, write, read

    def save(self, result: T, folder: Path) -> None:
        self._write(result, folder / self._name)

    def load(self, folder: Path) -> T:
        return self._read(folder / self._name)


class Json(File[T]):
    """A result that is written as JSON; pydantic validates its type, `kind`."""

    def __init__(self, kind: Any) -> None:
        adapter: TypeAdapter[T] = TypeAdapter(kind)

        def write(result: T, path: Path) -> None:
            write_json(path, adapter.dump_python(result, mode="json"))

        super().__init__("result.json", write, lambda path: adapter.validate_json(path.read_bytes()))


class Processes(Protocol):
    """The processes of a distributed run, e.g. `accelerate.PartialState`."""

    @property
    def is_main_process(self) -> bool: ...

    def wait_for_everyone(self) -> None: ...


class Stored(NamedTuple):
    """A stored result: what it was computed from, and the folder of its files."""

    inputs: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Store:
    """Results by name, in a folder.

    Attributes:
        path: the folder; it need not exist.
        inputs: what every result depends on, as JSON.
        version: version of the code that computes results; a computation may have a version of its own.
        processes: the processes that all call `memo`, of which the main one writes; None: there is one.
        is_shared: whether other runs may use the folder at the same time. A folder of a run is locked as a whole.
    """

    path: Path
    inputs: Mapping[str, Any] = field(default_factory=dict)
    version: int | None = None
    processes: Processes | None = None
    is_shared: bool = False

    def memo(
        self,
        name: str,
        inputs: Mapping[str, Any],
        compute: Callable[[Path], T],
        files: Files[T],
        *,
        by_main: bool = False,
        accept: Callable[[T], bool] | None = None,
        on_unwritable: Callable[[OSError], object] | None = None,
    ) -> T:
        """A stored result, or a new one, which is stored.

        Args:
            name: name of the result: one is stored under each name.
            inputs: everything that the result depends on besides `Store.inputs`, as JSON: options, and keys or
                fingerprints of what is read.
            compute: computes the result. It gets a folder for unfinished work, which is as an interrupted run with the
                same inputs left it, and disappears when the result is stored.
            files: writes and reads the result.
            by_main: whether the main process computes alone, and the others read its result; else all compute.
            accept: called with a stored result; whether it still holds. None: it does.
            on_unwritable: called with the error where the result cannot be stored, which is returned nevertheless;
                None: an error is raised.

        Raises:
            InputError: the folder cannot be written.
        """
        key, is_optional = self._key(inputs, compute), on_unwritable is not None
        if by_main and not self._is_main:
            self._wait()
            return files.load(self.path / name)
        wait_together = (lambda: None) if by_main else self._wait
        stored = self._read(name, key, files)
        wait_together()  # no process may find what another one is about to store
        if stored is not None and (accept is None or accept(stored[0])):
            result = stored[0]
        else:
            with self._unfinished(name, key, is_optional=is_optional) as work:
                wait_together()
                result = compute(work)
                wait_together()
                if self._is_main:
                    self._store(name, key, partial(files.save, result), work, on_unwritable)
        self._wait()
        return result

    def holds(self, name: str, inputs: Mapping[str, Any], compute: Callable[[Path], Any]) -> bool:
        """Whether `memo` would read a stored result."""
        return _read_key(self.path / name / RESULT_KEY) == self._key(inputs, compute)

    def load(self, name: str, files: Files[T]) -> T | None:
        """The result that is stored under a name, from whatever inputs; None: there is none."""
        return files.load(self.path / name) if self.has(name) else None

    def has(self, name: str) -> bool:
        """Whether a result is stored under a name, from whatever inputs."""
        return (self.path / name / RESULT_KEY).is_file()

    def stored(self, pattern: str) -> list[Stored]:
        """The results whose names match a pattern, newest first."""
        keys = sorted(self.path.glob(f"{pattern}/{RESULT_KEY}"), key=lambda file: file.stat().st_mtime, reverse=True)
        read = ((_read_key(file) or {}, file.parent) for file in keys)
        return [Stored(key["inputs"], folder) for key, folder in read if key.get("form") == FORM]

    def unfinished(self, name: str) -> Path:
        """The folder of unfinished work of a result; it need not exist."""
        return self.path / f"{name}{_UNFINISHED}"

    def within(self, work: Path) -> Store:
        """A store of parts in the folder of unfinished work of a result, on whose inputs they depend too."""
        return replace(self, path=work, is_shared=False)

    def _key(self, inputs: Mapping[str, Any], compute: Callable[[Path], Any]) -> dict[str, Any]:
        version = version_of(compute) or self.version
        if version is None:
            raise TypeError(f"{compute}: declare the version of the code that computes results (`versioned`)")
        key = {"form": FORM, "version": version, "inputs": {**self.inputs, **inputs}}
        content: dict[str, Any] = json.loads(json.dumps(key, sort_keys=True))
        return content

    @property
    def _is_main(self) -> bool:
        return self.processes is None or self.processes.is_main_process

    def _wait(self) -> None:
        if self.processes is not None:
            self.processes.wait_for_everyone()

    def _read(self, name: str, key: Mapping[str, Any], files: Files[T]) -> tuple[T] | None:
        """The stored result; None where there is none with this key, or where it is damaged."""
        with suppress(OSError, ValueError, SafetensorError):
            if _read_key(self.path / name / RESULT_KEY) == key:
                return (files.load(self.path / name),)
        return None

    @contextmanager
    def growing(self, name: str, compute: Callable[..., Any]) -> Iterator[Path]:
        """The folder of a result that is never whole: every run adds what it computes. It is locked meanwhile.

        Args:
            name: name of the result.
            compute: computes what is added; what another version of it computed is removed.

        Raises:
            BlockingIOError: another run holds the lock.
            OSError: the folder cannot be written, or cannot be locked.
        """
        with self._claimed(name, self._key({}, compute), is_locked=True) as folder:
            yield folder

    @contextmanager
    def _claimed(self, name: str, key: Mapping[str, Any], *, is_locked: bool) -> Iterator[Path]:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = file_lock(self.path / f".{name}.lock", wait=False, create=True) if is_locked else nullcontext()
        with lock:
            begin(self.unfinished(name), key)
            yield self.unfinished(name)

    @contextmanager
    def _unfinished(self, name: str, key: Mapping[str, Any], *, is_optional: bool) -> Iterator[Path]:
        """The folder of unfinished work; another one while another run computes the same, or where none can be made."""
        if not self._is_main:
            yield self.unfinished(name)
            return
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(self._claimed(name, key, is_locked=self.is_shared))
            except BlockingIOError:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{name}-", dir=self.path)))
            except OSError as error:
                if error.errno in _NO_LOCKS:  # a share without locks
                    folder = stack.enter_context(self._claimed(name, key, is_locked=False))
                elif is_optional:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                else:
                    raise _unwritable(self.unfinished(name), error) from error
            yield folder

    def _store(
        self,
        name: str,
        key: Mapping[str, Any],
        save: Callable[[Path], object],
        work: Path,
        on_unwritable: Callable[[OSError], object] | None,
    ) -> None:
        """Write a result, rename its folder when it is whole, and remove the unfinished work."""
        folder, new = self.path / name, work / ".result"
        try:
            _remove(new)
            new.mkdir()
            save(new)
            write_json(new / RESULT_KEY, key)
            replace_folder(new, folder, aside=work / ".former")
            shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            if on_unwritable is None:
                raise _unwritable(folder, error) from error
            on_unwritable(error)


def begin(folder: Path, key: Mapping[str, Any]) -> None:
    """Make a folder that of unfinished work with a key; work with another key is removed."""
    if begun_key(folder) != key:
        _remove(folder)
        folder.mkdir(parents=True)
        write_json(folder / _UNFINISHED_KEY, key)


def begun_key(folder: Path) -> dict[str, Any] | None:
    """The key of unfinished work in a folder; None: there is none."""
    return _read_key(folder / _UNFINISHED_KEY)


def _read_key(file: Path) -> dict[str, Any] | None:
    content = read_json(file)
    return content if isinstance(content, dict) else None


def _remove(path: Path) -> None:
    """Remove a file or a folder, which may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> InputError:
    if error.errno in _FULL:
        text = "the disk is full; free some space and run the same command again"
        return InputError.of_file(path, text, ErrorCode.DISK_FULL)
    text = f"cannot be written ({error.strerror}); check the permissions, and run the same command again"
    return InputError.of_file(path, text, ErrorCode.FILE_UNWRITABLE)
