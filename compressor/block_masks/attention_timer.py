"""The forms of one site's attention, timed in turn where the model will run.

1. whole: the runtime's fused attention without a mask.
2. masked: the same with the mask as a bias; nothing is skipped.
3. block-sparse: the blocks that the mask keeps.

All three read what the site reads: memory, persistent vectors, what is added to its scores, in the engine's numbers.
Grouped key/value heads reach each of them repeated, as they do in the graph.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.block_masks.attention_graphs import dense, sparse
from compressor.config.run import Recipe
from compressor.measure.timing import wait_until_idle
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime import ort_session as sessions
from compressor.units.hook import Call, intercepted
from graph_passes import BlockMask, SitePlan, save

_SECONDS = 0.15
"""About how long each form is timed at one length."""
_CALLS = 5
"""Calls of a form at a time, fewer of one that takes long."""
_TYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}


@dataclass(frozen=True)
class AttentionExtras:
    """What a site's attention reads beside positions, padding and causality, whatever its form.

    Attributes:
        persistent: last keys, which every query sees.
        bias: heads of what is added to the score of each pair, 1 or all; 0: nothing is.
    """

    persistent: int = 0
    bias: int = 0


def find_attention_extras(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, AttentionExtras]:
    """The same of every site, by one dry forward on `inputs`."""
    found: dict[str, AttentionExtras] = {}

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        bias = max(_bias(call.mask), _bias(call.options.get("position_bias")))
        found[call.site] = AttentionExtras(getattr(call.module, "persistent", 0), bias)
        return call.run()

    training = model.training
    try:
        model.eval()
        with torch.no_grad(), intercepted(model, on_call, None):
            model(**inputs)
    finally:
        model.train(training)
    return found


def _bias(mask: Tensor | None) -> int:
    """Heads of a mask `[batch, head, query, key]` that does more than hide; 0 of any other."""
    if mask is None or mask.dtype == torch.bool:
        return 0
    seen = mask[mask > torch.finfo(mask.dtype).min / 2]
    return int(mask.shape[1]) if bool(seen.any()) else 0


@dataclass(frozen=True)
class SiteTimes:
    """One site's forms at one size.

    Attributes:
        length: positions of queries, and of keys beside a memory.
        milliseconds: median time of a call by form; without `block-sparse` where the mask is of single entries, with
            `masked` at the first batch size alone.
        batch: rows.
    """

    length: int
    milliseconds: Mapping[str, float]
    batch: int = 1

    @property
    def gain(self) -> float:
        """Whole over block-sparse, zero where there is none."""
        sparse = self.milliseconds.get("block-sparse")
        return self.milliseconds["whole"] / sparse if sparse else 0.0


class AttentionTimer:
    """Times the forms as a recipe's engine will run.

    Args:
        recipe: provider, precision, threads and kernel.
        beside: what sites read beside positions.
    """

    def __init__(self, recipe: Recipe, beside: Mapping[str, AttentionExtras]) -> None:
        self._beside, self._dtype = beside, _TYPES.get(recipe.engine.precision, ir.DataType.FLOAT)
        provider = sessions.choose(recipe.engine.provider, recipe.engine.precision, recipe.engine.kernel)
        self._session = sessions.describe(provider, recipe.engine.threads, recipe.engine.kernel)

    def times(self, site: SitePlan, mask: BlockMask, length: int, batch: int, *, masked: bool) -> SiteTimes:
        """Time every form.

        Args:
            site: with the heads that it keeps.
            mask: of those heads.
            length: positions of queries, and of keys beside a memory.
            batch: rows.
            masked: whether the mask as a bias is among the forms: it holds every pair of every row at once.
        """
        dtype, what = self._dtype.numpy(), self._beside.get(site.name, AttentionExtras())
        heads, dim, keys = len(site.kept), site.head_dim, length + mask.memory
        draw = np.random.default_rng(0)
        sizes = {"query": length, "key": keys + what.persistent, "value": keys + what.persistent}
        feeds = {
            name: draw.standard_normal((batch, size, heads * dim), dtype=np.float32).astype(dtype)
            for name, size in sizes.items()
        }
        causal = site.kind == "causal"
        allowed = mask.entries(length, keys, memory=mask.memory)
        past = np.tri(length, keys, mask.memory, dtype=np.bool_) if causal else np.ones((length, keys), np.bool_)
        allowed, past = (_seen(pairs, what.persistent) for pairs in (allowed & past, past[None]))
        # Of causality over a memory, or beside a bias, the family's own mask of pairs tells.
        told = causal and bool(mask.memory or what.persistent or what.bias)
        full = min(heads, what.bias or int(told))
        lowest = np.finfo(dtype).min / 2
        feeds["row"] = np.zeros((1, 1, 1, keys + what.persistent), dtype)
        if full:
            feeds["full"] = np.broadcast_to(np.where(past, 0.0, lowest), (1, full, *past.shape[1:])).astype(dtype)
        forms = {
            "whole": dense(heads, dim, "full" if full else None, full, causal=causal and not told, dtype=self._dtype),
        }
        if masked:
            feeds["bias"] = np.where(allowed, 0.0, lowest).astype(dtype)[None]
            forms["masked"] = dense(heads, dim, "bias", heads, dtype=self._dtype)
        if mask.block > 1:
            forms["block-sparse"] = sparse(
                mask,
                dim,
                row=True,
                full=full,
                persistent=what.persistent,
                causal=causal and not told,
                dtype=self._dtype,
            )
        with tempfile.TemporaryDirectory() as folder:
            opened = {}
            for form, model in forms.items():
                save(model, Path(folder) / f"{form}.onnx")
                opened[form] = sessions.open_session(Path(folder) / f"{form}.onnx", self._session)
            return SiteTimes(length, _medians(opened, feeds), batch)


def _seen(pairs: np.ndarray, persistent: int) -> np.ndarray:
    """Bool `[head, query, key]` with the last keys that every query sees."""
    return np.pad(pairs, ((0, 0), (0, 0), (0, persistent)), constant_values=True)


def _medians(opened: Mapping[str, object], feeds: Feeds) -> dict[str, float]:
    """Median milliseconds of a call, the forms timed in turn, a few calls each."""
    found: dict[str, list[float]] = {form: [] for form in opened}
    began = time.perf_counter()
    while min(map(len, found.values())) < _CALLS or time.perf_counter() - began < _SECONDS * len(opened):
        for form, session in opened.items():
            wait_until_idle()
            sessions.run(session, feeds)
            turn = time.perf_counter()
            for _ in range(_CALLS):
                start = time.perf_counter()
                sessions.run(session, feeds)
                found[form].append(1e3 * (time.perf_counter() - start))
                if time.perf_counter() - turn > _SECONDS:
                    break
    return {form: float(np.median(times)) for form, times in found.items()}
