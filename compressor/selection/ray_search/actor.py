"""`ShareWorker` as a Ray actor. This module does not import PyTorch, because the driver needs only the class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_THREADS = 1
"""Threads of a worker: more workers with fewer rows each are faster than more threads per worker."""


class RayWorker:
    """One worker. Every request holds references to all data that it needs, so that a restarted worker can continue."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(_THREADS)
        self._share: list[Any] | None = None
        self._worker: Any = None

    def ready(self) -> None:
        """Return once the worker has started."""

    def measure(
        self, setup: list[Any], share: list[Any], subsets: Sequence[Any], base: Any, record: bool
    ) -> tuple[Any, float]:
        """The statistics and the cost that `ShareWorker.measure` returns.

        Args:
            setup: reference to a pickled `WorkerSetup`, in a list, because Ray would resolve a bare reference.
            share: reference to the pickled rows of this worker, in a list.
            subsets: the heads that each subset keeps.
            base: the subset that the workers recorded last; None: they have recorded none.
            record: record `base` first.
        """
        if self._worker is None or self._share != share:
            import ray
            from ray import cloudpickle

            from compressor.selection.ray_search.worker import ShareWorker

            self._worker = ShareWorker(cloudpickle.loads(ray.get(setup[0])), cloudpickle.loads(ray.get(share[0])))
            self._share = share
        statistics, forwards = self._worker.measure(subsets, base, record=record)
        return statistics, forwards
