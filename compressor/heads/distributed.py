"""The trials of a search spread over processes and machines with Ray.

The evaluation rows are divided, not the subsets: each worker runs every new subset on its share of the batches, and the
parts are put together row by row. A batch is then evaluated as one process alone would: with the same subsets beside
each other, from the same record. So the numbers do not depend on how many workers there are nor on which is done
first, no record is made twice, and a search that asks for one subset at a time is spread like any other.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedModel

from compressor.errors import TargetMissingError, UsageError
from compressor.heads.search import Head
from compressor.heads.trials import ModelTrials
from compressor.sites import Site
from compressor.tasks.base import Data
from compressor.tasks.evaluate import batches

MakeTrials = Callable[[PreTrainedModel, Sequence[Site], Data, int, int, int], ModelTrials]

_RESTARTS = 3
"""Times that a worker may die before the run gives up."""
_CONNECTED, _ANSWERED, _STARTED, _ENDED = 5, 20, 300, 2
"""Seconds to reach an address, for a cluster behind it to answer, for workers to start, and for processes to end."""
_CORES = 1
"""That a worker takes: more rows at once are better spread than computed by several threads."""
_SMALLEST_STORE = 80 * 2**20
"""Ray takes no less memory for what processes share."""


@contextmanager
def spread(ray: str | None) -> Iterator[MakeTrials]:
    """What makes the trials of a search: on this process alone, or on workers that end with the context.

    Args:
        ray: None: no workers. `local`: one a core of this machine; `local:4`: four. `HOST:PORT`: one a core of the
            cluster that answers there and that this machine is a node of; one a GPU where the model is on one.

    Raises:
        UsageError: asked for in each of several processes.
        TargetMissingError: Ray is not installed, does not start or does not answer; or workers keep dying.
    """
    if ray is None:
        yield ModelTrials
        return
    reachable(ray)
    if PartialState(cpu=not torch.cuda.is_available()).num_processes > 1:
        raise UsageError(f"ray {ray}: spreads a search by itself; start it without accelerate launch")
    with ExitStack() as stack:
        yield partial(DistributedTrials, _Workers(ray, stack))


def reachable(ray: str) -> None:
    """Raise TargetMissingError where it can be known at once that `spread` would."""
    if not installed():
        raise TargetMissingError(f"ray {ray}: Ray is not installed; pip install 'compressor[distributed]'")
    host, _, port = ray.rpartition(":")
    if _count(ray) is None:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECTED).close()
        except OSError as error:
            raise _no_answer(ray, error.strerror or str(error)) from error


def installed() -> bool:
    """Whether Ray is on this machine; it is not imported."""
    return importlib.util.find_spec("ray") is not None


class DistributedTrials(ModelTrials):
    """`ModelTrials` whose evaluations are made by workers; sensitivity is measured here."""

    def __init__(
        self,
        workers: _Workers,
        model: PreTrainedModel,
        sites: Sequence[Site],
        data: Data,
        batch_size: int,
        rows: int,
        seed: int,
    ) -> None:
        super().__init__(model, sites, data, batch_size, rows, seed)
        dealt = [indices for indices, _ in batches(data.task, data.eval, batch_size)]
        count = workers.start(model, len(dealt))
        self._workers = workers
        # A share's rows, in order, make the same batches again: all are full but the very last.
        self._rows = [sorted(itertools.chain(*dealt[worker::count])) for worker in range(count)]
        self._shared = workers.share((model, tuple(sites), data.task, batch_size))
        self._shares = [workers.share(_in_memory(data.eval.select(share))) for share in self._rows]
        self._recorded: frozenset[Head] | None = None

    def _measure(self, subsets: Sequence[frozenset[Head]], record: bool) -> None:
        if record:
            self._recorded = self._base
        asked = [(self._shared, share, tuple(subsets), self._recorded, record) for share in self._shares]
        found = self._workers.measure(asked)
        first = found[0][0]
        whole = np.empty((len(subsets), len(self._data.eval), first.shape[-1]), first.dtype)
        for rows, (statistics, forwards) in zip(self._rows, found, strict=True):
            whole[:, rows] = statistics
            self.forwards += forwards * len(rows) / len(self._data.eval)
        self._found.update(zip(subsets, whole, strict=True))


class _Workers:
    """Ray, from the first trials on until the context ends, and the workers that it runs."""

    def __init__(self, ray: str, stack: ExitStack) -> None:
        self.ray, self._stack = ray, stack
        self._actors: list[Any] = []

    def start(self, model: PreTrainedModel, most: int) -> int:
        """Workers at hand, `most` at most; the first call starts them."""
        on_gpu = model.device.type == "cuda"
        if not self._actors:
            self._stack.enter_context(
                _initialized(self.ray, sum(tensor.nbytes for tensor in model.state_dict().values()))
            )
            import ray

            free = int(ray.available_resources().get("GPU" if on_gpu else "CPU", 0))
            if not free:
                raise TargetMissingError(
                    f"ray {self.ray}: no {'GPU' if on_gpu else 'core'} is free; wait, or add nodes"
                )
            make: Any = ray.remote(_Worker)
            make = make.options(
                num_cpus=_CORES, num_gpus=int(on_gpu), max_restarts=_RESTARTS, max_task_retries=_RESTARTS
            )
            self._actors = [make.remote() for _ in range(min(free, max(1, most)))]
            try:
                ray.get([actor.ready.remote() for actor in self._actors], timeout=_STARTED)
            except ray.exceptions.RayError as error:
                raise TargetMissingError(
                    f"ray {self.ray}: {len(self._actors)} workers did not all start ({_said(error)}); every node needs"
                    " this version of compressor, and a free core for each"
                ) from error
        return min(len(self._actors), max(1, most))

    def share(self, value: Any) -> list[Any]:
        """A value that every worker can ask for; in a list, a reference is passed on and not looked up."""
        import ray
        from ray import cloudpickle

        return [ray.put(cloudpickle.dumps(value))]

    def measure(self, asked: Sequence[tuple[Any, ...]]) -> list[tuple[np.ndarray, float]]:
        """What each worker answers, in their order."""
        return self._get([actor.measure.remote(*what) for actor, what in zip(self._actors, asked, strict=False)])

    def _get(self, answers: Sequence[Any]) -> Any:
        import ray

        try:
            return ray.get(answers)
        except ray.exceptions.RayTaskError as error:
            # What was raised in a worker is raised here: the same error, with the same line for the user.
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise TargetMissingError(
                f"ray {self.ray}: a worker died and {_RESTARTS} restarts did not help ({_said(error)}); see that it"
                " has memory for the model and its rows, or give fewer workers (local:1)"
            ) from error


class _Worker:
    """One process of Ray. What it needs to know comes with each question, so one that was restarted can go on."""

    def __init__(self) -> None:
        torch.set_num_threads(_CORES)
        self._share: Any = None
        self._trials: _Share | None = None

    def ready(self) -> None: ...

    def measure(
        self,
        shared: list[Any],
        share: list[Any],
        subsets: Sequence[frozenset[Head]],
        base: frozenset[Head] | None,
        record: bool,
    ) -> tuple[np.ndarray, float]:
        """Statistics `[subsets, rows, k]` of this share of the rows, and the forwards over it that they took."""
        if self._trials is None or self._share != share:
            import ray
            from ray import cloudpickle

            model, sites, task, batch_size = cloudpickle.loads(ray.get(shared[0]))
            rows = cloudpickle.loads(ray.get(share[0]))
            self._trials = _Share(model, sites, Data(rows, rows, rows, task, (), None, None), batch_size)
            self._share = share
        return self._trials.measure(subsets, base, record)


class _Share(ModelTrials):
    """One worker's part of the trials; it keeps records and no results."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site], data: Data, batch_size: int) -> None:
        super().__init__(model, sites, data, batch_size, rows=0, seed=0)
        self._recorded: frozenset[Head] | None = None

    def measure(
        self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None, record: bool
    ) -> tuple[np.ndarray, float]:
        before = self.forwards
        # A worker in the place of another has to record what that one had, or other subsets would share a forward.
        record = record or base != self._recorded
        if base is not None:
            self._base = self._recorded = base
        self._measure(subsets, record)
        return np.stack([self._found.pop(subset) for subset in subsets]), self.forwards - before


@contextmanager
def _initialized(where: str, shared: int) -> Iterator[None]:
    """Ray, connected or on this machine alone; nothing of it stays.

    Args:
        where: as in `spread`.
        shared: bytes that the workers share.
    """
    count = _count(where)
    quiet: dict[str, Any] = {"logging_level": "critical", "configure_logging": False, "log_to_driver": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    terminates = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    with ExitStack() as stack:
        if count is None:
            _probe(where)
            asked: dict[str, Any] = {"address": where}
        else:
            if "ray" not in sys.modules:  # which reads them once
                # The first, named for other systems, keeps Ray on the loopback device; a token keeps out who else is
                # there.
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
                os.environ.setdefault("RAY_AUTH_MODE", "token")
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            folder = tempfile.TemporaryDirectory(prefix="compress-", ignore_cleanup_errors=True)
            asked = {
                "address": "local",
                "num_cpus": count,
                "include_dashboard": False,
                "object_store_memory": max(_SMALLEST_STORE, 3 * shared),
                "_temp_dir": stack.enter_context(folder),
            }
        import ray
        import ray._private.worker as connection

        # Whatever is logged, Ray tells stdout of workers that died: that is where the result goes.
        prints = connection.print_to_stdstream
        connection.print_to_stdstream = lambda *what, **how: None
        before = _processes()
        try:
            try:
                ray.init(**asked, **quiet)
            except Exception as error:
                raise _no_answer(where, _said(error)) from error
            if in_main:  # Ray's own handler ends the process on the spot, and its files would stay
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            yield
        finally:
            started = _processes() - before
            ray.shutdown()
            connection.print_to_stdstream = prints
            # Interrupted while it starts, Ray leaves some of its processes waiting for the others, for a minute.
            for process in psutil.wait_procs(started, timeout=_ENDED)[1]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if in_main:
                signal.signal(signal.SIGTERM, terminates)


def _probe(where: str) -> None:
    """Connect in a process of its own first: Ray may wait for long, or end the process that asks."""
    code = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code, where], capture_output=True, text=True, timeout=_ANSWERED, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _no_answer(where, f"nothing for {_ANSWERED} s") from error
    if tried.returncode:
        raise _no_answer(where, _said(tried.stderr))


def _processes() -> set[psutil.Process]:
    """Processes of Ray that descend from this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "ray" in " ".join(process.cmdline()):
                found.add(process)
    return found


def _no_answer(where: str, why: str) -> TargetMissingError:
    if _count(where) is not None:
        return TargetMissingError(f"ray {where}: Ray did not start ({why}); leave --ray out to search without it")
    return TargetMissingError(
        f"ray {where}: no Ray cluster answers there ({why}); start one (ray start --head), let this machine join it, or"
        " say local"
    )


def _count(where: str) -> int | None:
    """Workers asked for on this machine; None: an address."""
    name, _, count = where.partition(":")
    if name != "local":
        return None
    return int(count) if count else len(os.sched_getaffinity(0))


def _said(error: object) -> str:
    """The last line of what is often a page."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _in_memory(rows: Dataset) -> Dataset:
    """The same rows without the files that they may be mapped from, which another machine has not."""
    return Dataset.from_dict(rows.to_dict(), features=rows.features)
