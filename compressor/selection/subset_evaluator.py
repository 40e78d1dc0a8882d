"""Evaluate subsets of a frozen model's heads for a search, cache the results and count their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from compressor.selection.evaluation_store import Evaluation, Evaluations, EvaluationStore
from compressor.selection.gradient_importance import sensitivity
from compressor.selection.measure_subsets import Measurer, SubsetMeasurer
from compressor.selection.search import Head, all_heads
from compressor.tasks.data import Data
from compressor.tasks.scoring import batches
from compressor.training.precision import MixedPrecision
from compressor.units import Site

_GRADIENT_FORWARDS = 3.0
"""Cost of a forward and its backward, in forwards: the backward has twice as many products."""
_MEASURED_AT_ONCE = 16
"""Maximum number of subsets between two writes of the results, which an interruption loses."""


class ModelSubsetEvaluator:
    """`SubsetEvaluator` of one model and its rows.

    `evaluate_without` records the activations of `kept`, and `evaluate` those of a new subset, so that later subsets
    run from their first difference.

    Args:
        model: the model, which is not changed.
        sites: its sites, in call order.
        data: metrics are computed on its evaluation rows, sensitivity on its training rows.
        batch_size: rows per batch.
        seed: seed of the draw of training rows.
        mixed_precision: precision of matmuls in evaluations; sensitivity is measured in float32.
        measurer: measures the subsets; None: a `SubsetMeasurer` in this process.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        data: Data,
        batch_size: int,
        seed: int,
        mixed_precision: MixedPrecision = "no",
        *,
        measurer: Measurer | None = None,
    ) -> None:
        self.heads = self._all_heads = all_heads(sites)
        self.always_kept: frozenset[Head] = frozenset()
        self.forwards = 0.0
        self._model, self._sites, self._data, self._batch_size = model, sites, data, batch_size
        self._measurer = measurer or SubsetMeasurer(model, sites, data.task, data.eval, batch_size, mixed_precision)
        self._evaluations: Evaluations = {}
        self._counted: set[frozenset[Head]] = set()
        self._store: EvaluationStore | None = None
        self._seed = seed

    @property
    def count(self) -> int:
        return len(self._counted)

    def search_among(self, heads: tuple[Head, ...]) -> None:
        """Let a search remove these heads alone, in (site, head) order; every subset keeps all others."""
        self.heads, self.always_kept = heads, frozenset(self._all_heads).difference(heads)

    def evaluate(self, kept: frozenset[Head]) -> float:
        # A search removes heads, so the next subset differs from this one only in the heads that it removes.
        return self._evaluate([kept], base=kept)[0]

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        return self._evaluate([kept - {head} for head in heads], base=kept)

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return self._evaluate(list(subsets), base=None)

    def statistics(self, kept: frozenset[Head]) -> np.ndarray:
        """`Task.per_example` of every evaluation row with the heads `kept`, `[examples, k]`."""
        self.evaluate(kept)
        return self._evaluations[kept | self.always_kept].statistics

    def store_in(self, path: Path, *, seconds: float = 30.0, write_share: float = 20.0) -> None:
        """Use the evaluations in a file, and store new ones there.

        An interrupted search resumes from the file, and searches on the same model and rows can share it. The cost of a
        subset counts for every search that evaluates it, even if another measured it.

        Args:
            path: the file; it need not exist.
            seconds: see `EvaluationStore`.
            write_share: see `EvaluationStore`.
        """
        rows = len(self._data.eval)
        self._store = EvaluationStore(path, self._all_heads, rows, seconds=seconds, write_share=write_share)
        self._evaluations.update(self._store.load())

    @contextmanager
    def stored_on_interrupt(self) -> Iterator[None]:
        """Write the evaluations to the file of `store_in` if Ctrl-C ends the block."""
        try:
            yield
        except KeyboardInterrupt:
            if self._store is not None:
                self._store.write(self._evaluations)
            raise

    def sensitivity(self, kept: frozenset[Head], rows: int) -> Mapping[Head, float]:
        task, train = self._data.task, self._data.train
        drawn = train.select(sorted(np.random.default_rng(self._seed).permutation(len(train))[:rows].tolist()))
        self.forwards += _GRADIENT_FORWARDS * len(drawn) / len(self._data.eval)
        labelled = (task.loss_inputs(batch) for _, batch in batches(task, drawn, self._batch_size))
        mask = torch.tensor([head in kept or head in self.always_kept for head in self._all_heads])
        importance = sensitivity(self._model, self._sites, mask, labelled).tolist()
        return {head: value for head, value in zip(self._all_heads, importance, strict=True) if head in self.heads}

    def _evaluate(self, subsets: list[frozenset[Head]], *, base: frozenset[Head] | None) -> list[float]:
        """The metric of each subset, negated if lower is better; `base` is recorded first, see `Measurer.measure`."""
        subsets = [subset | self.always_kept for subset in subsets]
        base = None if base is None else base | self.always_kept
        new = [subset for subset in dict.fromkeys(subsets) if subset not in self._counted]
        for first in range(0, len(new), _MEASURED_AT_ONCE):
            self._measure(new[first : first + _MEASURED_AT_ONCE], base)
        self._counted.update(new)
        self.forwards += sum(self._evaluations[subset].forwards for subset in new)
        task = self._data.task
        metrics = [task.score(self._evaluations[subset].statistics) for subset in subsets]
        return metrics if task.higher_is_better else [-metric for metric in metrics]

    def _measure(self, subsets: list[frozenset[Head]], base: frozenset[Head] | None) -> None:
        """Measure the subsets that have not been measured, and store the results."""
        missing = [subset for subset in subsets if subset not in self._evaluations]
        if not missing:
            return
        statistics, forwards = self._measurer.measure(missing, base)
        cost = forwards / len(missing)
        self._evaluations.update(
            {subset: Evaluation(array, cost) for subset, array in zip(missing, statistics, strict=True)}
        )
        if self._store is not None:
            self._store.exchange(self._evaluations)


EvaluatorFactory = Callable[..., ModelSubsetEvaluator]
"""Called with the arguments of `ModelSubsetEvaluator` up to `mixed_precision`."""
