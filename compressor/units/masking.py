"""Mask a model's attention: pairs of positions that a block mask leaves out are computed as if they were padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from compressor.errors import InputError
from compressor.units.hook import Attention, Call, family, intercepted, unwrap
from graph_passes import BlockMask, Plan
from graph_passes.block_sparse.masks import MASK

_HIDDEN = torch.finfo(torch.float16).min / 2
"""What scores that are left out have added, whatever the precision: the sum is finite in half precision too, where a
softmax over a row of infinities would be no number, and zero times that none either."""


@contextmanager
def masked(model: PreTrainedModel, plan: Plan, *, attention: Attention | None = None) -> Iterator[PreTrainedModel]:
    """The model whose sites attend only where the plan's masks say; a site without a mask attends as ever.

    The mask comes first: padding and causality still exclude what they exclude, so that a pair left out never lets the
    future in. A query that may attend to nothing, as its row's keys are all padding, gives zero.

    Positions are told apart thus: a segment's position 0 is where its memory ends; where keys are kept from earlier
    calls, queries come after as many positions as the cache has seen, of which it may hold the last alone (a sliding
    window) or have room for more (a static cache); those of cross-attention are where the self-attention before them
    was. Persistent vectors are seen by every query.

    Inside the context each site with a mask carries a buffer `block_mask` `[head, query block, key block]`, so an
    export holds it as an initializer. Afterwards the model is as it was.

    Args:
        model: a transformers model.
        plan: whose masks; its heads are not looked at, see `gated`.
        attention: run every attention as `eager` or `sdpa`; None: as the family itself would.

    Raises:
        InputError: a mask for a module that the model lacks. What can only be seen on a call is raised by the call:
            other heads, more positions than the mask has.
    """
    bare = unwrap(model)
    modules, masks = dict(bare.named_modules()), plan.masks
    kinds = {site.name: site.kind for site in plan.sites}
    for name in masks:
        if name not in modules:
            raise InputError(f"mask: {family(bare)} has no module {name}; give masks that were learned on this model")

    past = 0
    seen: int | None = None

    def on_model(module: object, args: object, given: dict[str, Any]) -> None:
        nonlocal seen
        cache = given.get("past_key_values")
        seen = int(cache.get_seq_length()) if isinstance(cache, Cache) else None

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        nonlocal past
        kind = kinds.get(call.site)
        before = seen if kind == "causal" else None
        if before is not None:
            past = before
        elif kind != "cross":
            past = 0 if _segments(call) else _context(call) - call.query.shape[2]
        mask = masks.get(call.site)
        if mask is None:
            return call.run()
        restricted, alive = _restricted(call, mask, past, cached=before is not None)
        out, weights = restricted.run()
        return out * alive, weights

    with ExitStack() as undo:
        for name, mask in masks.items():
            modules[name].register_buffer(MASK, torch.tensor(mask.kept, device=bare.device), persistent=False)
            undo.callback(delattr, modules[name], MASK)
        undo.callback(bare.register_forward_pre_hook(on_model, with_kwargs=True).remove)
        undo.enter_context(intercepted(model, on_call, attention))
        yield model


def _segments(call: Call) -> bool:
    """Whether keys before the queries' own are a segment's memory; in all other families they are positions."""
    return getattr(call.module, "reads_segments", False)


def _context(call: Call) -> int:
    """Keys that are positions: all but the persistent ones."""
    return call.key.shape[2] - getattr(call.module, "persistent", 0)


def _restricted(call: Call, mask: BlockMask, past: int, *, cached: bool) -> tuple[Call, Tensor]:
    """The call, its queries after `past` others, with the mask in its own; and `[batch, query, head, 1]` of whether a
    query has any key left."""
    heads, queries, keys = call.query.shape[1], call.query.shape[2], call.key.shape[2]
    context = _context(call)
    persistent, memory = keys - context, context - queries if _segments(call) else 0
    # A window's cache lacks the first positions; a static one goes on behind the last, and the family hides that.
    end = past + queries if cached else context - memory
    first = max(0, end - context) if cached else -memory
    _check(call.site, mask, heads, past + queries, end, memory)
    kept = getattr(call.module, MASK)
    assert isinstance(kept, Tensor)
    rows = (torch.arange(queries, device=kept.device) + past) // mask.block
    columns = (torch.arange(context, device=kept.device) + (mask.memory + first)) // mask.block
    if cached:
        columns = columns.clamp(max=kept.shape[2] - 1)
    allowed = kept.index_select(1, rows).index_select(2, columns)[None]
    if persistent:
        allowed = torch.nn.functional.pad(allowed, (0, persistent), value=True)
    lowest = torch.finfo(call.query.dtype).min / 2
    given = call.mask
    if given is None and call.implementation == "sdpa" and _flag(call):
        earlier = past - first if cached else keys - queries
        given = torch.ones(queries, keys, dtype=torch.bool, device=kept.device).tril(earlier)[None, None]
    added = call.query.new_zeros(())
    if given is not None:
        allowed = allowed & (given if given.dtype == torch.bool else given > lowest)
        added = added if given.dtype == torch.bool else given
    options = {**call.options, **({"is_causal": False} if "is_causal" in call.options else {})}
    restricted = replace(call, mask=torch.where(allowed, added, _HIDDEN), options=options)
    alive = allowed.any(dim=3)[..., None].transpose(1, 2)
    return restricted, alive.to(call.query.dtype)


def _flag(call: Call) -> bool:
    """Whether SDPA hides later keys by itself where it is given no mask."""
    flag = call.options.get("is_causal")
    return bool(getattr(call.module, "is_causal", True) if flag is None else flag) and call.query.shape[2] > 1


def _check(site: str, mask: BlockMask, heads: int, queries: int, keys: int, memory: int) -> None:
    if len(mask.kept) != heads:
        raise InputError(f"{site}: a mask for {len(mask.kept)} heads, the model has {heads}; give masks of this model")
    if torch.compiler.is_compiling() or any(isinstance(size, torch.SymInt) for size in (queries, keys, memory)):
        return  # an export of any length: the graph cannot be given more than the mask has
    if queries > mask.queries or keys > mask.keys or memory > mask.memory:
        raise InputError(
            f"{site}: {queries} queries and {keys} keys after {memory} remembered; the mask reaches over"
            f" {mask.queries}, {mask.keys} and {mask.memory}: shorten the rows (--max-length), or cut masks from longer"
            " maps"
        )
