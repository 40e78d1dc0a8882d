"""Find the attention sites of a model by one dry forward that records which modules call the hook."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import SiteRefusedError
from compressor.units.hook import Attention, Call, family, intercepted, unwrap
from graph_passes import Kind

WORKING = (
    "BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT, GPT-2, Llama, Qwen3, T5, BART, Marian, ViT, CLIP, Whisper, "
    "All-attention, Transformer-XL and every other family that calls transformers' attention interface"
)
_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Names under which the attention modules of transformers are handed a second sequence to attend to."""


@dataclass(frozen=True)
class Site:
    """One attention module.

    Attributes:
        name: module path, e.g. `bert.encoder.layer.0.attention.self`.
        kind: `bidirectional`, `causal` (both self-attention) or `cross`.
        heads: query heads.
        kv_heads: key/value heads; divides `heads`.
        head_dim: width of one head's value vector.
    """

    name: str
    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int


def find_sites(model: nn.Module, inputs: Mapping[str, Tensor], *, attention: Attention | None = None) -> list[Site]:
    """The model's attention sites, in the order in which one forward first calls them.

    A module that the forward calls several times (layers that share weights) is one site. Attention that takes
    another way than the hook beside attention that takes it (LongT5's local encoder) is not listed.

    Args:
        model: a transformers model; it runs once in evaluation mode without gradients and is left as it was.
        inputs: keyword arguments of its forward, at least two positions long so that causality shows.
        attention: look while running `eager` or `sdpa`; None: what the family itself would run.

    Raises:
        SiteRefusedError: no attention call reached the hook; the message names the family and what works.
    """
    bare = unwrap(model)
    sites: dict[str, Site] = {}
    arguments: dict[nn.Module, dict[str, Any]] = {}

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments[module] = {"args": args, **kwargs}

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        out, weights = call.run()
        if call.site not in sites:
            sites[call.site] = _site(call, out, arguments.get(call.module, {}))
        return out, weights

    handles = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in bare.modules()]
    modes = [(module, module.training) for module in bare.modules()]
    try:
        bare.eval()
        with torch.no_grad(), intercepted(bare, on_call, attention):
            bare(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    if not sites:
        form = f" as {attention}" if attention else ""
        raise SiteRefusedError(
            f"{family(bare)}: its attention{form} does not go through transformers' attention interface, so its heads "
            f"cannot be gated; what works: {WORKING}"
        )
    return list(sites.values())


def _site(call: Call, out: Tensor, arguments: Mapping[str, Any]) -> Site:
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if out.dim() != 4 or out.shape[2] != heads or heads % kv_heads:
        raise SiteRefusedError(
            f"{call.site}: its attention returns {list(out.shape)} for {heads} query and {kv_heads} key/value heads, "
            "not [batch, query, head, head_dim]; this family cannot be gated"
        )
    groups = getattr(call.module, "num_key_value_groups", 1)
    if kv_heads == heads and groups > 1:  # the family repeated the key/value heads itself
        kv_heads = heads // groups
    return Site(call.site, _kind(call, arguments), heads, kv_heads, out.shape[3])


def _kind(call: Call, arguments: Mapping[str, Any]) -> Kind:
    names = inspect.signature(type(call.module).forward).parameters
    positional = dict(zip(list(names)[1:], arguments.get("args", ()), strict=False))
    given = {**positional, **{name: value for name, value in arguments.items() if name in names}}
    if any(given.get(name) is not None for name in _ELSEWHERE):
        return "cross"
    if call.query.shape[2] == call.key.shape[2]:
        return "causal" if _causal(call) else "bidirectional"
    # More keys than queries: a memory before them or vectors that are always seen, where the module itself is causal.
    own = call.mask is not None and getattr(call.module, "is_causal", False)
    return "causal" if own and _causal(call) else "cross"


def _causal(call: Call) -> bool:
    """Whether no query sees a later key, in any row."""
    flag = call.options.get("is_causal")
    flag = getattr(call.module, "is_causal", True) if flag is None else flag
    if call.mask is None:  # SDPA's own flag then decides; eager attention would see everything
        return bool(flag) and call.implementation == "sdpa"
    if call.mask.dim() != 4 or not flag:
        return False
    hidden = ~call.mask if call.mask.dtype == torch.bool else call.mask < torch.finfo(call.mask.dtype).min / 2
    length = call.query.shape[2]
    hidden = hidden.expand(-1, -1, length, -1)  # a mask of padding alone has one row for every query
    later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
    # The queries' own keys come after a memory of any length.
    starts = range(hidden.shape[3] - length + 1)
    return any(bool(hidden[..., start : start + length][..., later].all()) for start in starts)
