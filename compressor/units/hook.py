"""The one place where attention calls are intercepted.

Every family on transformers' attention interface asks it for a function on each call and hands over its own eager
function as the default. While a context is open the question is answered with the same function, wrapped. The
configuration keeps the name it had (`eager`, `sdpa`): families and mask makers compare that name, and a new one would
change what they compute or drop the causal mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from compressor.errors import InputError, SiteRefusedError, UsageError

Attention = Literal["eager", "sdpa"]
OutputHook = Callable[[str, Tensor], Tensor]
"""Site name and its output `[batch, query, head, head_dim]` -> the output to go on with."""
WeightsHook = Callable[[str, Tensor], None]
"""Site name and its attention map `[batch, head, query, key]`."""


@dataclass(frozen=True)
class Call:
    """One attention call on its way: what the family handed over and what it would run.

    `query` is `[batch, head, query, head_dim]`, `key` and `value` `[batch, key/value head, key, head_dim]`.
    """

    site: str
    module: nn.Module
    implementation: str
    function: Callable[..., tuple[Tensor, Tensor | None]]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]

    def run(self) -> tuple[Tensor, Tensor | None]:
        """The family's own output `[batch, query, head, head_dim]` and its map, where the function returns one."""
        return self.function(self.module, self.query, self.key, self.value, self.mask, **self.options)


@contextmanager
def intercepted(
    model: nn.Module, on_call: Callable[[Call], tuple[Tensor, Tensor | None]], attention: Attention | None
) -> Iterator[None]:
    """Route every attention call of `model` through `on_call`; restore everything on exit. Contexts may be nested."""
    names = {module: name for name, module in unwrap(model).named_modules()}
    original = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(route, implementation, original(self, implementation, default))

    def route(
        implementation: str,
        function: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        site = names.get(module)
        if site is None:  # a call of another model
            if getattr(module, "_is_replica", False):
                raise UsageError(
                    "the model runs under DataParallel, whose copies cannot be gated; start one process a device "
                    "with `accelerate launch`"
                )
            return function(module, query, key, value, attention_mask, **options)
        return on_call(Call(site, module, implementation, function, query, key, value, attention_mask, options))

    with _attention(unwrap(model), attention):
        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            AttentionInterface.get_interface = original  # type: ignore[method-assign]


@contextmanager
def hooked(
    model: nn.Module,
    on_output: OutputHook,
    *,
    attention: Attention | None = None,
    on_weights: WeightsHook | None = None,
) -> Iterator[None]:
    """Send the output of every attention call through `on_output`, right before the output projection.

    Works in training and evaluation. The model itself is not edited.

    Args:
        model: a transformers model, bare or wrapped for training (DistributedDataParallel).
        on_output: gets the site's name and `[batch, query, head, head_dim]`, returns what to go on with.
        attention: run every attention as `eager` or `sdpa`; None: as the family itself would.
        on_weights: gets the site's name and its map `[batch, head, query, key]`; needs eager attention.

    Raises:
        SiteRefusedError: the family has no SDPA that computes the same, or returns no map.
    """

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        out, weights = call.run()
        if on_weights is not None:
            if weights is None:
                raise SiteRefusedError(
                    f"{call.site}: {call.implementation} attention returns no map; ask for attention='eager'"
                )
            on_weights(call.site, weights)
        return on_output(call.site, out), weights

    with intercepted(model, on_call, attention):
        yield


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The model inside the wrappers of training, so that sites carry the same names with and without."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
        if inner is None:
            raise InputError(f"{type(model).__name__} is no transformers model; give a PreTrainedModel")
    return inner


def family(model: PreTrainedModel) -> str:
    """The model's type as transformers names it (`bert`), else the name of its class."""
    return model.config.model_type or type(model).__name__


def configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration that a part of `model` reads, each once: encoder and decoder often hold copies."""
    found: dict[int, PreTrainedConfig] = {}

    def add(config: Any) -> None:
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


@contextmanager
def _attention(model: PreTrainedModel, attention: Attention | None) -> Iterator[None]:
    if attention not in ("eager", "sdpa", None):
        raise UsageError(f"attention {attention!r} is unknown; use 'eager' or 'sdpa'")
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if attention == "sdpa" and not all(part._supports_sdpa for part in parts):
        raise SiteRefusedError(
            f"{family(model)}: SDPA does not compute this family's attention; ask for attention='eager'"
        )
    before = [(config, config._attn_implementation) for config in configs(model)]
    other = sorted({str(name) for _, name in before} - {"eager", "sdpa", "None"})
    if attention is None and other:
        raise SiteRefusedError(
            f"{family(model)}: {other[0]} attention cannot be gated; load the model with attn_implementation='sdpa'"
        )
    # The property's setter would write the same name into every configuration below, wherever it was.
    for config, _ in before:
        if attention is not None:
            config._attn_implementation_internal = attention
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
