"""How many tokens of a text a model reads, and whether it reads their types, by its configuration."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from compressor.graph.signature import HasSignature

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DYNAMIC = "dynamic"
"""Type of rotary embeddings whose frequencies depend on the length, and on the lengths before it."""


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration on text; that of the decoder if several parts are."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def extension(config: PretrainedConfig) -> float:
    """Factor by which rotary embeddings of the type `dynamic` read more tokens than `max_position_embeddings`.

    It is the smallest factor of all types of layers, and 1.0 for other models.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [kind for kind in parameters.values() if kind]
    factors = [float(kind.get("factor") or 1.0) for kind in kinds if kind.get("rope_type") == DYNAMIC]
    return min(factors, default=1.0) if len(factors) == len(kinds) else 1.0


def image_tokens(config: PretrainedConfig) -> list[int]:
    """Ids of the tokens before a text that a model replaces by states of the image.

    BLIP-2 replaces a token of its own, Kosmos-2 the tokens of a mask.
    """
    token = getattr(config, "image_token_index", None) if hasattr(config, "qformer_config") else None
    reads_images = hasattr(getattr(config, "vision_config", None), "image_size")  # not patches, as Kosmos-2.5
    count = getattr(config, "latent_query_num", 0) if token is None else config.num_query_tokens
    return [token or 0] * (count if reads_images else 0)


def token_limit(model: PreTrainedModel) -> int | None:
    """Maximum number of tokens of an example; None if positions are relative."""
    config = text_config(model.config)
    limit = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    if not limit or limit < 0:  # XLNet has -1 for no limit
        return None
    # RoBERTa and related families count positions from the padding id on, so that earlier ones are unused.
    modules = () if isinstance(model, HasSignature) else model.named_modules()
    tables = (module for name, module in modules if name.endswith("position_embeddings"))
    paddings = (getattr(table, "padding_idx", None) for table in tables)
    offsets = [padding + 1 for padding in paddings if padding is not None]
    return int(limit * extension(config)) - max(offsets, default=0) - len(image_tokens(model.config))


def takes_token_types(model: PreTrainedModel, tokenizer: Any) -> bool:
    """Whether the tokenizer produces `token_type_ids` and the model distinguishes two texts by them.

    GPT-2 has an input of this name for another purpose, and RoBERTa has a single type.
    """
    names = getattr(tokenizer, "model_input_names", ("token_type_ids",))
    has_types = (getattr(text_config(model.config), "type_vocab_size", None) or 0) > 1
    inputs = model.input_specs if isinstance(model, HasSignature) else inspect.signature(model.forward).parameters
    return has_types and "token_type_ids" in names and "token_type_ids" in inputs
