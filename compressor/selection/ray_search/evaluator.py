"""Distribute the evaluations of a search over processes and machines with Ray.

The evaluation rows are divided, not the subsets: each worker runs every new subset on its share of the batches, and the
statistics are joined row by row. A batch is evaluated as in a single process: with the same subsets in a forward, from
the same recorded activations. Therefore the numbers depend neither on the number of workers nor on their order of
finishing, nothing is recorded twice, and searches that evaluate one subset at a time are distributed too.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, UsageError
from compressor.selection.measure_subsets import Measurement
from compressor.selection.ray_search.cluster import RayProcess, RaySettings, check_reachable
from compressor.selection.ray_search.worker import WorkerSetup
from compressor.selection.search import Head
from compressor.selection.subset_evaluator import EvaluatorFactory, ModelSubsetEvaluator
from compressor.tasks.data import Data
from compressor.tasks.scoring import batches
from compressor.training.precision import MixedPrecision
from compressor.training.processes import process_state
from compressor.units import Site


@contextmanager
def evaluator_factory(where: str | None, settings: RaySettings | None = None) -> Iterator[EvaluatorFactory]:
    """A factory of evaluators that measure in this process, or on workers that end with the context.

    Args:
        where: None: no workers. `local`: one worker per core of this machine; `local:4`: four workers. `HOST:PORT`: one
            per core of the cluster at this address, of which this machine is a node. If the model is on a GPU: one per
            GPU instead.
        settings: settings of workers, and time limits; None: the defaults.

    Raises:
        UsageError: several processes of `accelerate launch` are running.
        TargetMissingError: Ray is not installed, does not start or does not answer, or workers end repeatedly.
    """
    if where is None:
        yield ModelSubsetEvaluator
        return
    check_reachable(where)
    if process_state().num_processes > 1:
        raise UsageError(
            f"--ray {where}: it distributes a search by itself; run it without accelerate launch",
            code=ErrorCode.CONTRADICTION,
            field="ray",
            value=where,
        )
    with RayPool(where, settings or RaySettings()) as pool:
        yield factory_of(pool)


def factory_of(pool: RayPool) -> EvaluatorFactory:
    """A factory of evaluators that measure on the workers of a pool."""

    def make(
        model: PreTrainedModel,
        sites: Sequence[Site],
        data: Data,
        batch_size: int,
        seed: int,
        mixed_precision: MixedPrecision = "no",
    ) -> ModelSubsetEvaluator:
        setup = WorkerSetup(model, tuple(sites), data.task, batch_size, mixed_precision)
        measurer = DistributedMeasurer(pool, setup, data.eval)
        return ModelSubsetEvaluator(model, sites, data, batch_size, seed, mixed_precision, measurer=measurer)

    return make


class DistributedMeasurer:
    """Measures subsets on the workers of a pool.

    Args:
        pool: the workers.
        setup: the model and the settings of its evaluation.
        rows: the evaluation rows.
    """

    def __init__(self, pool: RayPool, setup: WorkerSetup, rows: Dataset) -> None:
        batch_rows = [indices for indices, _ in batches(setup.task, rows, setup.batch_size)]  # as in a single process
        workers = pool.start(setup.model, len(batch_rows))
        self._pool, self._rows = pool, len(rows)
        # The rows of a share, in order, form the same batches again, because all batches but the last are full.
        self._shares = [sorted(itertools.chain(*batch_rows[worker::workers])) for worker in range(workers)]
        self._setup = pool.share(setup)
        self._contents = [pool.share(_in_memory(rows.select(share))) for share in self._shares]
        self._recorded: frozenset[Head] | None = None
        for handle in (self._setup, *self._contents):
            weakref.finalize(self, pool.release, handle)

    def measure(self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None) -> Measurement:
        """See `Measurer`."""
        record = base is not None
        if record:
            self._recorded = base
        requests = [(self._setup, content, tuple(subsets), self._recorded, record) for content in self._contents]
        measured = self._pool.measure(requests)
        first, forwards = measured[0].statistics[0], 0.0
        statistics = np.empty((len(subsets), self._rows, first.shape[-1]), first.dtype)
        for share, part in zip(self._shares, measured, strict=True):
            statistics[:, share] = part.statistics
            forwards += part.forwards * len(share) / self._rows
        return Measurement(statistics, forwards)


class RayPool:
    """Ray workers, which run from the first evaluator until the context ends.

    Args:
        where: see `evaluator_factory`.
        settings: settings of workers, and time limits.
    """

    def __init__(self, where: str, settings: RaySettings) -> None:
        self._where, self._settings = where, settings
        self._stack = ExitStack()
        self._process: RayProcess | None = None
        self._workers = 0
        self._handles = itertools.count()
        self._released: list[int] = []

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._process = None
        self._stack.close()

    def start(self, model: PreTrainedModel, maximum: int) -> int:
        """Start workers at the first call; return their number, at most `maximum`.

        Raises:
            TargetMissingError: Ray or its workers do not start.
        """
        maximum = max(1, maximum)
        if self._process is None:
            shared_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
            self._process = self._stack.enter_context(RayProcess(self._where, self._settings, shared_bytes))
            self._workers = self._process.request(
                "start_workers",
                maximum,
                self._settings.cores,
                self._settings.restarts,
                self._settings.start_seconds,
                on_gpu=model.device.type == "cuda",
            )
        return min(self._workers, maximum)

    def share(self, content: Any) -> int:
        """Make `content` available to every worker; return its handle for requests."""
        from ray import cloudpickle

        assert self._process is not None
        handle = next(self._handles)
        self._process.request("share", handle, cloudpickle.dumps(content))
        return handle

    def release(self, handle: int) -> None:
        """Forget shared content. The driver is informed with the next request, because another may be in progress."""
        self._released.append(handle)

    def measure(self, requests: Sequence[tuple[Any, ...]]) -> list[Measurement]:
        """The measurement of each worker.

        Args:
            requests: for each worker the handles of a `WorkerSetup` and of its rows, and the other arguments of
                `RayWorker.measure`.

        Raises:
            TargetMissingError: workers end repeatedly.
        """
        assert self._process is not None
        released, self._released = self._released, []
        return [Measurement(*measured) for measured in self._process.request("measure", released, requests)]


def _in_memory(rows: Dataset) -> Dataset:
    """A copy of rows in memory, without files that they are mapped from and that another machine would lack."""
    return Dataset.from_dict(rows.to_dict(), features=rows.features)
