"""The frozen model behind a search: subsets are evaluated through the hook, and as little of the model as they need."""

from __future__ import annotations

import contextlib
import itertools
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.heads.replay import NotRowsError, Record, Replay
from compressor.heads.search import Head, Trials
from compressor.heads.sensitivity import sensitivity
from compressor.sites import Site
from compressor.tasks.base import Data
from compressor.tasks.evaluate import batches
from compressor.training.schedule import MixedPrecision
from graph_passes.files import beside

_TOGETHER = {"cpu": 1024, "cuda": 65_536}
"""Tokens of a forward up to which several subsets share one: beyond, a processor gains nothing from more rows."""
_OF_MEMORY = 0.25
"""Share of the free memory that records may take; what does not fit is made anew when it is needed."""

_OF_GRADIENT = 3.0
"""Forwards that a forward with its way back is counted as: the way back multiplies twice as much."""
_SAVE_SECONDS, _SAVE_SHARE = 30.0, 20.0
"""Between two savings of what a search has measured: seconds, and times what a saving takes; the longer of both."""


class ModelTrials:
    """`Trials` over one model and its data.

    Subsets are run from the first block that they change against the base, a subset whose way through the model is on
    record. `evaluate_without` makes the subset that it is given the base; that, too, is run from its first change on.

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
        self.count, self.forwards = 0, 0.0
        self._model, self._sites, self._data, self._batch_size, self._plain = model, sites, data, batch_size, plain
        self._replay = Replay(model, sites, mixed_precision)
        self._found: dict[frozenset[Head], np.ndarray] = {}
        self._stored: dict[frozenset[Head], np.ndarray] = {}
        self._path: Path | None = None
        self._due = 0.0
        self._most: float | None = None
        self._part = 1.0  # of the evaluation rows, in the batch that is run
        self._base = frozenset(self.heads)
        self._records: dict[int, tuple[frozenset[Head], Record]] = {}
        self._together = 1 if plain else _TOGETHER[model.device.type]
        drawn = np.random.default_rng(seed).permutation(len(data.train))[:rows]
        self._train = data.train.select(sorted(drawn.tolist()))

    def evaluate(self, kept: frozenset[Head]) -> float:
        return self.evaluate_all([kept])[0]

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        self._base = kept
        return self._evaluate([kept - {head} for head in heads], record=not self._plain)

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return self._evaluate(list(subsets), record=False)

    def statistics(self, kept: frozenset[Head]) -> np.ndarray:
        """`Task.per_example` of every evaluation row with the heads `kept`, `[examples, statistics]`."""
        self.evaluate(kept)
        return self._found[kept]

    def remember(self, path: Path) -> None:
        """Go on from `path`, where an interrupted run of the same search keeps what it measured, and keep there what
        this one does. `forwards` goes on as well: what was spent in all. Searches of the same model and rows may share
        a file if nobody asks what each of them spent.
        """
        self._path, self._due = path, time.monotonic() + _SAVE_SECONDS
        self.forwards += self._load()

    def _load(self) -> float:
        """Take what the file has of these heads and rows; the forwards that it took."""
        assert self._path is not None
        with (
            contextlib.suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile),
            np.load(self._path) as file,
        ):
            kept, statistics = file["kept"], file["statistics"]
            if kept.shape[1:] == (len(self.heads),) and statistics.shape[1:2] == (len(self._data.eval),):
                found = (frozenset(itertools.compress(self.heads, mask)) for mask in kept)
                self._stored.update(zip(found, statistics, strict=True))
                return float(file["forwards"])
        return 0.0

    def _store(self) -> None:
        """Write what was measured, now and then; seldom where that takes long."""
        if self._path is None or time.monotonic() < self._due:
            return
        began = time.monotonic()
        self._load()  # what another process has written
        self._stored.update(self._found)
        kept = np.array([[head in subset for head in self.heads] for subset in self._stored])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with beside(self._path) as place, place.open("wb") as file:
            np.savez(file, kept=kept, statistics=np.stack(list(self._stored.values())), forwards=self.forwards)
        now = time.monotonic()
        self._due = now + max(_SAVE_SECONDS, _SAVE_SHARE * (now - began))

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        task = self._data.task
        self.forwards += _OF_GRADIENT * len(self._train) / len(self._data.eval)
        rows = (task.labelled(batch) for _, batch in batches(task, self._train, self._batch_size))
        found = sensitivity(self._model, self._sites, self._gates([kept])[0].bool().cpu(), rows)
        return dict(zip(self.heads, found.tolist(), strict=True))

    def _evaluate(self, subsets: list[frozenset[Head]], *, record: bool) -> list[float]:
        new = [subset for subset in dict.fromkeys(subsets) if subset not in self._found]
        self._found.update({subset: self._stored[subset] for subset in new if subset in self._stored})
        if missing := [subset for subset in new if subset not in self._found]:
            self._measure(missing, record)
            self._store()
        self.count += len(new)
        task = self._data.task
        metrics = [task.score(self._found[subset]) for subset in subsets]
        return metrics if task.higher_is_better else [-metric for metric in metrics]

    def _measure(self, subsets: Sequence[frozenset[Head]], record: bool) -> None:
        parts: dict[frozenset[Head], list[np.ndarray]] = {subset: [] for subset in subsets}
        order: list[int] = []
        for number, (indices, batch) in enumerate(self._batches()):
            labels = batch.pop(self._data.task.label_name).numpy()
            there = {name: tensor.to(self._model.device) for name, tensor in batch.items()}
            self._part = len(indices) / len(self._data.eval)
            base = self._record(number, there) if record else self._records.get(number)
            order += indices
            for call, group in self._groups(subsets, base, there):
                for subset, logits in zip(group, self._logits(there, group, base, call), strict=True):
                    parts[subset].append(self._data.task.per_example(logits, labels))
        back = np.argsort(order)
        self._found.update({subset: np.concatenate(found)[back] for subset, found in parts.items()})

    def _record(self, number: int, batch: Mapping[str, Tensor]) -> tuple[frozenset[Head], Record]:
        """The base's way on one batch: on record, or run from where it leaves an older one."""
        older = self._records.get(number)
        if older is not None and older[0] == self._base:
            return older
        record = Record()
        self._run(batch, [self._base], older, self._first_call(self._base, older), record)
        made = (self._base, record)
        self._records.pop(number, None)
        if record.nbytes + sum(other.nbytes for _, other in self._records.values()) <= self._room():
            self._records[number] = made
        return made

    def _groups(
        self,
        subsets: Sequence[frozenset[Head]],
        base: tuple[frozenset[Head], Record] | None,
        batch: Mapping[str, Tensor],
    ) -> Iterator[tuple[int, list[frozenset[Head]]]]:
        """Subsets that share a forward, with the first attention call that any of them changes."""
        by_call: dict[int, list[frozenset[Head]]] = {}
        for subset in subsets:
            by_call.setdefault(self._first_call(subset, base), []).append(subset)
        first = next(iter(batch.values()))
        size = max(1, self._together // (first.numel() if first.dim() == 2 else len(first)))
        for call, group in by_call.items():
            for start in range(0, len(group), size):
                yield call, group[start : start + size]

    def _logits(
        self,
        batch: Mapping[str, Tensor],
        group: Sequence[frozenset[Head]],
        base: tuple[frozenset[Head], Record] | None,
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
        batch: Mapping[str, Tensor],
        group: Sequence[frozenset[Head]],
        base: tuple[frozenset[Head], Record] | None,
        call: int,
        record: Record | None = None,
    ) -> Any:
        played = base[1] if base else None
        share = 1 - played.start(call) / len(played.blocks) if played and played.blocks else 1.0
        out = self._replay.run(batch, self._gates(group), base=played, call=call, record=record)
        self.forwards += len(group) * share * self._part
        return out

    def _first_call(self, subset: frozenset[Head], base: tuple[frozenset[Head], Record] | None) -> int:
        """The first attention call at which a subset is not the base."""
        return base[1].first_call({site for site, _ in subset ^ base[0]}) if base else 0

    def _gates(self, subsets: Sequence[frozenset[Head]]) -> Tensor:
        """`[subsets, heads]`, one where a head is kept."""
        gates = [[float(head in subset) for head in self.heads] for subset in subsets]
        return torch.tensor(gates, device=self._model.device)

    def _batches(self) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        task, rows = self._data.task, self._data.eval
        if not self._plain:
            yield from batches(task, rows, self._batch_size)
            return
        for start in range(0, len(rows), self._batch_size):
            indices = list(range(start, min(start + self._batch_size, len(rows))))
            yield indices, task.collate([rows[index] for index in indices])

    def _room(self) -> float:
        """Bytes that all records together may take, as memory is free when the first is made."""
        if self._most is None:
            cuda = self._model.device.type == "cuda"
            free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
            self._most = _OF_MEMORY * free
        return self._most


class PoolTrials:
    """`Trials` whose search chooses among the heads of one pool; the others are always there.

    Args:
        trials: of the whole model.
        heads: the pool, in (site, head) order.
    """

    def __init__(self, trials: Trials, heads: tuple[Head, ...]) -> None:
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
