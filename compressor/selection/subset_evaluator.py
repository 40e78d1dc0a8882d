"""Evaluate subsets of a frozen model's heads for a search, cache the results and count their cost."""

from __future__ import annotations

import contextlib
import itertools
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from compressor.answers import IGNORED
from compressor.config.values import MixedPrecision
from compressor.models.forwards import tensors_of
from compressor.selection.measure_subsets import Measurement, Measurer, SubsetMeasurer
from compressor.selection.search import Head, all_heads
from compressor.tasks.data import Data
from compressor.tasks.scoring import batches
from compressor.units import Site, hooked
from compressor.units.find import evaluating
from compressor.units.gating import spread_over_rows
from graph_passes.files import atomic_replace

_GRADIENT_FORWARDS = 3.0
"""Cost of a forward and its backward, in forwards: the backward has twice as many matmuls."""
_MEASURED_AT_ONCE = 16
"""Maximum number of subsets between two writes of the results, which an interruption loses."""


Evaluations = dict[frozenset[Head], Measurement]
"""By the heads that are kept, a measurement of that subset alone, whose statistics are `[examples, k]`; subsets that
were measured together share their cost equally."""


class ModelSubsetEvaluator:
    """`SubsetEvaluator` of one model and its rows.

    `evaluate_without` records the activations of `kept`, and `evaluate` those of a new subset, so that later subsets
    run from their first difference.

    Args:
        data: metrics are computed on its evaluation rows, sensitivity on its training rows.
        mixed_precision: precision of matmuls in evaluations; sensitivity is measured in float32.
        make_measurer: makes what measures the subsets, from the arguments of `SubsetMeasurer`.
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
        make_measurer: Callable[..., Measurer] = SubsetMeasurer,
    ) -> None:
        self.heads = self._all_heads = all_heads(sites)
        self.always_kept: frozenset[Head] = frozenset()
        self.forwards = 0.0
        self._model, self._sites, self._data, self._batch_size = model, sites, data, batch_size
        self._measurer = make_measurer(model, sites, data.task, data.eval, batch_size, mixed_precision)
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
        """Use the evaluations in a file, which need not exist, and store new ones there; see `EvaluationStore`.

        An interrupted search resumes from the file, and searches on the same model and rows can share it. The cost of a
        subset counts for every search that evaluates it, even if another measured it.
        """
        rows = len(self._data.eval)
        self._store = EvaluationStore(path, self._all_heads, rows, seconds=seconds, write_share=write_share)
        self._evaluations.update(self._store.load())

    @contextlib.contextmanager
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
        labelled = (tensors_of(task.loss_inputs(batch)) for _, batch in batches(task, drawn, self._batch_size))
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
            {subset: Measurement(array, cost) for subset, array in zip(missing, statistics, strict=True)}
        )
        if self._store is not None:
            self._store.exchange(self._evaluations)


class EvaluationStore:
    """Evaluations in an `.npz` file, which is written at intervals, longer ones if a write takes long.

    Args:
        write_share: minimum time between two writes, as a multiple of the time that a write takes.
    """

    def __init__(
        self, path: Path, heads: tuple[Head, ...], rows: int, *, seconds: float = 30.0, write_share: float = 20.0
    ) -> None:
        self._path, self._heads, self._rows = path, heads, rows
        self._seconds, self._write_share = seconds, write_share
        self._next_write = time.monotonic() + seconds

    def load(self) -> Evaluations:
        """The evaluations in the file; empty if it is missing, damaged, or of other heads or rows."""
        with (
            contextlib.suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile),
            np.load(self._path) as file,
        ):
            kept, statistics, forwards = file["kept"], file["statistics"], file["forwards"]
            fits = kept.shape[1:] == (len(self._heads),) and statistics.shape[1:2] == (self._rows,)
            if fits and len(kept) == len(statistics) == len(forwards):
                subsets = (frozenset(itertools.compress(self._heads, mask)) for mask in kept)
                return dict(zip(subsets, map(Measurement, statistics, forwards.tolist()), strict=True))
        return {}

    def exchange(self, evaluations: Evaluations) -> None:
        """If the interval has passed, add evaluations that other processes wrote to `evaluations`, and write all."""
        if time.monotonic() >= self._next_write:
            self.write(evaluations)

    def write(self, evaluations: Evaluations) -> None:
        """Add evaluations that other processes wrote to `evaluations`, and write all; nothing if there are none."""
        start = time.monotonic()
        evaluations.update(self.load())
        if not evaluations:
            return
        kept = np.array([[head in subset for head in self._heads] for subset in evaluations])
        statistics, forwards = zip(*evaluations.values(), strict=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(self._path) as partial, partial.open("wb") as file:
            np.savez(file, kept=kept, statistics=np.stack(statistics), forwards=np.array(forwards))
        now = time.monotonic()
        self._next_write = now + max(self._seconds, self._write_share * (now - start))


EvaluatorFactory = Callable[..., ModelSubsetEvaluator]
"""Called with the arguments of `ModelSubsetEvaluator` up to `mixed_precision`."""


def sensitivity(
    model: PreTrainedModel, sites: Sequence[Site], mask: Tensor, batches: Iterable[Mapping[str, Tensor]]
) -> Tensor:
    """I_h `[heads]`, float64: the mean over examples of |dL(x)/dgate_h|, the absolute value taken per example.

    By the chain rule dL/dgate_h = Att_h(x) . dL/dAtt_h(x), summed over the positions of the example, over its rows
    where the model reads several (both texts of a pair), and over the calls of a site that one forward calls several
    times. One gate per example and head lets autograd compute the sum.

    Args:
        mask: `[heads]`, bool: the heads that are kept; the others are zero in the forward and in the result.
        batches: collated batches with the model's labels (`Task.loss_inputs`). A batch without `labels` has one label
            per row under another name.
    """
    total = torch.zeros(mask.shape, dtype=torch.float64)
    examples = 0
    gates: dict[str, Tensor] = {}
    is_shifted = _shifts_labels(model)

    def apply(name: str, out: Tensor) -> Tensor:
        return out * spread_over_rows(gates[name], len(out)).to(out.dtype)

    with evaluating(model), hooked(model, apply, sites=sites):
        for batch in batches:
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
            rows = len(inputs["labels"]) if "labels" in inputs else len(next(iter(inputs.values())))
            gate = mask.to(model.device, torch.float32).repeat(rows, 1).requires_grad_()
            parts = torch.split(gate, [site.heads for site in sites], dim=1)
            gates.update({site.name: part for site, part in zip(sites, parts, strict=True)})
            loss = model(**inputs).loss
            (gradient,) = torch.autograd.grad(loss, gate)
            factor = _loss_factor(inputs["labels"], is_shifted=is_shifted) if "labels" in inputs else rows
            total += (gradient.abs() * factor).double().sum(0).cpu()
            examples += rows
    return torch.where(mask, total / max(examples, 1), 0.0)


def _shifts_labels(model: PreTrainedModel) -> bool:
    """Whether the loss compares the output of a position with the label of the next: that of causal language models.

    transformers uses it for classes without a loss of their own too. Encoder-decoders shift their inputs instead.
    """
    causal = LOSS_MAPPING["ForCausalLM"]
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM", causal)
    return loss is causal and not model.config.is_encoder_decoder


def _loss_factor(labels: Tensor, *, is_shifted: bool) -> Tensor:
    """Factor `[examples, 1]` that converts a gradient of the batch's loss to one of each example's own loss.

    The loss of the batch is the mean over all its labels, the loss of an example the mean over its own labels. With one
    label per example the factor is the number of examples; with one label per token it differs between examples. Where
    labels are shifted by one (`is_shifted`), the first has no loss.
    """
    if labels.dim() < 2 or labels.is_floating_point():
        return labels.new_full((len(labels), 1), len(labels), dtype=torch.float32)
    counted = (labels[:, int(is_shifted) :] != IGNORED).sum(1, keepdim=True).float()
    return torch.where(counted > 0, counted.sum() / counted.clamp(min=1.0), 0.0)
