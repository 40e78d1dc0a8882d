"""The trials of a search spread over processes and machines with Ray.

The evaluation rows are divided, not the subsets: each worker runs every new subset on its share of the batches, and the
parts are put together row by row. A batch is then evaluated as one process alone would: with the same subsets beside
each other, from the same record. So the numbers do not depend on how many workers there are nor on which is done
first, no record is made twice, and a search that asks for one subset at a time is spread like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedModel

from compressor.errors import TargetMissingError, UsageError
from compressor.selection.ray_cluster import connected, reachable, said
from compressor.selection.search import Head
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from compressor.tasks.base import Data
from compressor.tasks.scoring import batches
from compressor.training.schedule import MixedPrecision
from compressor.units import Site

EvaluatorFactory = Callable[..., ModelSubsetEvaluator]
"""Called as `ModelSubsetEvaluator` is."""

_RESTARTS = 3
"""Times that a worker may die before the run gives up."""
_STARTED = 300
"""Seconds for workers to start."""
_CORES = 1
"""That a worker takes: more rows at once are better spread than computed by several threads."""


@contextmanager
def evaluator_factory(ray: str | None) -> Iterator[EvaluatorFactory]:
    """What makes the trials of a search: on this process alone, or on workers that end with the context.

    Args:
        ray: None: no workers. `local`: one a core of this machine; `local:4`: four. `HOST:PORT`: one a core of the
            cluster that answers there and that this machine is a node of; one a GPU where the model is on one.

    Raises:
        UsageError: asked for in each of several processes.
        TargetMissingError: Ray is not installed, does not start or does not answer; or workers keep dying.
    """
    if ray is None:
        yield ModelSubsetEvaluator
        return
    reachable(ray)
    if PartialState(cpu=not torch.cuda.is_available()).num_processes > 1:
        raise UsageError(f"ray {ray}: spreads a search by itself; start it without accelerate launch")
    with ExitStack() as stack:
        yield partial(RaySubsetEvaluator, _Workers(ray, stack))


class RaySubsetEvaluator(ModelSubsetEvaluator):
    """`ModelSubsetEvaluator` whose evaluations are made by workers; sensitivity is measured here."""

    def __init__(
        self,
        workers: _Workers,
        model: PreTrainedModel,
        sites: Sequence[Site],
        data: Data,
        batch_size: int,
        rows: int,
        seed: int,
        mixed_precision: MixedPrecision = "no",
    ) -> None:
        super().__init__(model, sites, data, batch_size, rows, seed, mixed_precision)
        dealt = [indices for indices, _ in batches(data.task, data.eval, batch_size)]
        count = workers.start(model, len(dealt))
        self._workers = workers
        # A share's rows, in order, make the same batches again: all are full but the very last.
        self._rows = [sorted(itertools.chain(*dealt[worker::count])) for worker in range(count)]
        self._shared = workers.share((model, tuple(sites), data.task, batch_size, mixed_precision))
        self._shares = [workers.share(_in_memory(data.eval.select(share))) for share in self._rows]
        self._recorded: frozenset[Head] | None = None

    def _measure(self, subsets: Sequence[frozenset[Head]], record: bool) -> tuple[Sequence[np.ndarray], float]:
        if record:
            self._recorded = self._base
        asked = [(self._shared, share, tuple(subsets), self._recorded, record) for share in self._shares]
        found = self._workers.measure(asked)
        first, spent = found[0][0], 0.0
        whole = np.empty((len(subsets), len(self._data.eval), first.shape[-1]), first.dtype)
        for rows, (statistics, forwards) in zip(self._rows, found, strict=True):
            whole[:, rows] = statistics
            spent += forwards * len(rows) / len(self._data.eval)
        return list(whole), spent


class _Workers:
    """Ray, from the first trials on until the context ends, and the workers that it runs."""

    def __init__(self, ray: str, stack: ExitStack) -> None:
        self.ray, self._stack = ray, stack
        self._actors: list[Any] = []

    def start(self, model: PreTrainedModel, most: int) -> int:
        """Workers at hand, `most` at most; the first call starts them."""
        on_gpu = model.device.type == "cuda"
        if not self._actors:
            self._stack.enter_context(connected(self.ray, sum(tensor.nbytes for tensor in model.state_dict().values())))
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
                    f"ray {self.ray}: {len(self._actors)} workers did not all start ({said(error)}); every node needs"
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
                f"ray {self.ray}: a worker died and {_RESTARTS} restarts did not help ({said(error)}); see that it"
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

            model, sites, task, *how = cloudpickle.loads(ray.get(shared[0]))
            rows = cloudpickle.loads(ray.get(share[0]))
            self._trials = _Share(model, sites, Data(rows, rows, rows, task, (), None, None), *how)
            self._share = share
        return self._trials.measure(subsets, base, record)


class _Share(ModelSubsetEvaluator):
    """One worker's part of the trials; it keeps records and no results."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        data: Data,
        batch_size: int,
        mixed_precision: MixedPrecision,
    ) -> None:
        super().__init__(model, sites, data, batch_size, 0, 0, mixed_precision)
        self._recorded: frozenset[Head] | None = None

    def measure(
        self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None, record: bool
    ) -> tuple[np.ndarray, float]:
        # A worker in the place of another has to record what that one had, or other subsets would share a forward.
        record = record or base != self._recorded
        if base is not None:
            self._base = self._recorded = base
        statistics, forwards = self._measure(subsets, record)
        return np.stack(statistics), forwards


def _in_memory(rows: Dataset) -> Dataset:
    """The same rows without the files that they may be mapped from, which another machine has not."""
    return Dataset.from_dict(rows.to_dict(), features=rows.features)
