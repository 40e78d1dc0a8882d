"""Start Ray, or join a Ray cluster, in a separate process, and remove all its processes and files at the end.

Ray prints to stdout, replaces signal handlers and may end the process that connects to it. Therefore a separate
process, without PyTorch, connects to it: `python -m compressor.selection.ray_search.cluster DESCRIPTOR WHERE`.
`RayPool` starts this process and sends requests: the name of a method of `Driver` and its arguments. It shuts down Ray
and ends when the connection closes.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from compressor.errors import CompressorError, ErrorCode, TargetMissingError

_CONNECT_SECONDS, _START_SECONDS = 5, 300
"""Time limits for a connection to an address, and for workers to start."""
_SHUTDOWN_SECONDS, _INTERRUPT_SECONDS, _EXIT_SECONDS = 20, 5, 2
"""Time limits for Ray to shut down, for an interrupted driver to do so, and for Ray's processes to end afterwards."""
_MIN_STORE = 80 * 2**20
"""Minimum size of Ray's object store, in bytes."""
_THREADS = 1
"""Threads of a worker: more workers with fewer rows each are faster than more threads per worker."""
_QUIET: dict[str, Any] = {"logging_level": "critical", "configure_logging": False, "log_to_driver": False}
"""Arguments of `ray.init` that silence its logs."""
logger = logging.getLogger(__name__)


def is_installed() -> bool:
    """Whether Ray is installed; it is not imported."""
    return importlib.util.find_spec("ray") is not None


def check_reachable(where: str) -> None:
    """Raise TargetMissingError unless Ray is installed, and an address of a cluster accepts connections."""
    if not is_installed():
        text = f"--ray {where}: Ray is not installed"
        raise TargetMissingError.of_package("ray", "distributed", text, field="ray", value=where)
    if _local_workers(where) is None:
        host, _, port = where.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise _unavailable(where, error.strerror or str(error)) from error


class RayPool:
    """Ray workers, which run in a process of their own from the first `start` until `close`.

    Args:
        where: `local`: as many workers as this machine has cores; `local:4`: four workers; `HOST:PORT`: one per core of
            the cluster at this address, of which this machine is a node. If the model is on a GPU: one per GPU instead.
        restarts: number of times that a worker that ended is restarted before the run fails.
        answer_seconds: time limit for a cluster to answer.
    """

    def __init__(self, where: str, *, restarts: int = 3, answer_seconds: float = 20) -> None:
        self._where, self._restarts, self._answer_seconds = where, restarts, answer_seconds
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_connected = self._is_waiting = False
        self._workers = 0
        self._handles = itertools.count()
        self._released: list[int] = []

    def start(self, shared_bytes: int, maximum: int, *, on_gpu: bool) -> int:
        """Start workers at the first call; return their number, at most `maximum`.

        TargetMissingError if Ray or its workers do not start, or no cluster answers.
        """
        maximum = max(1, maximum)
        if self._process is None:
            try:
                self._connect(shared_bytes)
                limits = (self._restarts, _START_SECONDS)
                self._workers = self._request("start_workers", maximum, *limits, on_gpu=on_gpu)
            except BaseException:
                self.close()
                raise
        return min(self._workers, maximum)

    def share(self, content: Any) -> int:
        """Make `content` available to every worker; return its handle for requests."""
        from ray import cloudpickle

        handle = next(self._handles)
        self._request("share", handle, cloudpickle.dumps(content))
        return handle

    def release(self, handle: int) -> None:
        """Forget shared content. The driver is informed with the next request, because another may be in progress."""
        self._released.append(handle)

    def measure(self, requests: Sequence[tuple[Any, ...]]) -> list[tuple[Any, float]]:
        """The statistics and the cost that each worker measures; TargetMissingError if workers end repeatedly.

        Args:
            requests: for each worker the handles of what makes a measurer and of its rows, and the other arguments of
                `RayWorker.measure`.
        """
        released, self._released = self._released, []
        measured: list[tuple[Any, float]] = self._request("measure", released, requests)
        return measured

    def close(self) -> None:
        """End Ray and the process, and remove their files."""
        if self._folder is None:
            return
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
        self._folder = None

    def _connect(self, shared_bytes: int) -> None:
        """Let a process start or join Ray; raise TargetMissingError if that fails or takes too long."""
        self._connection, remote = Pipe()
        # Longer names would exceed the limit on paths of sockets.
        self._folder = tempfile.TemporaryDirectory(prefix="compress-", ignore_cleanup_errors=True)
        self._log_path = Path(self._folder.name) / "driver.log"
        with remote, self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "compressor.selection.ray_search.cluster", str(remote.fileno()), self._where],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self._where),
                start_new_session=True,  # a terminal sends Ctrl-C to this process alone
            )
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
        # Ray itself may wait much longer for a cluster that does not answer.
        seconds = self._answer_seconds if workers is None else _START_SECONDS
        try:
            self._request("connect", arguments, seconds=seconds)
        except TargetMissingError:
            raise
        except Exception as error:
            raise _unavailable(self._where, str(error)) from error
        self._is_connected = True
        logger.debug("--ray %s: connected", self._where)

    def _request(self, name: str, *arguments: Any, seconds: float | None = None, **options: Any) -> Any:
        """Call a method of `Driver` in the process and return its result, or raise what it raised.

        TargetMissingError if the process ended, or does not answer within `seconds`.
        """
        self._is_waiting = True
        with suppress(BrokenPipeError):  # the process ended, which is reported below
            self._connection.send((name, arguments, options))
        if not self._connection.poll(seconds):
            raise _unavailable(self._where, f"no answer for {seconds:g} s")
        try:
            succeeded, result = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            log = self._log_path.read_text(errors="replace")
            raise _unavailable(self._where, last_line(log, "its process ended")) from error
        self._is_waiting = False
        if not succeeded:
            from ray import cloudpickle

            raise cloudpickle.loads(result)
        return result


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
        f"--ray {where}: no Ray cluster answers there ({reason}); start a cluster (ray start --head), let this machine "
        f"join it, or use --ray local",
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


class ShareWorker:
    """Measures subsets on one share of the rows, of which `measurer` is a `SubsetMeasurer`."""

    def __init__(self, measurer: Any) -> None:
        self._measurer, self._recorded = measurer, None

    def measure(self, subsets: Sequence[Any], base: Any, *, record: bool) -> tuple[Any, float]:
        """The statistics of the share, and their cost in forwards over it; see `RayWorker.measure`."""
        # A restarted worker records `base` first; without it, subsets would be grouped into other forwards.
        record = record or base != self._recorded
        if base is not None:
            self._recorded = base
        statistics, forwards = self._measurer.measure(subsets, base if record else None)
        return statistics, forwards


class RayWorker:
    """One worker. Every request holds references to all data that it needs, so that a restarted worker can continue."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(_THREADS)
        self._share: list[Any] | None = None
        self._worker: ShareWorker | None = None

    def ready(self) -> None:
        """Return once the worker has started."""

    def measure(
        self, setup: list[Any], share: list[Any], subsets: Sequence[Any], base: Any, record: bool
    ) -> tuple[Any, float]:
        """The statistics and the cost of subsets; `record` says whether `base` is recorded first.

        Args:
            setup: reference to what makes a measurer of rows, pickled, in a list, because Ray would resolve a bare one.
            share: reference to the pickled rows of this worker, in a list.
            base: the subset that the workers recorded last; None: they have recorded none.
        """
        if self._worker is None or self._share != share:
            import ray
            from ray import cloudpickle

            make, rows = (cloudpickle.loads(ray.get(reference[0])) for reference in (setup, share))
            self._worker, self._share = ShareWorker(make(rows)), share
        return self._worker.measure(subsets, base, record=record)


class Driver:
    """Serves the requests of a `RayPool`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._actors: list[Any] = []
        self._restarts = 0
        self._objects: dict[int, Any] = {}

    def connect(self, settings: Mapping[str, Any]) -> None:
        """Start or join a cluster; `settings` are arguments of `ray.init`; CompressorError if Ray reports an error."""
        import ray

        try:
            ray.init(**settings, **_QUIET)
        except Exception as error:  # its errors share no base class
            raise CompressorError(last_line(error), code=ErrorCode.RUNTIME_FAILED) from error
        # Ray's handler ends the process at once and leaves its files behind.
        signal.signal(signal.SIGTERM, _exit)

    def start_workers(self, maximum: int, restarts: int, seconds: float, *, on_gpu: bool) -> int:
        """Start a worker on every free core or GPU, but at most `maximum`; return their number.

        Raises:
            TargetMissingError: no core or GPU is free, or not all workers start in time.
        """
        import ray

        free = int(ray.available_resources().get("GPU" if on_gpu else "CPU", 0))
        if not free:
            raise TargetMissingError(
                f"--ray {self._where}: no free {'GPU' if on_gpu else 'core'}; wait for one, or add nodes",
                code=ErrorCode.DEVICE_MISSING,
                field="ray",
                value=self._where,
            )
        self._restarts = restarts
        worker_class: Any = ray.remote(RayWorker)
        worker_class = worker_class.options(
            num_cpus=1, num_gpus=int(on_gpu), max_restarts=restarts, max_task_retries=restarts
        )
        self._actors = [worker_class.remote() for _ in range(min(free, maximum))]
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=seconds)
        except ray.exceptions.RayError as error:
            raise TargetMissingError(
                f"--ray {self._where}: not all of {len(self._actors)} workers started ({last_line(error)}); install"
                " this version of compressor on every node, and leave a core free for each worker",
                code=ErrorCode.RUNTIME_FAILED,
                field="ray",
                value=self._where,
                workers=len(self._actors),
            ) from error
        return len(self._actors)

    def share(self, number: int, content: bytes) -> None:
        """Make pickled bytes available to every worker under a number."""
        import ray

        self._objects[number] = ray.put(content)

    def measure(self, released: Sequence[int], requests: Sequence[tuple[Any, ...]]) -> list[tuple[Any, float]]:
        """Forget shared bytes by their numbers; then statistics and cost that each worker measures, in order.

        Requests are arguments of `RayWorker.measure`, with numbers of shared bytes instead of references. What a worker
        raises is raised; TargetMissingError if one ended and could not be restarted.
        """
        import ray

        for number in released:
            self._objects.pop(number, None)
        pending = [
            actor.measure.remote([self._objects[setup]], [self._objects[share]], *arguments)
            for actor, (setup, share, *arguments) in zip(self._actors, requests, strict=False)
        ]
        try:
            measurements: list[tuple[Any, float]] = ray.get(pending)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error  # the error that the worker raised, with its message for the user
        except ray.exceptions.RayError as error:
            raise TargetMissingError(
                f"--ray {self._where}: a worker died and {self._restarts} restarts did not help ({last_line(error)});"
                " make sure that it has memory for the model and its rows, or use fewer workers (--ray local:1)",
                code=ErrorCode.PROCESS_ENDED,
                field="ray",
                value=self._where,
                restarts=self._restarts,
            ) from error
        return measurements


def last_line(error: object, otherwise: str | None = None) -> str:
    """The last nonempty line of an error message, at most 200 characters; messages of Ray often fill a page."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else otherwise or type(error).__name__


def _exit(number: int, frame: object) -> None:
    """A signal handler that ends this process through its `finally` clauses and ignores further signals."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _serve(connection: Connection, driver: Driver) -> None:
    """Answer requests until the connection closes."""
    from ray import cloudpickle

    while True:
        try:
            name, arguments, options = connection.recv()
        except EOFError:
            return
        try:
            response = (True, getattr(driver, name)(*arguments, **options))
        except Exception as error:
            response = (False, cloudpickle.dumps(error))
        connection.send(response)


def main(arguments: Sequence[str]) -> None:
    """Serve the process at the other end of a connection, by its file descriptor and the value of `--ray`."""
    descriptor, where = arguments
    signal.signal(signal.SIGTERM, _exit)
    with Connection(int(descriptor)) as connection, suppress(BrokenPipeError, ConnectionResetError):
        try:
            _serve(connection, Driver(where))
        finally:
            import ray

            ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
