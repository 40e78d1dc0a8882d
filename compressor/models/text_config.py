"""What a configuration says of the texts that a model reads."""

from __future__ import annotations

from transformers import PretrainedConfig

DYNAMIC = "dynamic"
"""Type of rotary embeddings whose frequencies depend on the length, and on the lengths before it."""


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that describes text; that of the decoder if several do."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def extension(config: PretrainedConfig) -> float:
    """Factor by which rotary embeddings of the type `dynamic` read more tokens than `max_position_embeddings`.

    It is the smallest of those of the types of layers; 1.0 for all other models, whose limit is
    `max_position_embeddings`.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [kind for kind in parameters.values() if kind]
    factors = [float(kind.get("factor") or 1.0) for kind in kinds if kind.get("rope_type") == DYNAMIC]
    return min(factors, default=1.0) if len(factors) == len(kinds) else 1.0
