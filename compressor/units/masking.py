"""Mask a model's attention: pairs of positions that a block mask excludes are treated like padding."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.units.hook import Attention, Call, family, intercepted, unwrap
from compressor.units.projections import require_interface
from graph_passes import BlockMask, Kind, Plan
from graph_passes.block_sparse.masks import MASK

logger = logging.getLogger(__name__)

_HIDDEN = torch.finfo(torch.float16).min / 2
"""Added to the scores of excluded pairs, in every precision. The sum stays finite in half precision; a softmax over a
row of infinities would be NaN, and NaN times zero is NaN."""


@contextmanager
def masked(model: PreTrainedModel, plan: Plan, *, attention: Attention | None = None) -> Iterator[PreTrainedModel]:
    """The model whose sites attend only to the pairs of positions that the plan's masks include.

    A site without a mask is unchanged. Masks apply in addition to padding and causality, so a query never sees a later
    key because of a mask. A query that may attend to nothing, e.g. because its row consists of padding, outputs zero.

    Inside the context, each site with a mask has a buffer `block_mask` `[head, query block, key block]`, which becomes
    an initializer of an exported graph. On exit the model is restored. See `_QueryPositions` for the positions to
    which a mask applies in models with a memory or a cache.

    Args:
        plan: the masks; its heads have no effect here, see `gated`.
        attention: run every attention as `eager` or `sdpa`; None: as configured.

    Raises:
        InputError: a mask is for a module that the model lacks; on a call, if the mask has another number of heads or
            covers fewer positions.
        SiteRefusedError: a mask is for heads outside transformers' attention interface.
    """
    bare = unwrap(model)
    modules, masks = dict(bare.named_modules()), plan.masks
    for name in masks:
        if name not in modules:
            text = f"mask: {family(bare)} has no module {name}; use masks that were learned on this model"
            raise InputError(text, code=ErrorCode.PLAN_MISMATCH, site=name)
    require_interface(bare, (site for site in plan.sites if site.name in masks), "masks")
    positions = _QueryPositions({site.name: site.kind for site in plan.sites})

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        past, cached = positions.advance(call)
        mask = masks.get(call.site)
        if mask is None:
            return call.run()
        masked_call, attends = _masked_call(call, mask, past, cached=cached)
        output, weights = masked_call.run()
        return output * attends, weights

    with ExitStack() as undo:
        for name, mask in masks.items():
            modules[name].register_buffer(MASK, torch.tensor(mask.kept, device=bare.device), persistent=False)
            undo.callback(delattr, modules[name], MASK)
        undo.enter_context(bare.register_forward_pre_hook(positions.on_forward, with_kwargs=True))
        undo.enter_context(intercepted(model, on_call, attention))
        logger.debug("%s: masks at %d sites", family(bare), len(masks))
        yield model


class _QueryPositions:
    """Counts the positions that precede the queries of each attention call.

    1. Causal attention with a key/value cache: the number of positions that the cache has seen. It may hold only the
       last of them (a sliding window) or have room for more (a static cache).
    2. A segment of a model with memory: zero; position 0 is the first one after the memory.
    3. Other self-attention: the number of keys minus the number of queries.
    4. Cross-attention: as in the self-attention before it.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds
        self._past = 0
        self._cached: int | None = None  # positions in the cache of the current forward; None: no cache

    def on_forward(self, module: object, args: object, kwargs: dict[str, Any]) -> None:
        """A pre-forward hook of the model: read the length of its cache."""
        cache = kwargs.get("past_key_values")
        self._cached = int(cache.get_seq_length()) if isinstance(cache, Cache) else None

    def advance(self, call: Call) -> tuple[int, bool]:
        """Number of positions before the queries of the next call, and whether its keys come from a cache."""
        kind = self._kinds.get(call.site, "cross")  # heads that no output depends on have no kind, and no mask
        if kind == "causal" and self._cached is not None:  # case 1
            self._past = self._cached
            return self._past, True
        if kind != "cross":  # cases 2 and 3
            self._past = 0 if _reads_segments(call) else _context_length(call) - call.query.shape[2]
        return self._past, False


def _reads_segments(call: Call) -> bool:
    """Whether the keys before those of the queries are the memory of a segment, which precedes position 0."""
    return getattr(call.module, "reads_segments", False)


def _context_length(call: Call) -> int:
    """Number of keys that have a position: all but the persistent vectors."""
    return call.key.shape[2] - getattr(call.module, "persistent", 0)


def _masked_call(call: Call, mask: BlockMask, past: int, *, cached: bool) -> tuple[Call, Tensor]:
    """Add the block mask of its site to the mask of a call, whose queries follow `past` positions.

    Returns:
        The call with both masks, and `[batch, query, head, 1]`: one where a query may attend to any key, else zero.
    """
    heads, queries, keys = call.query.shape[1], call.query.shape[2], call.key.shape[2]
    context = _context_length(call)
    persistent, memory = keys - context, context - queries if _reads_segments(call) else 0
    # The cache of a sliding window lacks the first positions. A static cache extends beyond the last one; the family's
    # own mask hides the excess.
    end = past + queries if cached else context - memory
    first = max(0, end - context) if cached else -memory
    _check_coverage(call.site, mask, heads, past + queries, end, memory)
    blocks = getattr(call.module, MASK)
    assert isinstance(blocks, Tensor)
    rows = (torch.arange(queries, device=blocks.device) + past) // mask.block
    columns = (torch.arange(context, device=blocks.device) + (mask.memory + first)) // mask.block
    if cached:
        columns = columns.clamp(max=blocks.shape[2] - 1)
    allowed = blocks.index_select(1, rows).index_select(2, columns)[None]
    if persistent:
        allowed = torch.nn.functional.pad(allowed, (0, persistent), value=True)
    visible = call.visible
    if visible is None and call.implementation == "sdpa" and call.is_causal and queries > 1:
        # SDPA hides later keys by itself when it receives no mask.
        earlier = past - first if cached else keys - queries
        visible = torch.ones(queries, keys, dtype=torch.bool, device=blocks.device).tril(earlier)[None, None]
    if visible is not None:
        allowed = allowed & visible
    bias = call.mask
    if bias is None or bias.dtype == torch.bool:
        bias = call.query.new_zeros(())
    options = {**call.options, **({"is_causal": False} if "is_causal" in call.options else {})}
    masked_call = replace(call, mask=torch.where(allowed, bias, _HIDDEN), options=options)
    attends = allowed.any(dim=3)[..., None].transpose(1, 2)
    return masked_call, attends.to(call.query.dtype)


def _check_coverage(site: str, mask: BlockMask, heads: int, queries: int, keys: int, memory: int) -> None:
    """Raise InputError unless a mask covers a call: its heads, positions up to the last query and key, and memory."""
    if len(mask.kept) != heads:
        text = f"{site}: the mask has {len(mask.kept)} heads, the model {heads}; use masks of this model"
        raise InputError(text, code=ErrorCode.PLAN_MISMATCH, site=site, planned=len(mask.kept), actual=heads)
    if torch.compiler.is_compiling() or any(isinstance(size, torch.SymInt) for size in (queries, keys, memory)):
        return  # an export with dynamic lengths: the graph itself rejects more positions than its mask has
    if queries > mask.queries or keys > mask.keys or memory > mask.memory:
        raise InputError(
            f"{site}: {queries} queries and {keys} keys after a memory of {memory}, but the mask covers "
            f"{mask.queries}, {mask.keys} and {mask.memory}; shorten the rows (--max-length), or derive masks from "
            f"maps of longer rows",
            code=ErrorCode.TOO_LONG,
            site=site,
            actual=(queries, keys, memory),
            maximum=(mask.queries, mask.keys, mask.memory),
        )
