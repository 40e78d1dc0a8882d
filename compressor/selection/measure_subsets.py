"""Statistics of evaluation rows for subsets of heads; each subset runs only the part of the model that it changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.selection.prefix_cache import ActivationCache, NotRowsError, PartialForward
from compressor.selection.search import Head, all_heads
from compressor.tasks.base import Task
from compressor.tasks.scoring import batches
from compressor.training.precision import MixedPrecision
from compressor.units import Site

_SHARED_TOKENS = {"cpu": 1024, "cuda": 65_536}
"""Maximum number of tokens of a forward that several subsets share; larger forwards are not more efficient."""

_Base = tuple[frozenset[Head], ActivationCache]
"""A subset and its activations on one batch."""


class Measurement(NamedTuple):
    """The result of measuring some subsets.

    Attributes:
        statistics: `Task.per_example` of every evaluation row for each subset, `[subsets, examples, k]`.
        forwards: cost, in forwards of the whole model over all evaluation rows.
    """

    statistics: np.ndarray
    forwards: float


class Measurer(Protocol):
    """Measures subsets of heads, in this process or in others."""

    def measure(self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None) -> Measurement:
        """Measure subsets, which must be distinct.

        Args:
            subsets: the heads that each subset keeps.
            base: a subset whose activations are recorded first, so that `subsets` run from their first difference from
                it; None: they run from their first difference from the subset that was recorded last.
        """
        ...


class _Batch(NamedTuple):
    """Evaluation rows that share a forward."""

    rows: list[int]
    inputs: dict[str, Tensor]
    labels: np.ndarray


class SubsetMeasurer:
    """Measures subsets of one model in this process.

    A subset to be recorded also runs from its first difference from the one that was recorded before.

    Args:
        model: the model, which is not changed.
        sites: its sites, in call order.
        task: computes the statistics.
        rows: the evaluation rows.
        batch_size: rows per batch.
        mixed_precision: precision of matmuls.
        reuse: reuse activations. False: run the whole model for every subset, one at a time, with rows in their order.
        memory_share: share of the free memory that activations may use; those that do not fit are computed again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        task: Task,
        rows: Dataset,
        batch_size: int,
        mixed_precision: MixedPrecision = "no",
        *,
        reuse: bool = True,
        memory_share: float = 0.25,
    ) -> None:
        self._model, self._task, self._rows, self._batch_size, self._reuse = model, task, rows, batch_size, reuse
        self._heads = all_heads(sites)
        self._forward = PartialForward(model, sites, mixed_precision)
        self._records: dict[int, _Base] = {}
        self._shared_tokens = _SHARED_TOKENS[model.device.type] if reuse else 1
        self._memory_share = memory_share
        self._memory_limit: float | None = None
        self._forwards = 0.0  # cost of the measurement in progress

    def measure(self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None) -> Measurement:
        """See `Measurer`."""
        if not self._reuse:
            base = None
        self._forwards = 0.0
        parts: list[list[np.ndarray]] = [[] for _ in subsets]
        number_of = {subset: number for number, subset in enumerate(subsets)}
        order: list[int] = []
        for number, batch in enumerate(self._batches()):
            record = self._record(base, number, batch) if base is not None else self._records.get(number)
            order += batch.rows
            for call, group in self._groups(subsets, record, batch):
                for subset, logits in zip(group, self._logits(batch, group, record, call), strict=True):
                    parts[number_of[subset]].append(self._task.per_example(logits, batch.labels))
        inverse = np.argsort(order)
        return Measurement(np.stack([np.concatenate(arrays)[inverse] for arrays in parts]), self._forwards)

    def _record(self, base: frozenset[Head], number: int, batch: _Batch) -> _Base:
        """The activations of `base` on batch `number`: the current record, or a new one that starts from it."""
        older = self._records.get(number)
        if older is not None and older[0] == base:
            return older
        cache = ActivationCache()
        self._run(batch, [base], older, self._first_call(base, older), cache)
        self._records.pop(number, None)
        if cache.nbytes + sum(recorded.nbytes for _, recorded in self._records.values()) <= self._room():
            self._records[number] = (base, cache)
        return base, cache

    def _groups(
        self, subsets: Sequence[frozenset[Head]], record: _Base | None, batch: _Batch
    ) -> Iterator[tuple[int, list[frozenset[Head]]]]:
        """Groups of subsets that share a forward, each with the first attention call that its subsets change."""
        by_call: dict[int, list[frozenset[Head]]] = {}
        for subset in subsets:
            by_call.setdefault(self._first_call(subset, record), []).append(subset)
        first = next(iter(batch.inputs.values()))
        size = max(1, self._shared_tokens // (first.numel() if first.dim() == 2 else len(first)))
        for call, group in by_call.items():
            for start in range(0, len(group), size):
                yield call, group[start : start + size]

    def _logits(
        self, batch: _Batch, group: Sequence[frozenset[Head]], record: _Base | None, call: int
    ) -> list[np.ndarray]:
        """Logits of each subset of a group, which runs from attention call `call` on."""
        try:
            outputs = self._run(batch, group, record, call)
        except NotRowsError:
            self._shared_tokens = 1
            return [self._task.logits(self._run(batch, [subset], record, call)) for subset in group]
        return list(np.split(self._task.logits(outputs), len(group)))

    def _run(
        self,
        batch: _Batch,
        group: Sequence[frozenset[Head]],
        record: _Base | None,
        call: int,
        cache: ActivationCache | None = None,
    ) -> Any:
        """The outputs of a group of subsets on a batch, run from attention call `call` on; adds to the cost.

        The calls before replay `record`, and the activations of this run are recorded in `cache`.
        """
        replayed = record[1] if record else None
        share = 1 - replayed.start(call) / len(replayed.layers) if replayed and replayed.layers else 1.0
        outputs = self._forward.run(batch.inputs, self._gates(group), base=replayed, call=call, record=cache)
        self._forwards += len(group) * share * len(batch.rows) / len(self._rows)
        return outputs

    def _first_call(self, subset: frozenset[Head], record: _Base | None) -> int:
        """The first attention call at which a subset differs from the recorded one."""
        return record[1].first_call({site for site, _ in subset ^ record[0]}) if record else 0

    def _gates(self, subsets: Sequence[frozenset[Head]]) -> Tensor:
        """Gates `[subsets, heads]`: one where a head is kept, else zero."""
        gates = [[float(head in subset) for head in self._heads] for subset in subsets]
        return torch.tensor(gates, device=self._model.device)

    def _batches(self) -> Iterator[_Batch]:
        """All batches of the evaluation rows, on the device of the model."""
        for indices, batch in batches(self._task, self._rows, self._batch_size) if self._reuse else self._in_order():
            labels = batch.pop(self._task.label_name).numpy()
            yield _Batch(indices, {name: tensor.to(self._model.device) for name, tensor in batch.items()}, labels)

    def _in_order(self) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Batches of the rows in their own order."""
        for start in range(0, len(self._rows), self._batch_size):
            indices = list(range(start, min(start + self._batch_size, len(self._rows))))
            yield indices, self._task.collate([self._rows[index] for index in indices])

    def _room(self) -> float:
        """Bytes that all activations may use: a share of the memory that was free at the first record."""
        if self._memory_limit is None:
            cuda = self._model.device.type == "cuda"
            free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
            self._memory_limit = self._memory_share * free
        return self._memory_limit
