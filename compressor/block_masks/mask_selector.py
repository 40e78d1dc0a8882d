"""Select the sites that are faster with a mask on this machine, by the times of the forms of their attention.

An engine can compute the masked attention of a site in three forms:

1. whole: the runtime's fused attention without a mask.
2. masked: the same with the mask as a bias; nothing is skipped.
3. block-sparse: only the blocks that the mask keeps.

Every form has the inputs of the site (memory, persistent vectors and biases of the scores) in the precision of the
engine. Grouped key/value heads are repeated, as in the graph.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.config.run import Recipe
from compressor.config.steps import Blocks
from compressor.measure.timing import median_times
from compressor.results import Note, NoteCode, SiteBlocks
from compressor.store import Json, Store
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime import ort_session
from compressor.units.find import evaluating
from compressor.units.hook import Call, intercepted
from graph_passes import BlockMask, Plan, SitePlan, save
from graph_passes.block_sparse.function import block_sparse_attention, call
from graph_passes.block_sparse.spec import AttentionSpec

MIN_GAIN = 1.1
"""A site is masked if block-sparse attention is at least this many times as fast as whole attention."""
_LENGTH_SHARES = (0.5, 0.75, 1.0)
"""Lengths that are always timed, as shares of the longest row: rows may be shorter than the requested lengths."""
_BLOCK_SIZE: int = Blocks.model_fields["block_size"].default
_LISTED = 3
"""Maximum number of sites that a note names."""
Form = Literal["whole", "masked", "block-sparse"]
MASKS = "masks"
"""Name of the selected masks in the store of a step."""
WHOLE, MASKED, BLOCK_SPARSE = "whole", "masked", "block-sparse"
FORM_SECONDS = 0.15
"""Approximate time in seconds for each form at one length."""
_TYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}
Measure = Callable[[Mapping[str, Any], Feeds], dict[str, float]]
"""Returns milliseconds of each form, from the session of each form and the inputs of a call."""
Shape = tuple[int | str, ...]
"""Shape of an input; names are dynamic axes."""


@dataclass(frozen=True)
class AttentionExtras:
    """Inputs of a site's attention besides positions, padding and causality.

    Attributes:
        persistent: number of keys at the end that every query attends to.
        bias: number of heads of a bias that is added to the scores, 1 or all; 0: no bias.
    """

    persistent: int = 0
    bias: int = 0


def find_attention_extras(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, AttentionExtras]:
    """The extra inputs of each site, from one forward with these arguments; the model is restored afterwards."""
    extras: dict[str, AttentionExtras] = {}

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        bias = max(_bias_heads(call.mask), _bias_heads(call.options.get("position_bias")))
        extras[call.site] = AttentionExtras(getattr(call.module, "persistent", 0), bias)
        return call.run()

    with evaluating(model), torch.no_grad(), intercepted(model, on_call, None):
        model(**inputs)
    return extras


def _bias_heads(mask: Tensor | None) -> int:
    """Number of heads of a mask `[batch, head, query, key]` that also changes scores; 0 if it only hides keys."""
    if mask is None or mask.dtype == torch.bool:
        return 0
    visible = mask[mask > torch.finfo(mask.dtype).min / 2]
    return int(mask.shape[1]) if bool(visible.any()) else 0


@dataclass(frozen=True)
class SiteTimes:
    """Times of the forms of one site at one size.

    Attributes:
        length: number of query positions, and of key positions without the memory.
        milliseconds: median time of a call by form. A mask of single entries has no block-sparse form; the masked form
            is timed only at the first batch size.
        batch: number of rows.
    """

    length: int
    milliseconds: Mapping[str, float]
    batch: int = 1

    @property
    def gain(self) -> float:
        """Time of whole attention over time of block-sparse attention; 0 without a block-sparse form."""
        block_sparse = self.milliseconds.get(BLOCK_SPARSE)
        return self.milliseconds[WHOLE] / block_sparse if block_sparse else 0.0


class AttentionTimer:
    """Times the forms of attention, with extra inputs of sites, in sessions with the settings of a recipe's engine."""

    def __init__(
        self, recipe: Recipe, extras: Mapping[str, AttentionExtras] | None = None, measure: Measure | None = None
    ) -> None:
        engine = recipe.engine
        provider = ort_session.choose_provider(engine.provider, engine.definite_precision, engine.kernel)
        self._settings = ort_session.session_settings(provider, engine.threads, engine.kernel)
        self._dtype = _TYPES.get(engine.precision, ir.DataType.FLOAT)
        self._extras, self._measure = extras or {}, measure or median_milliseconds

    def times(self, site: SitePlan, mask: BlockMask, length: int, batch: int, *, masked: bool) -> SiteTimes:
        """Time every form of a site with the heads that it keeps, which `mask` is of.

        Args:
            length: number of query positions, and of key positions without the memory.
            batch: number of rows.
            masked: time the masked form too, whose bias holds every pair of positions of every head.
        """
        case = _Case(site, mask, length, self._extras.get(site.name, AttentionExtras()), self._dtype)
        with tempfile.TemporaryDirectory() as folder:
            sessions = {}
            for form, model in case.models(masked=masked).items():
                path = Path(folder) / f"{form}.onnx"
                save(model, path)
                sessions[form] = ort_session.open_session(path, self._settings)
            return SiteTimes(length, self._measure(sessions, case.feeds(batch, masked=masked)), batch)


class _Case:
    """The attention of one site, with the heads that it keeps and their mask, at one length and in one type."""

    def __init__(
        self, site: SitePlan, mask: BlockMask, length: int, extras: AttentionExtras, dtype: ir.DataType
    ) -> None:
        self.mask, self.length, self.persistent, self.dtype = mask, length, extras.persistent, dtype
        self.heads, self.dim, self.is_causal = len(site.kept), site.head_dim, site.kind == "causal"
        self.keys = length + mask.memory  # without persistent vectors
        # With a memory, persistent vectors or a bias, causality is in the family's own mask of pairs.
        in_mask = self.is_causal and bool(mask.memory or extras.persistent or extras.bias)
        self.hides_later, self.mask_heads = self.is_causal and not in_mask, min(self.heads, extras.bias or int(in_mask))

    def models(self, *, masked: bool) -> dict[str, ir.Model]:
        """The graph of each form."""
        full, options = self.mask_heads, dict[str, Any](causal=self.hides_later, dtype=self.dtype)
        models = {WHOLE: dense(self.heads, self.dim, "full" if full else None, full, **options)}
        if masked:
            models[MASKED] = dense(self.heads, self.dim, "mask", self.heads, dtype=self.dtype)
        if self.mask.block > 1:
            models[BLOCK_SPARSE] = sparse(
                self.mask, self.dim, row=True, full=full, persistent=self.persistent, **options
            )
        return models

    def feeds(self, batch: int, *, masked: bool) -> dict[str, np.ndarray]:
        """Inputs of all forms, for a number of rows."""
        dtype, keys = self.dtype.numpy(), self.keys + self.persistent
        rng = np.random.default_rng(0)
        feeds = {
            name: rng.standard_normal((batch, size, self.heads * self.dim), dtype=np.float32).astype(dtype)
            for name, size in (("query", self.length), ("key", keys), ("value", keys))
        }
        past = np.tri(self.length, self.keys, self.mask.memory if self.is_causal else self.keys, dtype=np.bool_)
        hidden = np.finfo(dtype).min / 2
        feeds["row"] = np.zeros((1, 1, 1, keys), dtype)
        if self.mask_heads:
            visible = self._with_persistent(past[None])
            shape = (1, self.mask_heads, *visible.shape[1:])
            feeds["full"] = np.broadcast_to(np.where(visible, 0.0, hidden), shape).astype(dtype)
        if masked:
            visible = self._with_persistent(self.mask.entries(self.length, self.keys, memory=self.mask.memory) & past)
            feeds["mask"] = np.where(visible, 0.0, hidden)[None].astype(dtype)
        return feeds

    def _with_persistent(self, pairs: np.ndarray) -> np.ndarray:
        """Extend bool `[head, query, key]` by the persistent keys, to which every query attends."""
        return np.pad(pairs, ((0, 0), (0, 0), (0, self.persistent)), constant_values=True)


@dataclass(frozen=True)
class _TimedForm:
    """The session of a form, which ignores those inputs of a call that its graph lacks."""

    session: Any

    def call(self, feeds: Feeds) -> Callable[[], object]:
        return lambda: ort_session.run_session(self.session, feeds)


def median_milliseconds(sessions: Mapping[str, Any], feeds: Feeds) -> dict[str, float]:
    """Median milliseconds of a call of each form, timed in turn."""
    seconds = median_times(list(map(_TimedForm, sessions.values())), feeds, FORM_SECONDS * len(sessions))
    return {form: 1e3 * median for form, median in zip(sessions, seconds, strict=True)}


def dense(
    heads: int,
    dim: int,
    bias: str | None = None,
    bias_heads: int = 0,
    *,
    causal: bool = False,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Model:
    """Graph of ONNX Runtime's fused attention over all pairs of positions.

    Args:
        dim: width of a head.
        bias: name of an input `[1, bias_heads, query, key]` that is added to the scores; None: no such input.
        bias_heads: number of heads of that input, 1 or all.
        causal: hide keys after the query.
    """
    biases: list[tuple[str, Shape]] = [(bias, (1, bias_heads, "length", "keys"))] if bias else []
    inputs = _inputs(heads * dim, dtype, biases)
    attributes = {"num_heads": heads, "unidirectional": int(causal)}
    # Inputs 3 and 4 are a bias of the projections and a padding mask.
    operands = [*inputs[:3], None, None, inputs[3]] if bias else inputs
    return _model(inputs, [ir.node("MultiHeadAttention", operands, attributes, domain="com.microsoft")], [])


def sparse(
    mask: BlockMask,
    dim: int,
    *,
    row: bool = False,
    full: int = 0,
    persistent: int = 0,
    causal: bool = False,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Model:
    """Graph of attention over the blocks that a mask keeps, with the reshapes that split and merge the heads.

    Args:
        dim: width of a head.
        row: add an input `row` `[1, 1, 1, key]`, which is added to the scores of every query.
        full: heads, 1 or all, of an input `full` `[1, full, query, key]`, added to the scores; 0: no such input.
        persistent: number of keys at the end that every query attends to.
        causal: hide keys after the query.
    """
    heads = len(mask.kept)
    biases: list[tuple[str, Shape]] = [("row", (1, 1, 1, "keys"))] if row else []
    biases += [("full", (1, full, "length", "keys"))] if full else []
    inputs = _inputs(heads * dim, dtype, biases)
    spec = AttentionSpec(mask, dim, dim, dim**-0.5, causal, persistent, full, dtype)
    function = block_sparse_attention(spec, row=row)
    arrays = {
        "split_shape": np.array([0, 0, heads, dim]),
        "merged_shape": np.array([0, 0, heads * dim]),
        "block_mask": mask.kept,
    }
    constants = {name: ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in arrays.items()}
    split = [ir.node("Reshape", [value, constants["split_shape"]]) for value in inputs[:3]]
    attention = call(function, [*(node.outputs[0] for node in split), constants["block_mask"], *inputs[3:]])
    merged = ir.node("Reshape", [attention.outputs[0], constants["merged_shape"]])
    model = _model(inputs, [*split, attention, merged], list(constants.values()))
    model.functions[function.identifier()] = function
    return model


def _inputs(width: int, dtype: ir.DataType, biases: Sequence[tuple[str, Shape]]) -> list[ir.Value]:
    """Queries, keys and values of a width, followed by biases with their names and shapes."""
    states = [("query", ("batch", "length", width)), *((name, ("batch", "keys", width)) for name in ("key", "value"))]
    return [ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype)) for name, shape in (*states, *biases)]


def _model(inputs: list[ir.Value], nodes: list[ir.Node], constants: list[ir.Value]) -> ir.Model:
    """A model of nodes, whose output is that of the last node."""
    output = nodes[-1].outputs[0]
    output.name, output.type, output.shape = "output", inputs[0].type, inputs[0].shape
    opsets = {"": 18, "com.microsoft": 1, "compressor": 1}
    graph = ir.Graph(inputs, [output], nodes=nodes, initializers=constants, opset_imports=opsets, name="attention")
    return ir.Model(graph, ir_version=10)


@dataclass(frozen=True)
class SelectedMasks:
    """The names of the sites that are masked in training, notes, and the times by which they were selected, by site."""

    sites: tuple[str, ...]
    notes: tuple[Note, ...]
    times: Mapping[str, tuple[SiteTimes, ...]]


MASKS_FILE = Json[SelectedMasks](SelectedMasks)


class MaskSelector:
    """Selects the masks that make attention faster on this machine, in the engine that a recipe describes.

    Args:
        lengths: lengths to time, in addition to some up to the longest row.
        longest: number of positions of the longest row; None: the largest of `lengths`.
        timer: times the forms; None: an `AttentionTimer` of the recipe.
        blocks: the step that drops blocks; None: the masks are those of a plan.

    Attributes:
        timed: all times so far, by site.
    """

    def __init__(
        self,
        recipe: Recipe,
        lengths: Sequence[int],
        longest: int | None = None,
        extras: Mapping[str, AttentionExtras] | None = None,
        timer: AttentionTimer | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self._masks_all = blocks is not None and (blocks.mask_all_sites or blocks.block_size == 1)
        self._block_size = _BLOCK_SIZE if blocks is None else blocks.block_size
        self.recipe, self.longest = recipe, longest or max(lengths, default=1)
        self.lengths = tuple(sorted({*lengths, *(max(1, round(share * self.longest)) for share in _LENGTH_SHARES)}))
        self._timer = timer or AttentionTimer(recipe, extras)
        self.timed: dict[str, tuple[SiteTimes, ...]] = {}

    def times(self, site: SitePlan, mask: BlockMask) -> tuple[SiteTimes, ...]:
        """Times of a site with the heads that it keeps, at every length and batch size, by the mask of all its heads.

        Each site is timed once.
        """
        if site.name not in self.timed:
            kept = BlockMask(mask.kept[list(site.kept)], mask.block, mask.memory)
            batches = self.recipe.measure.batch
            self.timed[site.name] = tuple(
                self._timer.times(site, kept, length, batch, masked=batch == batches[0])
                for length, batch in itertools.product(self.lengths, batches)
            )
        return self.timed[site.name]

    def recall(self, store: Store) -> None:
        """Take the times by which an interrupted run selected the masks in the store of a step, if it has some."""
        if (selected := store.load(MASKS, MASKS_FILE)) is not None:
            self.timed = {**selected.times, **self.timed}

    def select(self, plan: Plan, masks: Mapping[str, BlockMask]) -> tuple[dict[str, BlockMask], tuple[Note, ...]]:
        """The masks with which to train the model, and notes on the selection.

        A mask, which is one of all heads of its site, is selected if block-sparse attention is `MIN_GAIN` times as fast
        at the longest length with the heads that `plan` keeps, and not slower at any other.
        """
        if self._masks_all:
            return dict(masks), ()
        slow = {
            site.name: self._slow_size(self.times(site, masks[site.name])) for site in plan.sites if site.name in masks
        }
        selected = {name: masks[name] for name, reason in slow.items() if not reason}
        reasons = [f"{name} ({reason})" for name, reason in slow.items() if reason]
        if not reasons:
            return selected, ()
        listed = ", ".join(reasons[:_LISTED]) + (", ..." if len(reasons) > _LISTED else "")
        text = (
            f"{len(reasons)} of {len(masks)} sites keep every block, because block-sparse attention would not be faster"
            f" there on this machine: {listed}; --mask-all-sites masks them nevertheless"
        )
        return selected, (Note(code=NoteCode.SITES_UNMASKED, text=text),)

    def lowered(self, plan: Plan) -> frozenset[str]:
        """The masked sites of a plan at which block-sparse attention is faster than the mask as a bias."""
        masked = [site for site in plan.sites if site.name in plan.masks and site.kept]
        times = {site.name: _at_longest(self.times(site, plan.masks[site.name]))[0].milliseconds for site in masked}
        return frozenset(name for name, of in times.items() if of.get(BLOCK_SPARSE, np.inf) < of[MASKED])

    def site_blocks(
        self,
        plan: Plan,
        requested: Collection[str],
        lowered: Collection[str],
        dense: Mapping[str, str],
        unprojected: Mapping[str, int] | None = None,
    ) -> tuple[SiteBlocks, ...]:
        """The result for each site that has a mask or from which blocks were to be dropped.

        Args:
            requested: sites from whose kind of attention blocks were to be dropped.
            lowered: sites that are block-sparse in the graph.
            dense: for sites that could not be made block-sparse, the reason.
            unprojected: for each site the number of key blocks whose keys and values are not projected.
        """
        results = []
        for site in plan.sites:
            mask = plan.masks.get(site.name)
            if (site.name not in requested and mask is None) or not site.kept:
                continue
            times = self.timed.get(site.name, ())
            form: Form = "whole" if mask is None else "block-sparse" if site.name in lowered else "masked"
            if mask is None:
                rule = f"it has to be {MIN_GAIN:g} times as fast at the longest length and as fast at the others"
                reason = f"block-sparse attention is {self._slow_size(times) or 'not faster'}; {rule}"
            elif site.name in lowered:
                reason = "faster on this machine than the mask as a bias"
            elif mask.block == 1:
                reason = "a mask of single entries skips no computation"
            else:
                reason = dense.get(site.name, "the mask as a bias is faster on this machine")
            if unused := (unprojected or {}).get(site.name, 0):
                reason += f"; {unused} key blocks, to which no query attends, are not projected"
            first = [time for time in times if time.batch == times[0].batch]
            result = SiteBlocks(
                site=site.name,
                kind=site.kind,
                block=self._block_size if mask is None else mask.block,
                share=1.0 if mask is None else _kept_share(mask, site, self.longest),
                form=form,
                why=reason,
                unprojected=unused,
                milliseconds={time.length: dict(time.milliseconds) for time in first},
            )
            results.append(result)
        return tuple(results)

    def _slow_size(self, times: Sequence[SiteTimes]) -> str:
        """A description of the size at which block-sparse attention gains least, if that is too little; else empty."""
        longest = _at_longest(times)
        slow = (time for time in times if time.gain < (MIN_GAIN if time in longest else 1.0))
        if (slowest := min(slow, key=lambda time: time.gain, default=None)) is None:
            return ""
        batch = f", batch {slowest.batch}" if slowest.batch > 1 else ""
        return f"{slowest.gain:.2f} times as fast at length {slowest.length}{batch}"


def _at_longest(times: Sequence[SiteTimes]) -> list[SiteTimes]:
    """The times at the longest length, in the order of the batch sizes."""
    longest = max(time.length for time in times)
    return [time for time in times if time.length == longest]


def _kept_share(mask: BlockMask, site: SitePlan, length: int) -> float:
    """Share of the blocks of the kept heads that a mask of all keeps; future blocks of causal sites are not counted."""
    rows, columns = -(-length // mask.block), -(-(length + mask.memory) // mask.block)
    kept = mask.kept[list(site.kept), :rows, :columns]
    if site.kind != "causal":
        return float(kept.mean())
    row, column = (np.arange(size) * mask.block for size in kept.shape[1:])
    past = column[None, :] - mask.memory < row[:, None] + mask.block
    return float(kept[:, past].mean())
