"""Which sites are worth a mask where the model will run: each form of each site's attention, timed there in turn.

1. whole: the runtime's fused attention without a mask.
2. masked: the same with the mask as a bias; nothing is skipped.
3. block-sparse: the blocks that the mask keeps.

All three read what the site reads: memory, persistent vectors, what is added to its scores, in the engine's numbers.
Grouped key/value heads reach each of them repeated, as they do in the graph.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.measure.timing import settle
from compressor.recipe import Recipe
from compressor.report.schema import SiteBlocks
from compressor.sites.hook import Call, intercepted
from compressor.targets import session as sessions
from compressor.targets.base import Feeds
from graph_passes import BlockMask, Plan, SitePlan, save
from graph_passes.block_sparse import block_sparse_attention, call

PAYS = 1.1
"""A site is masked where block-sparse attention is at least so many times as fast as whole attention."""
_SHARES = (0.5, 0.75, 1.0)
"""Of the longest row: lengths that are timed whatever is asked for, for rows may be shorter than those."""
_SECONDS = 0.15
"""About how long each form is timed at one length."""
_CALLS = 5
"""Calls of a form at a time, fewer of one that takes long."""
_TYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}


@dataclass(frozen=True)
class Beside:
    """What a site's attention reads beside positions, padding and causality, whatever its form.

    Attributes:
        persistent: last keys, which every query sees.
        bias: heads of what is added to the score of each pair, 1 or all; 0: nothing is.
    """

    persistent: int = 0
    bias: int = 0


def look_beside(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Beside]:
    """The same of every site, by one dry forward on `inputs`."""
    found: dict[str, Beside] = {}

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        bias = max(_bias(call.mask), _bias(call.options.get("position_bias")))
        found[call.site] = Beside(getattr(call.module, "persistent", 0), bias)
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


class Planner:
    """Times the forms of sites on this machine, as the recipe's engine will run.

    Args:
        recipe: batch sizes, provider, precision, threads, and whether every site is masked whatever it costs.
        lengths: to time, beside some up to the longest row.
        longest: positions of the longest row; None: the longest of `lengths`.
        beside: what sites read beside positions.
    """

    def __init__(
        self,
        recipe: Recipe,
        lengths: Sequence[int],
        longest: int | None = None,
        beside: Mapping[str, Beside] | None = None,
    ) -> None:
        self.recipe, self.longest, self.beside = recipe, longest or max(lengths, default=1), beside or {}
        self.lengths = tuple(sorted({*lengths, *(max(1, round(share * self.longest)) for share in _SHARES)}))
        self._dtype = _TYPES.get(recipe.precision, ir.DataType.FLOAT)
        provider = sessions.choose(recipe.provider, recipe.precision)
        self._session = sessions.describe(provider, recipe.threads)
        self._times: dict[str, tuple[SiteTimes, ...]] = {}

    def times(self, site: SitePlan, mask: BlockMask) -> tuple[SiteTimes, ...]:
        """The forms of a site with the heads that it keeps, at every length and batch size."""
        if site.name not in self._times:
            kept = BlockMask(mask.kept[list(site.kept)], mask.block, mask.memory)
            sizes = itertools.product(self.lengths, self.recipe.batch)
            self._times[site.name] = tuple(self._timed(site, kept, *size) for size in sizes)
        return self._times[site.name]

    @property
    def timed(self) -> dict[str, list[dict[str, Any]]]:
        """All that was timed, as JSON."""
        return {site: [asdict(time) for time in times] for site, times in self._times.items()}

    def recall(self, planned: Path) -> None:
        """Take over what an interrupted run timed, from the file of `learn_blocks`, where there is one."""
        if planned.is_file():
            for site, times in json.loads(planned.read_text(encoding="utf-8"))["times"].items():
                self._times.setdefault(site, tuple(SiteTimes(**time) for time in times))

    def _longest(self, times: Sequence[SiteTimes]) -> list[SiteTimes]:
        """Those at the longest length, in the order of the recipe's batch sizes."""
        return [time for time in times if time.length == max(each.length for each in times)]

    def __call__(self, plan: Plan, masks: Mapping[str, BlockMask]) -> tuple[dict[str, BlockMask], tuple[str, ...]]:
        """Before the model learns with its masks: those that pay, and what a reader must know of the choice.

        A mask pays where block-sparse attention is `PAYS` times as fast at the longest length, and not slower at any
        other.
        """
        if self.recipe.everywhere or self.recipe.block_size == 1:
            return dict(masks), ()
        chosen, whole = {}, []
        for site in plan.sites:
            if site.name not in masks:
                continue
            times = self.times(site, masks[site.name])
            most = self._longest(times)
            lacking = [time for time in times if time.gain < (PAYS if time in most else 1.0)]
            if not lacking:
                chosen[site.name] = masks[site.name]
            else:
                least = min(lacking, key=lambda time: time.gain)
                size = f"length {least.length}" + (f", batch {least.batch}" if least.batch > 1 else "")
                whole.append(f"{site.name} ({least.gain:.2f} times as fast at {size})")
        if not whole:
            return chosen, ()
        listed = ", ".join(whole[:3]) + (", ..." if len(whole) > 3 else "")
        return chosen, (
            f"{len(whole)} of {len(masks)} sites keep every block: block-sparse attention would not pay there on this"
            f" machine: {listed}; --everywhere masks them all the same",
        )

    def lowered(self, plan: Plan) -> frozenset[str]:
        """Of a plan whose masks stay: the sites where block-sparse attention is faster than a mask as a bias."""
        found = set()
        for site in plan.sites:
            if site.name in plan.masks and site.kept:
                times = self._longest(self.times(site, plan.masks[site.name]))[0].milliseconds
                if times.get("block-sparse", np.inf) < times["masked"]:
                    found.add(site.name)
        return frozenset(found)

    def told(
        self,
        plan: Plan,
        asked: Collection[str],
        lowered: Collection[str],
        dense: Mapping[str, str],
        unprojected: Mapping[str, int] | None = None,
    ) -> tuple[SiteBlocks, ...]:
        """What became of the blocks of each site that was asked for or has a mask.

        Args:
            plan: with the masks that the model learned with.
            asked: sites whose kind was to lose blocks.
            lowered: sites that are block-sparse in the graph.
            dense: site -> why it could not be made block-sparse.
            unprojected: site -> key blocks whose keys and values are not projected.
        """
        found = []
        for site in plan.sites:
            mask = plan.masks.get(site.name)
            if (site.name not in asked and mask is None) or not site.kept:
                continue
            times = self._times.get(site.name, ())
            form, why = self._form(site, mask, lowered, dense)
            unused = (unprojected or {}).get(site.name, 0)
            if unused:
                why += f"; {unused} key blocks, which no query looks at, are not projected"
            share = 1.0 if mask is None else _share(mask, site, self.longest)
            found.append(
                SiteBlocks(
                    site=site.name,
                    kind=site.kind,
                    block=self.recipe.block_size if mask is None else mask.block,
                    share=share,
                    form=form,
                    why=why,
                    unprojected=unused,
                    milliseconds={
                        time.length: dict(time.milliseconds) for time in times if time.batch == times[0].batch
                    },
                )
            )
        return tuple(found)

    def _form(
        self, site: SitePlan, mask: BlockMask | None, lowered: Collection[str], dense: Mapping[str, str]
    ) -> tuple[Literal["whole", "masked", "block-sparse"], str]:
        if mask is None:
            slow = f"block-sparse attention is not {PAYS:g} times as fast at the longest length, or slower at one"
            return "whole", slow
        if site.name in lowered:
            return "block-sparse", "faster here than the mask as a bias"
        if mask.block == 1:
            return "masked", "of single entries nothing can be skipped"
        return "masked", dense.get(site.name, "the mask as a bias is faster here than block-sparse attention")

    def _timed(self, site: SitePlan, mask: BlockMask, length: int, batch: int) -> SiteTimes:
        dtype, what = self._dtype.numpy(), self.beside.get(site.name, Beside())
        heads, dim, keys = len(site.kept), site.head_dim, length + mask.memory
        draw = np.random.default_rng(0)
        sizes = {"query": length, "key": keys + what.persistent, "value": keys + what.persistent}
        feeds = {
            name: draw.standard_normal((batch, size, heads * dim), dtype=np.float32).astype(dtype)
            for name, size in sizes.items()
        }
        causal = site.kind == "decoder"
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
            "whole": _dense(site, "full" if full else None, full, causal=causal and not told, dtype=self._dtype),
        }
        if batch == self.recipe.batch[0]:  # at no larger one, for it holds every pair of every row at once
            feeds["bias"] = np.where(allowed, 0.0, lowest).astype(dtype)[None]
            forms["masked"] = _dense(site, "bias", heads, causal=False, dtype=self._dtype)
        if mask.block > 1:
            forms["block-sparse"] = _sparse(
                site, mask, what.persistent, full, causal=causal and not told, dtype=self._dtype
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


def _share(mask: BlockMask, site: SitePlan, length: int) -> float:
    """Share of the kept heads' blocks that the mask keeps over rows of a length; of causal attention, of those that are
    not the future's."""
    rows, columns = -(-length // mask.block), -(-(length + mask.memory) // mask.block)
    kept = mask.kept[list(site.kept), :rows, :columns]
    if site.kind != "decoder":
        return float(kept.mean())
    row, column = (np.arange(size) * mask.block for size in kept.shape[1:])
    past = column[None, :] - mask.memory < row[:, None] + mask.block
    return float(kept[:, past].mean())


def _medians(opened: Mapping[str, object], feeds: Feeds) -> dict[str, float]:
    """Median milliseconds of a call, the forms timed in turn, a few calls each."""
    found: dict[str, list[float]] = {form: [] for form in opened}
    began = time.perf_counter()
    while min(map(len, found.values())) < _CALLS or time.perf_counter() - began < _SECONDS * len(opened):
        for form, session in opened.items():
            settle()
            sessions.run(session, feeds)
            turn = time.perf_counter()
            for _ in range(_CALLS):
                start = time.perf_counter()
                sessions.run(session, feeds)
                found[form].append(1e3 * (time.perf_counter() - start))
                if time.perf_counter() - turn > _SECONDS:
                    break
    return {form: float(np.median(times)) for form, times in found.items()}


def _inputs(site: SitePlan, dtype: ir.DataType, *others: tuple[str, tuple[int | str, ...]]) -> list[ir.Value]:
    width = len(site.kept) * site.head_dim
    states = [("query", ("batch", "length", width)), *((name, ("batch", "keys", width)) for name in ("key", "value"))]
    return [ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype)) for name, shape in (*states, *others)]


def _dense(site: SitePlan, bias: str | None, biased: int, *, causal: bool, dtype: ir.DataType) -> ir.Model:
    """Fused attention of every pair, and what is added to its scores."""
    inputs = _inputs(site, dtype, *([(bias, (1, biased, "length", "keys"))] if bias else []))
    attributes = {"num_heads": len(site.kept), "unidirectional": int(causal)}
    # Inputs 3 and 4 are a bias of the projections and a padding mask.
    given = [*inputs[:3], None, None, inputs[3]] if bias else inputs[:3]
    node = ir.node("MultiHeadAttention", given, attributes, domain="com.microsoft")
    return _model(inputs, [node], [])


def _sparse(
    site: SitePlan, mask: BlockMask, persistent: int, full: int, *, causal: bool, dtype: ir.DataType
) -> ir.Model:
    heads, dim = len(site.kept), site.head_dim
    pairs: list[tuple[str, tuple[int | str, ...]]] = [("full", (1, full, "length", "keys"))] if full else []
    inputs = _inputs(site, dtype, ("row", (1, 1, 1, "keys")), *pairs)
    function = block_sparse_attention(
        mask, dim, dim, scale=dim**-0.5, causal=causal, row=True, full=full, persistent=persistent, dtype=dtype
    )
    shape = ir.Value(name="shape", const_value=ir.tensor(np.array([0, 0, heads, dim]), name="shape"))
    kept = ir.Value(name="block_mask", const_value=ir.tensor(mask.kept, name="block_mask"))
    apart = [ir.node("Reshape", [value, shape]) for value in inputs[:3]]
    node = call(function, [*(split.outputs[0] for split in apart), kept, *inputs[3:]])
    model = _model(inputs, [*apart, node], [shape, kept])
    model.functions[function.identifier()] = function
    return model


def _model(inputs: list[ir.Value], nodes: list[ir.Node], constants: list[ir.Value]) -> ir.Model:
    output = nodes[-1].outputs[0]
    output.name, output.type = "output", inputs[0].type
    opsets = {"": 18, "com.microsoft": 1, "compressor": 1}
    graph = ir.Graph(inputs, [output], nodes=nodes, initializers=constants, opset_imports=opsets, name="attention")
    return ir.Model(graph, ir_version=10)
