"""Tiny models whose heads search their ids for end tokens or separators, with tokenizers as their families have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORDS = [f"word{number}" for number in range(60)]
_SIZES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
}
_BART_IDS: dict[str, Any] = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_T5_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
_ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 70,
}


def _tokenizer(specials: str, single: str, pair: str, **names: str) -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate([*specials.split(), *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    used = [(token, vocabulary[token]) for token in specials.split() if token in single]
    words.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


def bart_tokenizer() -> PreTrainedTokenizerFast:
    """`<s> text </s>`, as BART, RoBERTa and LED."""
    pair = "<s> $A </s> </s> $B </s>"
    return _tokenizer("<s> <pad> </s> <unk>", "<s> $A </s>", pair, bos_token="<s>", cls_token="<s>", sep_token="</s>")


def mbart_tokenizer() -> PreTrainedTokenizerFast:
    """`text </s> language`, as mBART and PLBART."""
    return _tokenizer("<s> <pad> </s> <unk> en_XX", "$A </s> en_XX", "$A $B </s> en_XX", bos_token="<s>")


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """`text </s>`, as T5 and Pegasus."""
    return _tokenizer("<pad> </s> <unk>", "$A </s>", "$A </s> $B </s>")


def _bart_like(name: str, **fields: Any) -> Callable[[str], PreTrainedModel]:
    config = {**_SIZES, **_BART_IDS, "max_position_embeddings": 70, **fields}
    return lambda head: getattr(hf, name + head)(getattr(hf, f"{name}Config")(vocab_size=70, **config))


def _led(head: str) -> PreTrainedModel:
    positions: dict[str, Any] = {"max_encoder_position_embeddings": 72, "max_decoder_position_embeddings": 72}
    model: PreTrainedModel = getattr(hf, f"LED{head}")(
        hf.LEDConfig(vocab_size=70, **_SIZES, **_BART_IDS, **positions, attention_window=4)
    )
    return model


def _t5_like(name: str) -> Callable[[str], PreTrainedModel]:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2}
    return lambda head: getattr(hf, name + head)(getattr(hf, f"{name}Config")(vocab_size=70, **sizes, **_T5_IDS))


def _longformer(head: str) -> PreTrainedModel:
    ids: dict[str, Any] = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    model: PreTrainedModel = getattr(hf, f"Longformer{head}")(
        hf.LongformerConfig(vocab_size=70, **_ENCODER, **ids, attention_window=4)
    )
    return model


CLASSIFIER, ANSWERER = "ForSequenceClassification", "ForQuestionAnswering"
_FAMILIES: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], Callable[[str], PreTrainedModel]]] = {
    "bart": (bart_tokenizer, _bart_like("Bart")),
    "mvp": (bart_tokenizer, _bart_like("Mvp")),
    "mbart": (mbart_tokenizer, _bart_like("MBart")),
    "plbart": (mbart_tokenizer, _bart_like("PLBart")),
    "led": (bart_tokenizer, _led),
    "bigbird_pegasus": (t5_tokenizer, _bart_like("BigBirdPegasus", attention_type="original_full", **_T5_IDS)),
    "t5": (t5_tokenizer, _t5_like("T5")),
    "mt5": (t5_tokenizer, _t5_like("MT5")),
    "umt5": (t5_tokenizer, _t5_like("UMT5")),
    "longformer": (bart_tokenizer, _longformer),
}
MODELS: dict[str, tuple[str, str]] = {
    f"{family} {kind}": (family, head)
    for family in _FAMILIES
    for kind, head in (("classifier", CLASSIFIER), ("answerer", ANSWERER))
    if (family, head) not in (("plbart", ANSWERER), ("led", CLASSIFIER))  # transformers has no such head
}
"""Name of a model -> its family and head."""


def save(name: str, path: Path) -> Path:
    """Write the folder of a model of `MODELS`, whose weights are large enough that attention and depth matter."""
    family, head = MODELS[name]
    tokenizer, make = _FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(head).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path
