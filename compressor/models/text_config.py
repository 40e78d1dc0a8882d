"""The part of a configuration on text, and its factor on the maximum length."""

from __future__ import annotations

from transformers import PretrainedConfig

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
