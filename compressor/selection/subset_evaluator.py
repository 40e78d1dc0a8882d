"""The frozen model behind a search: subsets are evaluated through the hook, and as little of the model as they need."""

from __future__ import annotations

import contextlib
import itertools
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.selection.gradient_importance import sensitivity
from compressor.selection.prefix_cache import ActivationCache, NotRowsError, PartialForward
from compressor.selection.search import Head, SubsetEvaluator
from compressor.tasks.base import Data
from compressor.tasks.scoring import batches
from compressor.training.schedule import MixedPrecision
from compressor.units import Site
from graph_passes.files import beside

_TOGETHER = {"cpu": 1024, "cuda": 65_536}
"""Tokens of a forward up to which several subsets share one: beyond, a processor gains nothing from more rows."""
_OF_MEMORY = 0.25
"""Share of the free memory that records may take; what does not fit is made anew when it is needed."""

_Base = tuple[frozenset[Head], ActivationCache]
"""A subset, and its way through the model on one batch."""

_OF_GRADIENT = 3.0
"""Forwards that a forward with its way back is counted as: the way back multiplies twice as much."""
_SAVE_SECONDS, _SAVE_SHARE = 30.0, 20.0
"""Between two savings of what a search has measured: seconds, and times what a saving takes; the longer of both."""


class _Found(NamedTuple):
    """What is known of one subset."""

    statistics: np.ndarray
    """`Task.per_example` of every evaluation row, `[examples, statistics]`."""
    forwards: float
    """What that took: its part of those of the subsets that were measured with it."""


class _Batch(NamedTuple):
    """Evaluation rows that share a forward."""

    rows: list[int]
    inputs: dict[str, Tensor]
    labels: np.ndarray


class ModelSubsetEvaluator:
    """`SubsetEvaluator` over one model and its data.

    Subsets are run from the first block that they change against the base, a subset whose way through the model is on
    record. `evaluate_without` makes the subset that it is given the base, and so does `evaluate` of a new one; that,
    too, is run from its first change on.

    Args:
        model: not changed.
        sites: its sites, in call order.
        data: metrics are taken on its evaluation rows, sensitivity on its training rows.
        batch_size: rows a batch.
        rows: training rows that sensitivity is averaged over, at most.
        seed: draws those rows.
        mixed_precision: what the matrices of an evaluation are multiplied in; sensitivity is measured in float32.
        plain: the whole model for every subset, one at a time, the rows in their own order: what the rest must equal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        data: Data,
        batch_size: int,
        rows: int,
        seed: int,
        mixed_precision: MixedPrecision = "no",
        *,
        plain: bool = False,
    ) -> None:
        self.heads: tuple[Head, ...] = tuple((site.name, head) for site in sites for head in range(site.heads))
        self.forwards = 0.0
        self._model, self._sites, self._data, self._batch_size, self._plain = model, sites, data, batch_size, plain
        self._replay = PartialForward(model, sites, mixed_precision)
        self._found: dict[frozenset[Head], _Found] = {}
        self._asked: set[frozenset[Head]] = set()
        self._path: Path | None = None
        self._due = 0.0
        self._most: float | None = None
        self._spent = 0.0  # forwards of the evaluations that are being made
        self._base = frozenset(self.heads)
        self._records: dict[int, _Base] = {}
        self._together = 1 if plain else _TOGETHER[model.device.type]
        drawn = np.random.default_rng(seed).permutation(len(data.train))[:rows]
        self._train = data.train.select(sorted(drawn.tolist()))

    @property
    def count(self) -> int:
        return len(self._asked)

    def evaluate(self, kept: frozenset[Head]) -> float:
        if kept not in self._found:
            self._base = kept  # going down, the next one differs from it by what it drops
        return self._evaluate([kept], record=not self._plain)[0]

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        self._base = kept
        return self._evaluate([kept - {head} for head in heads], record=not self._plain)

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return self._evaluate(list(subsets), record=False)

    def statistics(self, kept: frozenset[Head]) -> np.ndarray:
        """`Task.per_example` of every evaluation row with the heads `kept`, `[examples, statistics]`."""
        self.evaluate(kept)
        return self._found[kept].statistics

    def remember(self, path: Path) -> None:
        """Take what `path` has of the same model and rows, and keep there what is measured.

        It is for an interrupted search that goes on, and for searches that share what they measure: what a subset took
        to be measured counts as this search's own as soon as it asks for it.
        """
        self._path, self._due = path, time.monotonic() + _SAVE_SECONDS
        self._load()

    def _load(self) -> None:
        """Take what the file has of these heads and rows."""
        assert self._path is not None
        with (
            contextlib.suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile),
            np.load(self._path) as file,
        ):
            kept, statistics, forwards = file["kept"], file["statistics"], file["forwards"]
            fits = kept.shape[1:] == (len(self.heads),) and statistics.shape[1:2] == (len(self._data.eval),)
            if fits and len(kept) == len(statistics) == len(forwards):
                subsets = (frozenset(itertools.compress(self.heads, mask)) for mask in kept)
                self._found.update(zip(subsets, map(_Found, statistics, forwards.tolist()), strict=True))

    def _store(self) -> None:
        """Write what was measured, now and then; seldom where that takes long."""
        if self._path is None or time.monotonic() < self._due:
            return
        began = time.monotonic()
        self._load()  # what another process has written
        kept = np.array([[head in subset for head in self.heads] for subset in self._found])
        statistics, forwards = zip(*self._found.values(), strict=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with beside(self._path) as place, place.open("wb") as file:
            np.savez(file, kept=kept, statistics=np.stack(statistics), forwards=np.array(forwards))
        now = time.monotonic()
        self._due = now + max(_SAVE_SECONDS, _SAVE_SHARE * (now - began))

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        task = self._data.task
        self.forwards += _OF_GRADIENT * len(self._train) / len(self._data.eval)
        rows = (task.loss_inputs(batch) for _, batch in batches(task, self._train, self._batch_size))
        found = sensitivity(self._model, self._sites, self._gates([kept])[0].bool().cpu(), rows)
        return dict(zip(self.heads, found.tolist(), strict=True))

    def _evaluate(self, subsets: list[frozenset[Head]], *, record: bool) -> list[float]:
        new = [subset for subset in dict.fromkeys(subsets) if subset not in self._asked]
        if missing := [subset for subset in new if subset not in self._found]:
            found, forwards = self._measure(missing, record)
            each = forwards / len(missing)
            self._found.update({subset: _Found(own, each) for subset, own in zip(missing, found, strict=True)})
            self._store()
        self._asked.update(new)
        self.forwards += sum(self._found[subset].forwards for subset in new)
        task = self._data.task
        metrics = [task.score(self._found[subset].statistics) for subset in subsets]
        return metrics if task.higher_is_better else [-metric for metric in metrics]

    def _measure(self, subsets: Sequence[frozenset[Head]], record: bool) -> tuple[Sequence[np.ndarray], float]:
        """Statistics of every evaluation row, of each subset, and the forwards that they took together."""
        self._spent = 0.0
        parts: list[list[np.ndarray]] = [[] for _ in subsets]
        places = {subset: place for place, subset in enumerate(subsets)}
        order: list[int] = []
        for number, batch in enumerate(self._batches()):
            base = self._record(number, batch) if record else self._records.get(number)
            order += batch.rows
            for call, group in self._groups(subsets, base, batch):
                for subset, logits in zip(group, self._logits(batch, group, base, call), strict=True):
                    parts[places[subset]].append(self._data.task.per_example(logits, batch.labels))
        back = np.argsort(order)
        return [np.concatenate(found)[back] for found in parts], self._spent

    def _record(self, number: int, batch: _Batch) -> _Base:
        """The base's way on one batch: on record, or run from where it leaves an older one."""
        older = self._records.get(number)
        if older is not None and older[0] == self._base:
            return older
        record = ActivationCache()
        self._run(batch, [self._base], older, self._first_call(self._base, older), record)
        made = (self._base, record)
        self._records.pop(number, None)
        if record.nbytes + sum(other.nbytes for _, other in self._records.values()) <= self._room():
            self._records[number] = made
        return made

    def _groups(
        self,
        subsets: Sequence[frozenset[Head]],
        base: _Base | None,
        batch: _Batch,
    ) -> Iterator[tuple[int, list[frozenset[Head]]]]:
        """Subsets that share a forward, with the first attention call that any of them changes."""
        by_call: dict[int, list[frozenset[Head]]] = {}
        for subset in subsets:
            by_call.setdefault(self._first_call(subset, base), []).append(subset)
        first = next(iter(batch.inputs.values()))
        size = max(1, self._together // (first.numel() if first.dim() == 2 else len(first)))
        for call, group in by_call.items():
            for start in range(0, len(group), size):
                yield call, group[start : start + size]

    def _logits(
        self,
        batch: _Batch,
        group: Sequence[frozenset[Head]],
        base: _Base | None,
        call: int,
    ) -> list[np.ndarray]:
        """Logits of each subset of a group."""
        scored = self._data.task.scored
        try:
            out = self._run(batch, group, base, call)
        except NotRowsError:
            self._together = 1
            return [scored(self._run(batch, [subset], base, call)) for subset in group]
        return list(np.split(scored(out), len(group)))

    def _run(
        self,
        batch: _Batch,
        group: Sequence[frozenset[Head]],
        base: _Base | None,
        call: int,
        record: ActivationCache | None = None,
    ) -> Any:
        played = base[1] if base else None
        share = 1 - played.start(call) / len(played.blocks) if played and played.blocks else 1.0
        out = self._replay.run(batch.inputs, self._gates(group), base=played, call=call, record=record)
        self._spent += len(group) * share * len(batch.rows) / len(self._data.eval)
        return out

    def _first_call(self, subset: frozenset[Head], base: _Base | None) -> int:
        """The first attention call at which a subset is not the base."""
        return base[1].first_call({site for site, _ in subset ^ base[0]}) if base else 0

    def _gates(self, subsets: Sequence[frozenset[Head]]) -> Tensor:
        """`[subsets, heads]`, one where a head is kept."""
        gates = [[float(head in subset) for head in self.heads] for subset in subsets]
        return torch.tensor(gates, device=self._model.device)

    def _batches(self) -> Iterator[_Batch]:
        task, rows, size = self._data.task, self._data.eval, self._batch_size
        in_order = (list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size))
        plain = ((indices, task.collate([rows[index] for index in indices])) for indices in in_order)
        for indices, batch in plain if self._plain else batches(task, rows, size):
            labels = batch.pop(task.label_name).numpy()
            yield _Batch(indices, {name: tensor.to(self._model.device) for name, tensor in batch.items()}, labels)

    def _room(self) -> float:
        """Bytes that all records together may take, as memory is free when the first is made."""
        if self._most is None:
            cuda = self._model.device.type == "cuda"
            free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
            self._most = _OF_MEMORY * free
        return self._most


class PooledSubsetEvaluator:
    """`SubsetEvaluator` whose search chooses among the heads of one pool; the others are always there.

    Args:
        trials: of the whole model.
        heads: the pool, in (site, head) order.
    """

    def __init__(self, trials: SubsetEvaluator, heads: tuple[Head, ...]) -> None:
        self.heads, self.rest = heads, frozenset(trials.heads).difference(heads)
        self._trials = trials

    @property
    def count(self) -> int:
        return self._trials.count

    @property
    def forwards(self) -> float:
        return self._trials.forwards

    def evaluate(self, kept: frozenset[Head]) -> float:
        return self._trials.evaluate(kept | self.rest)

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        return self._trials.evaluate_without(kept | self.rest, heads)

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return self._trials.evaluate_all(kept | self.rest for kept in subsets)

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        found = self._trials.sensitivity(kept | self.rest)
        return {head: found[head] for head in self.heads}
