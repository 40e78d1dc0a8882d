"""The part of a configuration that describes text."""

from __future__ import annotations

from transformers import PretrainedConfig


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that describes text; that of the decoder if several do."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)
