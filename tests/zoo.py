"""Tiny random models of the supported families, with inputs of three rows, of which the last one is padded.

Sizes differ from one another (batch 3, lengths 7 and 5, memories of 10, four heads of 8, width 32 or 24) so that no
axis can pass for another."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from compressor import models
from compressor.segment_memory import memory_names

Case = tuple[PreTrainedModel, dict[str, Tensor]]

VOCABULARY, BATCH, LENGTH, TARGET = 99, 3, 7, 5

PERSISTENT, MEMORY = 6, 10


def text(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    """Token ids `[batch, length]` and a mask whose last row is two positions shorter."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, -2:] = 0
    ids = torch.randint(5, VOCABULARY - 1, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}


def pair(batch: int = BATCH, length: int = LENGTH, target: int = TARGET, seed: int = 0) -> dict[str, Tensor]:
    """Source and target of an encoder-decoder, both padded."""
    decoder = text(batch, target, seed + 1)
    return {**text(batch, length, seed), **{f"decoder_{name}": value for name, value in decoder.items()}}


def pixels(batch: int = BATCH, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator)}


def speech(batch: int = BATCH, target: int = TARGET, seed: int = 0) -> dict[str, Tensor]:
    """Mel features `[batch, mel, 2 * positions]`, the one length that Whisper takes, and target ids."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, 10, 2 * 11, generator=generator)
    decoder = text(batch, target, seed)
    return {"input_features": features, **{f"decoder_{name}": value for name, value in decoder.items()}}


def _bert_like(config: type, model: type, **more: int) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 44}
    return model(config(vocab_size=VOCABULARY, max_position_embeddings=70, pad_token_id=0, **{**sizes, **more}))


def bert() -> PreTrainedModel:
    return _bert_like(hf.BertConfig, hf.BertForSequenceClassification)


def roberta() -> PreTrainedModel:
    return _bert_like(hf.RobertaConfig, hf.RobertaForSequenceClassification)


def distilbert() -> PreTrainedModel:
    return hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, n_layers=3, n_heads=4, hidden_dim=44, max_position_embeddings=70
        )
    )


def electra() -> PreTrainedModel:
    return _bert_like(hf.ElectraConfig, hf.ElectraForSequenceClassification, embedding_size=20)


def modernbert() -> PreTrainedModel:
    return _bert_like(
        hf.ModernBertConfig,
        hf.ModernBertForSequenceClassification,
        local_attention=4,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    )


def gpt2() -> PreTrainedModel:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=70, bos_token_id=1, eos_token_id=2
        )
    )


def _llama_like(config: type, model: type, **more: int) -> PreTrainedModel:
    return _bert_like(config, model, hidden_size=24, num_key_value_heads=2, head_dim=8, **more)


def llama() -> PreTrainedModel:
    return _llama_like(hf.LlamaConfig, hf.LlamaForCausalLM)


def llama_of_four_queries() -> PreTrainedModel:
    """Four query heads for each of two key/value heads."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 24}
    return _bert_like(hf.LlamaConfig, hf.LlamaForCausalLM, **sizes)


def qwen3() -> PreTrainedModel:
    return _llama_like(hf.Qwen3Config, hf.Qwen3ForCausalLM)


def t5() -> PreTrainedModel:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=24,
            d_kv=8,
            d_ff=44,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=6,
            relative_attention_max_distance=9,
        )
    )


def _bart_like(config: type, model: type) -> PreTrainedModel:
    return model(
        config(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=44,
            decoder_ffn_dim=52,
            max_position_embeddings=70,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        )
    )


def bart() -> PreTrainedModel:
    return _bart_like(hf.BartConfig, hf.BartForConditionalGeneration)


def marian() -> PreTrainedModel:
    return _bart_like(hf.MarianConfig, hf.MarianMTModel)


def vit() -> PreTrainedModel:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=44,
            image_size=12,
            patch_size=4,
        )
    )


def clip_text() -> PreTrainedModel:
    return _bert_like(
        hf.CLIPTextConfig,
        hf.CLIPTextModelWithProjection,
        projection_dim=20,
        bos_token_id=1,
        eos_token_id=VOCABULARY - 1,
    )


def whisper() -> PreTrainedModel:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=10,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=44,
            decoder_ffn_dim=52,
            max_source_positions=11,
            max_target_positions=70,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        )
    )


def _segment_like(config: type, model: type, **more: int) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "memory_length": MEMORY}
    return model(config(vocab_size=VOCABULARY, max_position_embeddings=70, **sizes, **more))


def all_attention() -> PreTrainedModel:
    return _segment_like(models.AllAttentionConfig, models.AllAttentionForCausalLM, num_persistent=PERSISTENT)


def transformer_xl() -> PreTrainedModel:
    return _segment_like(models.TransformerXLConfig, models.TransformerXLForCausalLM, intermediate_size=44)


def segment() -> dict[str, Tensor]:
    """Token ids `[batch, length]`, and a memory of earlier ones for each layer, `[batch, memory, hidden]`."""
    generator = torch.Generator().manual_seed(0)
    memories = {name: torch.randn(BATCH, MEMORY, 32, generator=generator) for name in memory_names(3)}
    return {"input_ids": text()["input_ids"], **memories}


def clip_inputs() -> dict[str, Tensor]:
    inputs = text()
    inputs["input_ids"][:, 4] = VOCABULARY - 1  # the text embedding is read at the end token
    return inputs


def _family(model: Callable[[], PreTrainedModel], inputs: Callable[[], dict[str, Tensor]]) -> Callable[[int], Case]:
    def make(seed: int = 0) -> Case:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            instance = model().eval()
            # With usual weights, a head of a random model changes the output by less than rounding does.
            for name, parameter in instance.named_parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.2)
                elif name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)
        return instance, inputs()

    return make


FAMILIES: dict[str, Callable[[int], Case]] = {
    "bert": _family(bert, text),
    "roberta": _family(roberta, text),
    "distilbert": _family(distilbert, text),
    "electra": _family(electra, text),
    "modernbert": _family(modernbert, text),
    "gpt2": _family(gpt2, text),
    "llama": _family(llama, text),
    "qwen3": _family(qwen3, text),
    "t5": _family(t5, pair),
    "bart": _family(bart, pair),
    "marian": _family(marian, pair),
    "vit": _family(vit, pixels),
    "clip_text": _family(clip_text, clip_inputs),
    "whisper": _family(whisper, speech),
    "all_attention": _family(all_attention, text),
    "transformer_xl": _family(transformer_xl, text),
}

WITH_MEMORY: dict[str, Callable[[int], Case]] = {
    "all_attention": _family(all_attention, segment),
    "transformer_xl": _family(transformer_xl, segment),
}
"""Families with memory, on a segment in the middle of a text."""

GROUPED: Callable[[int], Case] = _family(llama_of_four_queries, text)
"""Four query heads for each of two key/value heads, in three layers."""
