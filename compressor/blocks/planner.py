"""Which sites are worth a mask where the model will run: each form of each site's attention, timed there in turn.

1. whole: the runtime's fused attention without a mask.
2. masked: the same with the mask as a bias; nothing is skipped.
3. block-sparse: the blocks that the mask keeps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from compressor.measure.timing import settle
from compressor.recipe import Recipe
from compressor.report.schema import SiteBlocks
from compressor.targets import session as sessions
from compressor.targets.base import Feeds
from graph_passes import BlockMask, Plan, SitePlan, save
from graph_passes.block_sparse import block_sparse_attention, call

PAYS = 1.1
"""A site is masked where block-sparse attention is at least so many times as fast as whole attention."""
_SECONDS = 0.15
"""About how long each form is timed at one length."""
_CALLS = 5
"""Calls of a form at a time."""


@dataclass(frozen=True)
class SiteTimes:
    """One site's forms at one length.

    Attributes:
        length: positions of queries and of keys.
        milliseconds: median time of a call by form; without `block-sparse` where the mask is of single entries.
    """

    length: int
    milliseconds: Mapping[str, float]

    @property
    def gain(self) -> float:
        """Whole over block-sparse, zero where there is none."""
        sparse = self.milliseconds.get("block-sparse")
        return self.milliseconds["whole"] / sparse if sparse else 0.0


class Planner:
    """Times the forms of sites on this machine, as the recipe's engine will run.

    Args:
        recipe: provider, threads, and whether every site is masked whatever it costs.
        lengths: to time.
    """

    def __init__(self, recipe: Recipe, lengths: Sequence[int]) -> None:
        self.recipe, self.lengths = recipe, tuple(sorted(set(lengths)))
        provider = sessions.choose(recipe.provider, recipe.precision)
        self._session = sessions.describe(provider, recipe.threads)
        self._times: dict[str, tuple[SiteTimes, ...]] = {}

    def times(self, site: SitePlan, mask: BlockMask) -> tuple[SiteTimes, ...]:
        """The forms of a site with the heads that it keeps, at every length."""
        if site.name not in self._times:
            kept = BlockMask(mask.kept[list(site.kept)], mask.block, mask.memory)
            self._times[site.name] = tuple(self._timed(site, kept, length) for length in self.lengths)
        return self._times[site.name]

    def __call__(self, plan: Plan, masks: Mapping[str, BlockMask]) -> tuple[dict[str, BlockMask], tuple[str, ...]]:
        """Before the model learns with its masks: those that pay, and what a reader must know of the choice.

        A mask pays where block-sparse attention is `PAYS` times as fast at the longest length and not slower at any.
        """
        if self.recipe.everywhere or self.recipe.block_size == 1:
            return dict(masks), ()
        chosen, whole = {}, []
        for site in plan.sites:
            if site.name not in masks:
                continue
            times = self.times(site, masks[site.name])
            if times[-1].gain >= PAYS and all(time.gain >= 1.0 for time in times):
                chosen[site.name] = masks[site.name]
            else:
                whole.append(f"{site.name} ({times[-1].gain:.2f} times as fast at length {times[-1].length})")
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
                times = self.times(site, plan.masks[site.name])[-1].milliseconds
                if times.get("block-sparse", np.inf) < times["masked"]:
                    found.add(site.name)
        return frozenset(found)

    def told(
        self, plan: Plan, asked: Collection[str], lowered: Collection[str], dense: Mapping[str, str]
    ) -> tuple[SiteBlocks, ...]:
        """What became of the blocks of each site that was asked for or has a mask.

        Args:
            plan: with the masks that the model learned with.
            asked: sites whose kind was to lose blocks.
            lowered: sites that are block-sparse in the graph.
            dense: site -> why it could not be made block-sparse.
        """
        found = []
        for site in plan.sites:
            mask = plan.masks.get(site.name)
            if (site.name not in asked and mask is None) or not site.kept:
                continue
            times = self._times.get(site.name, ())
            form, why = self._form(site, mask, lowered, dense)
            share = 1.0 if mask is None else _share(mask, site)
            found.append(
                SiteBlocks(
                    site=site.name,
                    kind=site.kind,
                    block=self.recipe.block_size if mask is None else mask.block,
                    share=share,
                    form=form,
                    why=why,
                    milliseconds={time.length: dict(time.milliseconds) for time in times},
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

    def _timed(self, site: SitePlan, mask: BlockMask, length: int) -> SiteTimes:
        heads, width = len(site.kept), len(site.kept) * site.head_dim
        draw = np.random.default_rng(0)
        shape = (1, length, width)
        feeds = {name: draw.standard_normal(shape, dtype=np.float32) for name in ("query", "key", "value")}
        allowed = mask.entries(length, length, memory=0)
        if site.kind == "decoder":
            allowed = allowed & np.tri(length, dtype=np.bool_)
        feeds["bias"] = np.where(allowed, 0.0, np.finfo(np.float32).min).astype(np.float32)[None]
        feeds["row"] = np.zeros((1, 1, 1, length), np.float32)
        forms = {"whole": _dense(site, heads, masked=False), "masked": _dense(site, heads, masked=True)}
        if mask.block > 1:
            forms["block-sparse"] = _sparse(site, mask)
        with tempfile.TemporaryDirectory() as folder:
            opened = {}
            for form, model in forms.items():
                save(model, Path(folder) / f"{form}.onnx")
                opened[form] = sessions.open_session(Path(folder) / f"{form}.onnx", self._session)
            return SiteTimes(length, _medians(opened, feeds))


def _share(mask: BlockMask, site: SitePlan) -> float:
    """Share of the kept heads' blocks that the mask keeps; of causal attention, of those that are not the future's."""
    kept = mask.kept[list(site.kept)]
    if site.kind != "decoder":
        return float(kept.mean())
    rows, columns = (np.arange(size) * mask.block for size in kept.shape[1:])
    past = columns[None, :] - mask.memory < rows[:, None] + mask.block
    return float(kept[:, past].mean())


def _medians(opened: Mapping[str, object], feeds: Feeds) -> dict[str, float]:
    """Median milliseconds of a call, the forms timed in turn, a few calls each."""
    found: dict[str, list[float]] = {form: [] for form in opened}
    began = time.perf_counter()
    while min(map(len, found.values())) < _CALLS or time.perf_counter() - began < _SECONDS * len(opened):
        for form, session in opened.items():
            settle()
            sessions.run(session, feeds)
            for _ in range(_CALLS):
                start = time.perf_counter()
                sessions.run(session, feeds)
                found[form].append(1e3 * (time.perf_counter() - start))
    return {form: float(np.median(times)) for form, times in found.items()}


def _inputs(site: SitePlan, heads: int, *others: tuple[str, tuple[int | str, ...]]) -> list[ir.Value]:
    states = [(name, (1, "length", heads * site.head_dim)) for name in ("query", "key", "value")]
    return [
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, shape in (*states, *others)
    ]


def _dense(site: SitePlan, heads: int, *, masked: bool) -> ir.Model:
    bias = [("bias", (1, heads, "length", "length"))] if masked else []
    inputs = _inputs(site, heads, *bias)
    attributes = {"num_heads": heads, "unidirectional": int(site.kind == "decoder" and not masked)}
    # Inputs 3 and 4 are a bias of the projections and a padding mask.
    given = [*inputs[:3], None, None, inputs[3]] if masked else inputs[:3]
    node = ir.node("MultiHeadAttention", given, attributes, domain="com.microsoft")
    return _model(inputs, [node], [])


def _sparse(site: SitePlan, mask: BlockMask) -> ir.Model:
    heads, dim = len(site.kept), site.head_dim
    inputs = _inputs(site, heads, ("row", (1, 1, 1, "length")))
    causal = site.kind == "decoder" and not mask.memory
    function = block_sparse_attention(mask, dim, dim, scale=dim**-0.5, causal=causal, row=True)
    shape = ir.Value(name="shape", const_value=ir.tensor(np.array([0, 0, heads, dim]), name="shape"))
    kept = ir.Value(name="block_mask", const_value=ir.tensor(mask.kept, name="block_mask"))
    apart = [ir.node("Reshape", [value, shape]) for value in inputs[:3]]
    node = call(function, [*(split.outputs[0] for split in apart), kept, inputs[3]])
    model = _model(inputs, [*apart, node], [shape, kept])
    model.functions[function.identifier()] = function
    return model


def _model(inputs: list[ir.Value], nodes: list[ir.Node], constants: list[ir.Value]) -> ir.Model:
    output = nodes[-1].outputs[0]
    output.name, output.type = "output", ir.TensorType(ir.DataType.FLOAT)
    opsets = {"": 18, "com.microsoft": 1, "compressor": 1}
    graph = ir.Graph(inputs, [output], nodes=nodes, initializers=constants, opset_imports=opsets, name="attention")
    return ir.Model(graph, ir_version=10)
