"""A form of dynamic rotary embeddings whose exported graph computes the frequencies of every length.

transformers recomputes the frequencies of `dynamic` rotary embeddings (NTK) in a branch on the longest text so far,
which torch.export cannot trace. The form computes both frequencies from the present text alone, and selects by its
length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

DYNAMIC = "dynamic"
"""Type of rotary embeddings whose frequencies depend on the length, and on the lengths before it."""


def extension(config: PretrainedConfig) -> float:
    """Factor by which rotary embeddings of the type `dynamic` read more tokens than `max_position_embeddings`.

    It is the smallest of those of the types of layers; 1.0 for all other models, whose limit is
    `max_position_embeddings`.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [kind for kind in parameters.values() if kind]
    factors = [float(kind.get("factor") or 1.0) for kind in kinds if kind.get("rope_type") == DYNAMIC]
    return min(factors, default=1.0) if len(factors) == len(kinds) else 1.0


@contextlib.contextmanager
def frequencies_by_length(model: nn.Module) -> Iterator[None]:
    """While inside, dynamic rotary embeddings depend on the present text alone, as in a model just loaded.

    On exit the modules have their former frequencies and types.
    """
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            types = kinds if isinstance(kinds, dict) else {None: kinds}
            dynamic = [layer for layer, kind in types.items() if kind == DYNAMIC and _is_known(module, layer)]
            if dynamic:
                undo.enter_context(_by_length(module, dynamic))
        yield


def _is_known(module: nn.Module, layer_type: str | None) -> bool:
    return hasattr(module, _name(layer_type, "original_inv_freq")) and hasattr(module, "original_max_seq_len")


def _name(layer_type: str | None, name: str) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


@contextlib.contextmanager
def _by_length(module: Any, layer_types: list[str | None]) -> Iterator[None]:
    """One module in the form; `layer_types` are those with dynamic frequencies, None: all layers."""
    former = module.rope_type
    buffers = {name: getattr(module, name) for name in (_name(kind, "inv_freq") for kind in layer_types)}

    def set_frequencies(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        layer_type = arguments.get("layer_type")
        if layer_type in layer_types:
            frequencies = _frequencies(module, arguments["position_ids"], layer_type)
            getattr(module, _name(layer_type, "inv_freq")).copy_(frequencies)

    # Under another type, the module reads its frequencies without a branch.
    module.rope_type = "default" if not isinstance(former, dict) else former | dict.fromkeys(layer_types, "default")
    for name, buffer in buffers.items():
        setattr(module, name, buffer.clone())
    try:
        with module.register_forward_pre_hook(set_frequencies, with_kwargs=True):
            yield
    finally:
        module.rope_type = former
        for name, buffer in buffers.items():
            setattr(module, name, buffer)


def _frequencies(module: Any, positions: Tensor, layer_type: str | None) -> Tensor:
    """Frequencies for the longest text of a batch with `positions` `[batch, position]`, `[head_dim / 2]`."""
    length = torch.max(positions) + 1
    original = getattr(module, _name(layer_type, "original_inv_freq"))
    scaled, _ = ROPE_INIT_FUNCTIONS[DYNAMIC](module.config, positions.device, seq_len=length, layer_type=layer_type)
    return torch.where(length > module.original_max_seq_len, scaled, original.to(positions.device))
