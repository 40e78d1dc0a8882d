"""One worker of a distributed search: it measures every subset on its share of the evaluation rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from datasets import Dataset
from transformers import PreTrainedModel

from compressor.selection.measure_subsets import Measurement, SubsetMeasurer
from compressor.selection.search import Head
from compressor.tasks.base import Task
from compressor.training.precision import MixedPrecision
from compressor.units import Site


class WorkerSetup(NamedTuple):
    """The model and the settings that all workers share.

    Attributes:
        model: the model.
        sites: its sites, in call order.
        task: computes the statistics.
        batch_size: rows per batch.
        mixed_precision: precision of matmuls.
    """

    model: PreTrainedModel
    sites: tuple[Site, ...]
    task: Task
    batch_size: int
    mixed_precision: MixedPrecision


class ShareWorker:
    """Measures subsets on one share of the rows.

    Args:
        setup: the model and the settings of its evaluation.
        rows: the rows of the share.
    """

    def __init__(self, setup: WorkerSetup, rows: Dataset) -> None:
        model, sites, task, batch_size, mixed_precision = setup
        self._measurer = SubsetMeasurer(model, sites, task, rows, batch_size, mixed_precision)
        self._recorded: frozenset[Head] | None = None

    def measure(self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None, *, record: bool) -> Measurement:
        """The statistics of the share, and their cost in forwards over it.

        Args:
            subsets: the heads that each subset keeps.
            base: the subset that the workers recorded last; None: they have recorded none.
            record: record `base` first.
        """
        # A restarted worker records `base` first; without it, subsets would be grouped into other forwards.
        record = record or base != self._recorded
        if base is not None:
            self._recorded = base
        return self._measurer.measure(subsets, base if record else None)
