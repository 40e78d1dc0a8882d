"""The process that drives Ray: `python -m compressor.selection.ray_search.driver DESCRIPTOR WHERE`.

Ray prints to stdout, replaces signal handlers and may end the process that connects to it. Therefore a separate
process, without PyTorch, connects to it. `cluster.RayProcess` starts this process and sends requests: the name of a
method of `Driver` and its arguments. It shuts down Ray and ends when the connection closes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from compressor.errors import CompressorError, ErrorCode, TargetMissingError
from compressor.selection.ray_search.actor import RayWorker

_QUIET: dict[str, Any] = {"logging_level": "critical", "configure_logging": False, "log_to_driver": False}
"""Arguments of `ray.init` that silence its logs."""


class Driver:
    """Serves the requests of a `RayProcess`.

    Args:
        where: value of `--ray`, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._actors: list[Any] = []
        self._restarts = 0
        self._objects: dict[int, Any] = {}

    def connect(self, settings: Mapping[str, Any]) -> None:
        """Start or join a cluster; `settings` are arguments of `ray.init`.

        Raises:
            CompressorError: Ray reports an error.
        """
        import ray

        try:
            ray.init(**settings, **_QUIET)
        except Exception as error:  # its errors share no base class
            raise CompressorError(last_line(error), code=ErrorCode.RUNTIME_FAILED) from error
        # Ray's handler ends the process at once and leaves its files behind.
        signal.signal(signal.SIGTERM, _exit)

    def start_workers(self, maximum: int, cores: float, restarts: int, seconds: float, *, on_gpu: bool) -> int:
        """Start a worker on every free core or GPU, but at most `maximum`.

        Args:
            maximum: maximum number of workers.
            cores: number of cores that a worker reserves.
            restarts: number of times that a worker that ended is restarted.
            seconds: time limit for all workers to start.
            on_gpu: every worker uses a GPU.

        Returns:
            The number of workers.

        Raises:
            TargetMissingError: no core or GPU is free, or not all workers start.
        """
        import ray

        free = int(ray.available_resources().get("GPU" if on_gpu else "CPU", 0))
        if not free:
            raise TargetMissingError(
                f"--ray {self._where}: no free {'GPU' if on_gpu else 'core'}; wait, or add nodes",
                code=ErrorCode.DEVICE_MISSING,
                field="ray",
                value=self._where,
            )
        self._restarts = restarts
        worker_class: Any = ray.remote(RayWorker)
        worker_class = worker_class.options(
            num_cpus=cores, num_gpus=int(on_gpu), max_restarts=restarts, max_task_retries=restarts
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
        """Statistics and cost that each worker measured, in order.

        Args:
            released: numbers of shared bytes that are no longer needed.
            requests: arguments of `RayWorker.measure` for each worker, with numbers of shared bytes instead of
                references.

        Raises:
            TargetMissingError: a worker ended and could not be restarted.
            Exception: a worker raised it.
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


def last_line(error: object) -> str:
    """The last nonempty line of an error message, at most 200 characters; messages of Ray often fill a page."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


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
    """Serve the process that holds the other end of a connection.

    Args:
        arguments: file descriptor of the connection, and the value of `--ray`.
    """
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
