"""Start Ray, or join a Ray cluster, in a separate process, and remove all its processes and files at the end."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

from compressor.errors import ErrorCode, TargetMissingError

_CONNECT_SECONDS = 5
"""Time limit for a connection to an address."""
_SHUTDOWN_SECONDS, _INTERRUPT_SECONDS, _EXIT_SECONDS = 20, 5, 2
"""Time limits for Ray to shut down, for an interrupted driver to do so, and for Ray's processes to end afterwards."""
_MIN_STORE = 80 * 2**20
"""Minimum size of Ray's object store, in bytes."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RaySettings:
    """Settings of workers and time limits of Ray.

    Attributes:
        cores: number of cores that a worker reserves.
        restarts: number of times that a worker that ended is restarted before the run fails.
        start_seconds: time limit for workers to start.
        answer_seconds: time limit for a cluster to answer.
    """

    cores: float = 1
    restarts: int = 3
    start_seconds: float = 300
    answer_seconds: float = 20


def is_installed() -> bool:
    """Whether Ray is installed; it is not imported."""
    return importlib.util.find_spec("ray") is not None


def check_reachable(where: str) -> None:
    """Check that Ray is installed, and that the address of a cluster accepts connections.

    Args:
        where: value of `--ray`, see `RayProcess`.

    Raises:
        TargetMissingError: Ray is not installed, or nothing listens at the address.
    """
    if not is_installed():
        text = f"--ray {where}: Ray is not installed"
        raise TargetMissingError.of_package("ray", "distributed", text, field="ray", value=where)
    if _local_workers(where) is None:
        host, _, port = where.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise _unavailable(where, error.strerror or str(error)) from error


class RayProcess:
    """The process that drives Ray. Its processes and files are removed when the context ends.

    Args:
        where: `local`: as many workers as this machine has cores; `local:4`: four workers; `HOST:PORT`: a cluster of
            which this machine is a node.
        settings: settings of workers, and time limits.
        shared_bytes: bytes of the objects that workers share.

    Raises:
        TargetMissingError: Ray does not start, or no cluster answers.
    """

    def __init__(self, where: str, settings: RaySettings, shared_bytes: int) -> None:
        self._where = where
        # Longer names would exceed the limit on paths of sockets.
        self._folder = tempfile.TemporaryDirectory(prefix="compress-", ignore_cleanup_errors=True)
        self._log_path = Path(self._folder.name) / "driver.log"
        self._connection, remote = Pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_connected = self._is_waiting = False
        try:
            with remote, self._log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "compressor.selection.ray_search.driver", str(remote.fileno()), where],
                    pass_fds=[remote.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_environment(where),
                    start_new_session=True,  # a terminal sends Ctrl-C to this process alone
                )
            self._connect(settings, shared_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def request(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of `driver.Driver` in the process and return its result.

        Raises:
            TargetMissingError: the process ended.
            Exception: the method raised it.
        """
        self._send(name, *arguments, **options)
        succeeded, result = self._receive()
        if not succeeded:
            raise _unpickled(result)
        return result

    def close(self) -> None:
        """End Ray and the process, and remove their files."""
        self._connection.close()  # an idle process then ends by itself
        if self._process is not None:
            if not self._is_connected:
                seconds = 0
            elif self._is_waiting:
                seconds = _INTERRUPT_SECONDS
                self._process.terminate()  # a busy process does not notice the closed connection
            else:
                seconds = _SHUTDOWN_SECONDS
            _end(self._process, self._folder.name, seconds)
        self._folder.cleanup()

    def _connect(self, settings: RaySettings, shared_bytes: int) -> None:
        """Let the process start or join Ray; raise TargetMissingError if that fails or takes too long."""
        workers = _local_workers(self._where)
        if workers is None:
            arguments: dict[str, Any] = {"address": self._where}
        else:
            arguments = {
                "address": "local",
                "num_cpus": workers,
                "include_dashboard": False,
                "object_store_memory": max(_MIN_STORE, 3 * shared_bytes),
                "_temp_dir": self._folder.name,
            }
        self._send("connect", arguments)
        # Ray itself may wait much longer for a cluster that does not answer.
        seconds = settings.answer_seconds if workers is None else settings.start_seconds
        if not self._connection.poll(seconds):
            raise _unavailable(self._where, f"no answer for {seconds:g} s")
        succeeded, result = self._receive()
        if not succeeded:
            raise _unavailable(self._where, str(_unpickled(result)))
        self._is_connected = True
        logger.debug("--ray %s: connected", self._where)

    def _send(self, name: str, *arguments: Any, **options: Any) -> None:
        """Send a request: the name of a method of `Driver` and its arguments."""
        self._is_waiting = True
        with suppress(BrokenPipeError):  # the process ended, which `_receive` reports
            self._connection.send((name, arguments, options))

    def _receive(self) -> tuple[bool, Any]:
        """Whether the request succeeded, and its result or the pickled error."""
        try:
            succeeded, result = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            lines = [line.strip() for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
            raise _unavailable(self._where, lines[-1][:200] if lines else "its process ended") from error
        self._is_waiting = False
        return succeeded, result


def _unpickled(error: bytes) -> Exception:
    """The exception that the driver pickled."""
    from ray import cloudpickle

    unpickled: Exception = cloudpickle.loads(error)
    return unpickled


def _environment(where: str) -> dict[str, str]:
    """Environment variables of the driver, which has the import path of this process."""
    defaults = {"RAY_USAGE_STATS_ENABLED": "0"}
    if _local_workers(where) is not None:
        # The first, in spite of its name, binds Ray to the loopback device; the others require a token of its clients.
        defaults |= {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**defaults, **os.environ, "PYTHONPATH": path}


def _end(process: subprocess.Popen[bytes], folder: str, seconds: float) -> None:
    """End the driver, after `seconds` in which it may end by itself, and the processes of Ray's session in `folder`."""
    started = _descendants(process)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    started |= _descendants(process)
    process.kill()
    process.wait()
    started |= _processes_in(folder)
    # If Ray was interrupted while it started, processes remain that wait for others.
    for remaining in psutil.wait_procs(started, timeout=_EXIT_SECONDS)[1]:
        with suppress(psutil.NoSuchProcess):
            remaining.kill()


def _descendants(process: subprocess.Popen[bytes]) -> set[psutil.Process]:
    """All processes that a process started, directly or not."""
    with suppress(psutil.Error):
        return set(psutil.Process(process.pid).children(recursive=True))
    return set()


def _processes_in(folder: str) -> set[psutil.Process]:
    """Processes whose command line names the folder of Ray's session, including those whose parent has ended."""
    processes = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(folder in word for word in process.cmdline()):
                processes.add(process)
    return processes


def _unavailable(where: str, reason: str) -> TargetMissingError:
    """The error for Ray that does not start, or a cluster that does not answer."""
    if _local_workers(where) is not None:
        message = f"--ray {where}: Ray did not start ({reason}); omit --ray to search in this process"
        return TargetMissingError(message, code=ErrorCode.RUNTIME_FAILED, field="ray", value=where, reason=reason)
    return TargetMissingError(
        f"--ray {where}: no Ray cluster answers there ({reason}); start one (ray start --head), let this machine join"
        " it, or use --ray local",
        code=ErrorCode.SERVER_UNREACHABLE,
        field="ray",
        value=where,
        reason=reason,
    )


def _local_workers(where: str) -> int | None:
    """Number of workers on this machine; None: `where` is an address."""
    name, _, count = where.partition(":")
    if name != "local":
        return None
    return int(count) if count else len(os.sched_getaffinity(0))
