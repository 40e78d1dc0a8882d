"""Pairs of texts in two small languages, and tiny encoder-decoders to translate them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from compressor.model_folder import ModelFolder
from compressor.tasks import Data, open_data
from tests.folders import rows_config
from tests.tasks import rows

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
GERMAN = "ein zwei hund katze haus rot blau gross".split()
ENGLISH = "one two dog cat house red blue big".split()


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words of both languages, with an end token after every text."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL_TOKENS, *GERMAN, *ENGLISH))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def marian() -> PreTrainedModel:
    """A Marian of one layer per side, two heads of 8."""
    return hf.MarianMTModel(
        hf.MarianConfig(
            vocab_size=len(SPECIAL_TOKENS) + len(GERMAN) + len(ENGLISH),
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=20,
            decoder_ffn_dim=20,
            max_position_embeddings=24,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            decoder_start_token_id=0,
            forced_eos_token_id=1,
        )
    )


def t5() -> PreTrainedModel:
    """A T5 of one layer per side, two heads of 8."""
    start: dict[str, Any] = {"decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=19, d_model=16, d_kv=8, d_ff=20, num_layers=1, num_heads=2, **start)
    )


def save(model: PreTrainedModel, path: Path) -> Path:
    """Write a model folder, with weights large enough for heads to have an effect."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def sentence(seed: int) -> tuple[str, str]:
    """A German text of one to five words, and its translation word by word."""
    words = np.random.default_rng(seed).integers(0, len(GERMAN), 1 + seed % 5)
    return " ".join(GERMAN[word] for word in words), " ".join(ENGLISH[word] for word in words)


def tsv(path: Path, *lines: str, header: str = "de\ten") -> str:
    """Write pairs whose texts are separated by tabs; return the path."""
    return rows.tsv(path, *lines, header=header)


def open_pairs(folder: ModelFolder, path: str, **fields: Any) -> Data:
    """The rows of one file for every purpose."""
    return open_data(rows_config(path, path, path, **fields), folder)
