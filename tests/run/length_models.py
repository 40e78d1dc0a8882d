"""Tiny models that compute something else above some length, with weights large enough that it matters."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

SWITCH = 16
"""The length after which every model of this file changes, in tokens."""
LIMIT = 64
"""Tokens that the models take."""
_SIZES: dict[str, Any] = {
    "vocab_size": 25,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_HEADS: dict[str, Any] = {"num_key_value_heads": 1}
_LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": SWITCH,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": LIMIT / SWITCH}
_BLOCKS: dict[str, Any] = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}

SWITCHES = {
    "dynamic": SWITCH,
    "longrope": SWITCH,
    "sliding": SWITCH,
    "mixed windows": SWITCH,
    "half windows": SWITCH,
    "longformer": SWITCH,
    "bigbird": 14,
}
"""Name of a model -> the length after which it computes something else."""


def text_model(name: str) -> PreTrainedModel:
    """A model by its name in `SWITCHES`, which classifies texts."""
    if name == "dynamic":
        config: Any = hf.LlamaConfig(
            **{**_SIZES, **_HEADS, "max_position_embeddings": SWITCH}, rope_parameters=_DYNAMIC
        )
        return spread(hf.LlamaForSequenceClassification(config))
    if name == "longrope":
        config = hf.Phi3Config(**_SIZES, **_HEADS, original_max_position_embeddings=SWITCH, rope_parameters=_LONG)
        return spread(hf.Phi3ForSequenceClassification(config))
    if name == "sliding":
        config = hf.MistralConfig(**_SIZES, **_HEADS, sliding_window=SWITCH)
        return spread(hf.MistralForSequenceClassification(config))
    if name == "mixed windows":
        layers = ["sliding_attention", "full_attention"]
        config = hf.Gemma3TextConfig(**_SIZES, **_HEADS, head_dim=8, sliding_window=SWITCH, layer_types=layers)
        return spread(hf.Gemma3TextForSequenceClassification(config))
    if name == "half windows":
        layers = ["sliding_attention", "full_attention"]
        special: dict[str, Any] = {"cls_token_id": 2, "sep_token_id": 3}
        config = hf.ModernBertConfig(**_SIZES, **special, local_attention=2 * SWITCH, layer_types=layers)
        return spread(hf.ModernBertForSequenceClassification(config))
    if name == "longformer":
        config = hf.LongformerConfig(**_SIZES, attention_window=SWITCH)
        return spread(hf.LongformerForSequenceClassification(config))
    config = hf.BigBirdConfig(**_SIZES, **_BLOCKS, sep_token_id=3)
    return spread(hf.BigBirdForSequenceClassification(config))


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights so large that attention depends on what it sees."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()
