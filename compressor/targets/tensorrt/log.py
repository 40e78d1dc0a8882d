"""Capture the messages that TensorRT logs: the log contains the cause of a failure, its exceptions do not."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Iterator

from compressor.silence_libraries import one_line

_OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|insuf+icient (device )?memory|memory is insufficient|std::bad_alloc|MemoryAllocation",
    re.IGNORECASE,
)
_NO_IMPLEMENTATION = re.compile(r"could not find any implementation", re.IGNORECASE)
_INSUFFICIENT_WORKSPACE = "insufficient workspace"


class TensorRtLog:
    """Collects the last errors that TensorRT logs; it takes the place of a Python logger.

    Attributes:
        errors: the last error messages.
        memory_warning: whether it has warned of insufficient memory. Kernels that need more memory are then skipped
            without an error, until none remains.
    """

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=40)
        self.memory_warning = False

    def log(self, level: int, msg: str) -> None:
        """Receive a message; the signature is that of `logging.Logger.log`."""
        if level >= logging.ERROR:
            self.errors.append(" ".join(msg.split()))
        else:
            self.memory_warning = self.memory_warning or _OUT_OF_MEMORY.search(msg) is not None

    def clear(self) -> None:
        """Forget all messages."""
        self.errors.clear()
        self.memory_warning = False

    def summary(self, error: BaseException | None = None) -> str:
        """All errors on one line; the exception's message where nothing was logged."""
        return one_line("; ".join(dict.fromkeys(self.errors)) or error or "TensorRT reports no reason", 400)

    @property
    def out_of_memory(self) -> bool:
        """Whether an error reports that memory ran out."""
        return _OUT_OF_MEMORY.search(self._text) is not None

    @property
    def no_implementation(self) -> bool:
        """Whether an error reports that no kernel implements a layer."""
        return _NO_IMPLEMENTATION.search(self._text) is not None

    @property
    def insufficient_workspace(self) -> bool:
        """Whether an error reports that the workspace is too small."""
        return _INSUFFICIENT_WORKSPACE in self._text

    @property
    def _text(self) -> str:
        return " ".join(self.errors)


def current_log() -> TensorRtLog:
    """The log, cleared. From the first call on Polygraphy and TensorRT print nothing in this process."""
    from polygraphy.logger import G_LOGGER

    log = _install_log()
    log.clear()
    G_LOGGER.once_logged.clear()  # so that warnings which are logged once are logged again
    return log


@functools.cache
def _install_log() -> TensorRtLog:
    from polygraphy.logger import G_LOGGER

    log = TensorRtLog()
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.python_logger = log
    G_LOGGER.module_severity, G_LOGGER.letter, G_LOGGER.colors = G_LOGGER.WARNING, False, False
    return log


@contextlib.contextmanager
def capture_log() -> Iterator[TensorRtLog]:
    """The log of the calls of Polygraphy inside the context, which use names that TensorRT 10.12 has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield current_log()
