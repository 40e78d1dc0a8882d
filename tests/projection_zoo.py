"""Tiny random models whose attention is outside transformers' attention interface, with inputs of any batch size.

Sizes differ from one another, as in `tests.zoo`: four heads of 8, width 32, inner width 44.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from tests.projection_models import (
    SIZES,
    PooledAimv2,
    PooledSiglip,
    TorchEncoder,
    bark,
    blip_text,
    funnel,
    wavlm,
    xlnet,
)
from tests.zoo import VOCABULARY, pair, text

Inputs = dict[str, Tensor]
GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 70, "n_embd": 32, "n_layer": 2, "n_head": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 52,
    "max_position_embeddings": 70,
    "pad_token_id": 0,
    **ENDS,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
VISION: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
WINDOWS: dict[str, Any] = {"patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "pooler_hidden_size": 32}


class Family(NamedTuple):
    """A family of models.

    Attributes:
        build: makes a model.
        inputs: makes inputs from a batch size and, for texts, a length.
    """

    build: Callable[[], PreTrainedModel]
    inputs: Callable[[int, int], Inputs]

    def model(self) -> PreTrainedModel:
        """A model whose heads all change its output by more than rounding does."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build().eval()
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.2)
                elif name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)
        return model


def _texts(config: type, model: type, **more: Any) -> Family:
    return Family(lambda: model(config(**{**SIZES, **more})), text)


def _generator(config: type, model: type, **more: Any) -> Family:
    return Family(lambda: model(config(**{**GPT, **ENDS, **more})), text)


def _pairs(config: type, model: type, **more: Any) -> Family:
    return Family(
        lambda: model(config(**{**ENCODER_DECODER, **more})), lambda batch, length: pair(batch, length, length - 2)
    )


def _images(config: type, model: type, size: int, **more: Any) -> Family:
    def pixels(batch: int, length: int) -> Inputs:
        generator = torch.Generator().manual_seed(length)
        return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator)}

    return Family(lambda: model(config(**{"image_size": size, **more})), pixels)


def _sounds(batch: int, length: int) -> Inputs:
    return {"input_values": torch.randn(batch, 40 * length, generator=torch.Generator().manual_seed(length))}


def _with_boxes(batch: int, length: int) -> Inputs:
    return {**text(batch, length), "bbox": torch.zeros(batch, length, 4, dtype=torch.int64)}


FAMILIES: dict[str, Family] = {
    "mpnet": _texts(hf.MPNetConfig, hf.MPNetForSequenceClassification),
    "deberta": _texts(hf.DebertaConfig, hf.DebertaForSequenceClassification, **DEBERTA),
    "deberta-v2": _texts(
        hf.DebertaV2Config,
        hf.DebertaV2ForSequenceClassification,
        **DEBERTA,
        share_att_key=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
    ),
    "falcon": _texts(
        hf.FalconConfig,
        hf.FalconForCausalLM,
        **ENDS,
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
    ),
    "falcon of one key/value head": _texts(hf.FalconConfig, hf.FalconForCausalLM, **ENDS, multi_query=True),
    "bloom": _texts(hf.BloomConfig, hf.BloomForCausalLM, **ENDS, n_layer=2, n_head=4),
    "gptj": _generator(hf.GPTJConfig, hf.GPTJForCausalLM, rotary_dim=4),
    "codegen": _generator(hf.CodeGenConfig, hf.CodeGenForCausalLM, rotary_dim=4, n_ctx=70),
    "gpt-neo": _texts(
        hf.GPTNeoConfig,
        hf.GPTNeoForCausalLM,
        **ENDS,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    "openai-gpt": _generator(hf.OpenAIGPTConfig, hf.OpenAIGPTLMHeadModel),
    "ctrl": _generator(hf.CTRLConfig, hf.CTRLLMHeadModel, dff=44),
    "mpt": _texts(hf.MptConfig, hf.MptForCausalLM, **ENDS, d_model=32, n_heads=4, n_layers=2, max_seq_len=70),
    "gpt-neox-japanese": _texts(
        hf.GPTNeoXJapaneseConfig, hf.GPTNeoXJapaneseForCausalLM, **ENDS, intermediate_multiple_size=2
    ),
    "bark": Family(bark, text),
    "xlnet": Family(xlnet, text),
    "xlm": _texts(hf.XLMConfig, hf.XLMForSequenceClassification, emb_dim=32, n_layers=2, n_heads=4),
    "flaubert": _texts(hf.FlaubertConfig, hf.FlaubertForSequenceClassification, emb_dim=32, n_layers=2, n_heads=4),
    "xglm": _texts(hf.XGLMConfig, hf.XGLMForCausalLM, d_model=32, ffn_dim=44, num_layers=2, attention_heads=4),
    "cpmant": _texts(
        hf.CpmAntConfig,
        hf.CpmAntForCausalLM,
        dim_head=8,
        dim_ff=44,
        prompt_types=4,
        prompt_length=4,
        segment_types=4,
        position_bias_num_buckets=16,
    ),
    "roformer": _texts(hf.RoFormerConfig, hf.RoFormerForSequenceClassification),
    "megatron-bert": _texts(hf.MegatronBertConfig, hf.MegatronBertForSequenceClassification),
    "rembert": _texts(
        hf.RemBertConfig, hf.RemBertForSequenceClassification, input_embedding_size=20, output_embedding_size=20
    ),
    "big-bird": _texts(hf.BigBirdConfig, hf.BigBirdForSequenceClassification, attention_type="original_full"),
    "funnel": Family(funnel, text),
    "ibert": _texts(hf.IBertConfig, hf.IBertForSequenceClassification),
    "squeezebert": _texts(
        hf.SqueezeBertConfig,
        hf.SqueezeBertForSequenceClassification,
        embedding_size=32,
        **{f"{part}_groups": 1 for part in ("q", "k", "v", "post_attention", "intermediate", "output")},
    ),
    "luke": _texts(hf.LukeConfig, hf.LukeForSequenceClassification, entity_vocab_size=20, entity_emb_size=16),
    "layoutlmv3": Family(
        _texts(
            hf.LayoutLMv3Config,
            hf.LayoutLMv3ForSequenceClassification,
            visual_embed=False,
            coordinate_size=6,
            shape_size=4,
        ).build,
        _with_boxes,
    ),
    "tapas": _texts(hf.TapasConfig, hf.TapasForSequenceClassification),
    "canine": _texts(
        hf.CanineConfig,
        hf.CanineForTokenClassification,
        local_transformer_stride=8,
        num_hash_buckets=50,
        downsampling_rate=2,
    ),
    "visual-bert": _texts(hf.VisualBertConfig, hf.VisualBertModel, visual_embedding_dim=16),
    "flava-text": _texts(hf.FlavaTextConfig, hf.FlavaTextModel),
    "groupvit-text": _texts(hf.GroupViTTextConfig, hf.GroupViTTextModel, bos_token_id=1, eos_token_id=VOCABULARY - 1),
    "perceiver": _texts(
        hf.PerceiverConfig,
        hf.PerceiverForMaskedLM,
        num_latents=6,
        d_latents=32,
        d_model=24,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=32,
        v_channels=32,
    ),
    "wavlm": Family(wavlm, _sounds),
    "torch-encoder": Family(lambda: TorchEncoder(hf.BertConfig(**SIZES)), text),
    "trocr": _texts(
        hf.TrOCRConfig,
        hf.TrOCRForCausalLM,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=44,
        is_decoder=True,
    ),
    "blip-text": Family(blip_text, text),
    "prophetnet": Family(
        lambda: hf.ProphetNetForConditionalGeneration(
            hf.ProphetNetConfig(
                **{
                    name: size for name, size in SIZES.items() if name not in ("num_hidden_layers", "intermediate_size")
                },
                encoder_ffn_dim=44,
                num_encoder_layers=2,
                num_encoder_attention_heads=4,
                decoder_ffn_dim=44,
                num_decoder_layers=2,
                num_decoder_attention_heads=4,
            )
        ),
        lambda batch, length: pair(batch, length, length - 2),
    ),
    "mvp": _pairs(hf.MvpConfig, hf.MvpForConditionalGeneration, vocab_size=VOCABULARY),
    "fsmt": _pairs(
        hf.FSMTConfig,
        hf.FSMTForConditionalGeneration,
        use_cache=False,  # its decoder is causal only without a cache
        langs=["a", "b"],
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
    ),
    "blip-vision": _images(hf.BlipVisionConfig, hf.BlipVisionModel, 12, **VISION),
    "data2vec-vision": _images(hf.Data2VecVisionConfig, hf.Data2VecVisionForImageClassification, 12, **VISION),
    "swinv2": _images(hf.Swinv2Config, hf.Swinv2ForImageClassification, 16, **WINDOWS),
    "donut-swin": _images(hf.DonutSwinConfig, hf.DonutSwinModel, 16, **WINDOWS),
    "pvt-v2": _images(
        hf.PvtV2Config,
        hf.PvtV2ForImageClassification,
        32,
        hidden_sizes=[8, 16, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        sr_ratios=[2, 2, 1, 1],
    ),
    "mgp-str": _images(hf.MgpstrConfig, hf.MgpstrModel, 12, **VISION, image_size=[12, 12]),
    "aimv2": _images(hf.Aimv2VisionConfig, PooledAimv2, 16, **VISION, intermediate_size=44),
    "siglip": _images(hf.SiglipVisionConfig, PooledSiglip, 12, **VISION, intermediate_size=44),
    "vitdet": _images(
        hf.VitDetConfig, hf.VitDetModel, 16, **VISION, pretrain_image_size=16, use_relative_position_embeddings=True
    ),
}

WITHOUT_HEADS: dict[str, Family] = {
    # Its projection reads heads beside the outputs of a convolution.
    "convbert": _texts(
        hf.ConvBertConfig, hf.ConvBertForSequenceClassification, embedding_size=32, head_ratio=2, conv_kernel_size=3
    ),
    # Its heads are products of three softmaxes. Its length is fixed.
    "nystromformer": _texts(
        hf.NystromformerConfig,
        hf.NystromformerForSequenceClassification,
        num_landmarks=7,
        segment_means_seq_len=7,
        conv_kernel_size=3,
    ),
    # Its layers mix positions by Fourier transforms.
    "fnet": Family(
        lambda: hf.FNetForSequenceClassification(
            hf.FNetConfig(**{name: size for name, size in SIZES.items() if name != "num_attention_heads"})
        ),
        lambda batch, length: {"input_ids": text(batch, length)["input_ids"]},
    ),
}
"""Families in which no heads are found, but the neurons of feed-forwards."""
