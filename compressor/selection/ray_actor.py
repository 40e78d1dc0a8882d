"""`ShareWorker` as an actor of Ray. This module is loaded without PyTorch, because the driver needs the class alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_THREADS = 1
"""Threads of a worker: more rows at a time are better distributed than computed by several threads."""


class RayWorker:
    """One worker. Every request holds references to what it needs, so that a worker that was restarted can continue."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(_THREADS)
        self._share: list[Any] | None = None
        self._worker: Any = None

    def ready(self) -> None:
        """Returns once the worker has started."""

    def measure(
        self, setup: list[Any], share: list[Any], subsets: Sequence[Any], base: Any, record: bool
    ) -> tuple[Any, float]:
        """The statistics and the cost that `ShareWorker.measure` returns.

        Args:
            setup: reference to a pickled `WorkerSetup`, in a list, because Ray looks up a bare reference itself.
            share: reference to the pickled rows of this worker, in a list.
            subsets: the heads that each keeps.
            base: the subset that the workers recorded last; None: they recorded none yet.
            record: record it again.
        """
        if self._worker is None or self._share != share:
            import ray
            from ray import cloudpickle

            from compressor.selection.ray_worker import ShareWorker

            self._worker = ShareWorker(cloudpickle.loads(ray.get(setup[0])), cloudpickle.loads(ray.get(share[0])))
            self._share = share
        statistics, forwards = self._worker.measure(subsets, base, record=record)
        return statistics, forwards
