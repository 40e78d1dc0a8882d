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
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from compressor.config.values import MixedPrecision
from compressor.errors import ErrorCode, UsageError
from compressor.processes import process_state
from compressor.selection.measure_subsets import Measurement, SubsetMeasurer
from compressor.selection.ray_search.cluster import RayPool, check_reachable
from compressor.selection.search import Head
from compressor.selection.subset_evaluator import EvaluatorFactory, ModelSubsetEvaluator
from compressor.tasks.base import Task
from compressor.tasks.scoring import batches
from compressor.units import Site


@contextmanager
def evaluator_factory(where: str | None, *, restarts: int = 3) -> Iterator[EvaluatorFactory]:
    """A factory of evaluators that measure in this process, or on workers (see `RayPool`) that end with the context.

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
    with closing(RayPool(where, restarts=restarts)) as pool:
        yield factory_of(pool)


def factory_of(pool: RayPool) -> EvaluatorFactory:
    """A factory of evaluators that measure on the workers of a pool."""
    return partial(ModelSubsetEvaluator, make_measurer=partial(DistributedMeasurer, pool))


class DistributedMeasurer:
    """Measures subsets on the workers of a pool; see `SubsetMeasurer` for the other arguments."""

    def __init__(
        self,
        pool: RayPool,
        model: PreTrainedModel,
        sites: Sequence[Site],
        task: Task,
        rows: Dataset,
        batch_size: int,
        mixed_precision: MixedPrecision,
    ) -> None:
        batch_rows = [indices for indices, _ in batches(task, rows, batch_size)]  # as in a single process
        shared_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        workers = pool.start(shared_bytes, len(batch_rows), on_gpu=model.device.type == "cuda")
        self._pool, self._rows = pool, len(rows)
        # The rows of a share, in order, form the same batches again, because all batches but the last are full.
        self._shares = [sorted(itertools.chain(*batch_rows[worker::workers])) for worker in range(workers)]
        parts = partial(SubsetMeasurer, model, tuple(sites), task)
        self._setup = pool.share(partial(parts, batch_size=batch_size, mixed_precision=mixed_precision))
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
        measured = [Measurement(*part) for part in self._pool.measure(requests)]
        first, forwards = measured[0].statistics[0], 0.0
        statistics = np.empty((len(subsets), self._rows, first.shape[-1]), first.dtype)
        for share, part in zip(self._shares, measured, strict=True):
            statistics[:, share] = part.statistics
            forwards += part.forwards * len(share) / self._rows
        return Measurement(statistics, forwards)


def _in_memory(rows: Dataset) -> Dataset:
    """A copy of rows in memory, without files that they are mapped from and that another machine would lack."""
    return Dataset.from_dict(rows.to_dict(), features=rows.features)
