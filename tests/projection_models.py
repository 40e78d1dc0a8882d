"""Models of `tests.projection_zoo` that need more than a configuration."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from tests.zoo import VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "max_position_embeddings": 70,
    "pad_token_id": 0,
}


def blip_text() -> PreTrainedModel:
    from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

    return BlipTextLMHeadModel(hf.BlipTextConfig(**SIZES, encoder_hidden_size=32, is_decoder=True))


def bark() -> PreTrainedModel:
    from transformers.models.bark.modeling_bark import BarkSemanticModel

    sizes: dict[str, Any] = {
        "input_vocab_size": VOCABULARY,
        "output_vocab_size": VOCABULARY,
        "num_layers": 2,
        "num_heads": 4,
    }
    return BarkSemanticModel(hf.BarkSemanticConfig(block_size=70, hidden_size=32, **sizes))


def funnel() -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
        "d_model": 32,
        "n_head": 4,
        "d_head": 8,
        "d_inner": 44,
    }
    return hf.FunnelForTokenClassification(hf.FunnelConfig(vocab_size=VOCABULARY, **sizes))


def xlnet() -> PreTrainedModel:
    sizes: dict[str, Any] = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 44}
    return hf.XLNetForSequenceClassification(hf.XLNetConfig(vocab_size=VOCABULARY, **sizes))


class PoolerOutput:
    """The output of a model's pooling attention alone, which has one query a row."""

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        outputs = super().forward(pixel_values)  # type: ignore[misc]
        return BaseModelOutputWithPooling(pooler_output=outputs.pooler_output)


class PooledAimv2(PoolerOutput, hf.Aimv2VisionModel):
    """AIMv2: the projection of its heads reads one position a row."""


class PooledSiglip(PoolerOutput, hf.SiglipVisionModel):
    """SigLIP: its pooling is an `nn.MultiheadAttention`."""


class TorchEncoder(hf.BertPreTrainedModel):
    """A model of PyTorch's own layers, whose attention is `nn.MultiheadAttention`."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 44, batch_first=True)
        self.embeddings = torch.nn.Embedding(config.vocab_size, 32)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> BaseModelOutput:
        hidden = self.encoder(self.embeddings(input_ids), src_key_padding_mask=attention_mask == 0)
        return BaseModelOutput(last_hidden_state=hidden)


def wavlm() -> PreTrainedModel:
    sizes = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    sizes |= {"conv_dim": (12, 12), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    sizes |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    return hf.WavLMForCTC(hf.WavLMConfig(**sizes))
