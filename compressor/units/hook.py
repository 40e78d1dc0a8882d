"""Interception of attention calls, for every family on transformers' attention interface.

On each call, an attention module looks up a function in `AttentionInterface`, with its own eager function as the
default. While `intercepted` is open, the lookup returns the same function, wrapped. The configured name (`eager`,
`sdpa`) does not change: modules and mask builders branch on it, and a new name would change what they compute or drop
the causal mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.exporters.utils import patch_attribute, patch_attributes
from transformers.modeling_utils import AttentionInterface

from compressor.errors import ErrorCode, InputError, SiteRefusedError, UsageError
from compressor.units.prunable import Attention

OutputHook = Callable[[str, Tensor], Tensor]
"""Called with a site's name and its output `[batch, query, head, head_dim]`; returns the output to continue with."""


@dataclass(frozen=True)
class Call:
    """One attention call: its arguments, and the function that the family would call.

    Attributes:
        site: module path of the attention module.
        module: the attention module.
        implementation: configured name of the attention function, e.g. `sdpa`.
        function: the attention function.
        query: `[batch, head, query, head_dim]`.
        key: `[batch, key/value head, key, head_dim]`.
        value: `[batch, key/value head, key, head_dim]`.
        mask: `[batch, 1 or head, query, key]`, boolean (True: visible) or added to the scores; None: no mask.
        options: further keyword arguments of the function, e.g. `scaling`.
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
        """The output `[batch, query, head, head_dim]`, and the attention map where the function returns one."""
        return self.function(self.module, self.query, self.key, self.value, self.mask, **self.options)

    @property
    def is_causal(self) -> bool:
        """Whether the call, or else its module, asks for causal attention."""
        flag = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if flag is None else flag)

    @property
    def visible(self) -> Tensor | None:
        """The pairs of positions that `mask` permits, bool in the shape of `mask`; None: no mask."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return self.mask
        return self.mask > torch.finfo(self.mask.dtype).min / 2


WeightsHook = Callable[[Call, Tensor], None]
"""Called with a call and its attention map `[batch, head, query, key]`."""


@contextmanager
def intercepted(
    model: nn.Module, on_call: Callable[[Call], tuple[Tensor, Tensor | None]], attention: Attention | None
) -> Iterator[None]:
    """Route every attention call of `model` through `on_call`; restore everything on exit. Contexts can be nested.

    Args:
        model: a transformers model, bare or wrapped for training.
        on_call: replaces the attention function; `Call.run` is the original.
        attention: run every attention as `eager` or `sdpa`; None: as configured.

    Raises:
        UsageError: `attention` is unknown, or, on a call, the model runs under DataParallel.
        SiteRefusedError: the family does not support SDPA, or is configured for attention that has no hook.
    """
    # By their attributes: torch.export may call a module as a proxy, which shares the attributes of the module.
    names = {id(vars(module)): name for name, module in unwrap(model).named_modules()}
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
        site = names.get(id(vars(module)))
        if site is None:  # the call belongs to another model
            if getattr(module, "_is_replica", False):
                raise UsageError(
                    "the model runs under DataParallel, whose replicas cannot be gated; start one process per device "
                    "with `accelerate launch`",
                    code=ErrorCode.UNSUPPORTED,
                    value="DataParallel",
                )
            return function(module, query, key, value, attention_mask, **options)
        return on_call(Call(site, module, implementation, function, query, key, value, attention_mask, options))

    with (
        _attention_implementation(unwrap(model), attention),
        patch_attribute(AttentionInterface, "get_interface", lambda _: get_interface),
    ):
        yield


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside the wrappers of training, so that site names do not depend on them.

    Raises:
        InputError: there is no transformers model inside.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
        if inner is None:
            text = f"{type(model).__name__} is not a transformers model; use a PreTrainedModel"
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, value=type(model).__name__)
    return inner


def family(model: PreTrainedModel) -> str:
    """The model type in transformers (`bert`), or the name of the model's class where it has none."""
    return model.config.model_type or type(model).__name__


def configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """All configurations that parts of `model` read, each once; encoder and decoder often have copies of their own."""
    by_id: dict[int, PreTrainedConfig] = {}
    parts = [getattr(module, "config", None) for module in model.modules()]
    for config in parts:  # which grows on the way
        if isinstance(config, PreTrainedConfig) and id(config) not in by_id:
            by_id[id(config)] = config
            parts += [getattr(config, name, None) for name in config.sub_configs]
    return list(by_id.values())


@contextmanager
def _attention_implementation(model: PreTrainedModel, attention: Attention | None) -> Iterator[None]:
    """The model configured for `attention`; afterwards every configuration has its former value."""
    if attention not in (*get_args(Attention), None):
        text = f"attention {attention!r}: unknown; use 'eager' or 'sdpa'"
        raise UsageError(text, code=ErrorCode.UNKNOWN_NAME, field="attention", value=attention)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if attention == "sdpa" and not all(part._supports_sdpa for part in parts):
        text = f"{family(model)}: SDPA does not compute the attention of this family; use attention='eager'"
        raise SiteRefusedError(text, code=ErrorCode.SITE_REFUSED, family=family(model), attention="sdpa")
    configured = [(config, config._attn_implementation) for config in configs(model)]
    unhooked = sorted({str(name) for _, name in configured} - {*get_args(Attention), "None"})
    if attention is None and unhooked:
        text = (
            f"{family(model)}: {unhooked[0]} attention cannot be gated; load the model with attn_implementation='sdpa'"
        )
        raise SiteRefusedError(text, code=ErrorCode.SITE_REFUSED, family=family(model), attention=unhooked[0])
    # The property's setter would overwrite the names in all sub-configurations too.
    internal = "_attn_implementation_internal"
    with patch_attributes([(config, internal, lambda former: attention or former) for config, _ in configured]):
        yield
