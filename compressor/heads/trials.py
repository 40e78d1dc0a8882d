"""The frozen model behind a search: subsets are evaluated through the hook, counted, and remembered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.heads.search import Head
from compressor.heads.sensitivity import sensitivity
from compressor.sites import Site, hooked
from compressor.tasks.base import Data
from compressor.tasks.evaluate import batches, statistics


class ModelTrials:
    """`Trials` over one model and its data.

    Args:
        model: not changed.
        sites: its sites.
        data: metrics are taken on its evaluation rows, sensitivity on its training rows.
        batch_size: rows a batch.
        rows: training rows that sensitivity is averaged over, at most.
        seed: draws those rows.
    """

    def __init__(
        self, model: PreTrainedModel, sites: Sequence[Site], data: Data, batch_size: int, rows: int, seed: int
    ) -> None:
        self.heads: tuple[Head, ...] = tuple((site.name, head) for site in sites for head in range(site.heads))
        self.count = 0
        self._model, self._sites, self._data, self._batch_size = model, sites, data, batch_size
        self._metrics: dict[frozenset[Head], float] = {}
        drawn = np.random.default_rng(seed).permutation(len(data.train))[:rows]
        self._train = data.train.select(sorted(drawn.tolist()))

    def evaluate(self, kept: frozenset[Head]) -> float:
        if kept not in self._metrics:
            self.count += 1
            self._metrics[kept] = self._measure(kept)
        return self._metrics[kept]

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return [self.evaluate(kept) for kept in subsets]

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        rows = (batch for _, batch in batches(self._data.task, self._train, self._batch_size))
        found = sensitivity(self._model, self._sites, self._mask(kept), rows)
        return dict(zip(self.heads, found.tolist(), strict=True))

    def _mask(self, kept: frozenset[Head]) -> Tensor:
        return torch.tensor([head in kept for head in self.heads], dtype=torch.bool)

    def _measure(self, kept: frozenset[Head]) -> float:
        model = self._model
        parts = torch.split(self._mask(kept).float().to(model.device), [site.heads for site in self._sites])
        gates = {site.name: part[:, None] for site, part in zip(self._sites, parts, strict=True)}

        def forward(batch: dict[str, Tensor]) -> np.ndarray:
            return model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).logits.cpu().numpy()

        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), hooked(model, lambda name, out: out * gates[name].to(out.dtype)):
                found = statistics(self._data.task, self._data.eval, forward, self._batch_size)
        finally:
            model.train(was_training)
        metric = self._data.task.score(found)
        return metric if self._data.task.higher_is_better else -metric
