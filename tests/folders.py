"""Tiny model folders on disk, with a tokenizer whose vocabulary is a few words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = "good bad film plot the a very not at all one two three four five six seven eight nine ten".split()


@dataclass(frozen=True)
class Request:
    """The part of a recipe that says which rows to use."""

    data: str | None = None
    eval_data: str | None = None
    test_data: str | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str | None = None
    metric: str | None = None
    max_length: int = 16
    stride: int = 128
    seed: int = 0


def tokenizer() -> PreTrainedTokenizerFast:
    """Words by their spaces, marked as BERT marks one or two texts."""
    vocabulary = {word: index for index, word in enumerate((*MARKS, *WORDS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def bert(**more: Any) -> PreTrainedModel:
    """A BERT of one layer that classifies; `num_labels=1` makes it regress."""
    return hf.BertForSequenceClassification(hf.BertConfig(**_sizes(), **more))


def bert_encoder() -> PreTrainedModel:
    """The same without a head."""
    return hf.BertModel(hf.BertConfig(**_sizes()))


def gpt2(kind: type = hf.GPT2LMHeadModel) -> PreTrainedModel:
    """A GPT-2 of one layer under the head of `kind`."""
    return kind(
        hf.GPT2Config(vocab_size=25, n_embd=16, n_layer=1, n_head=2, n_positions=20, bos_token_id=2, eos_token_id=3)
    )


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": 25,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 20,
    }


def save(model: PreTrainedModel, path: Path, *, with_tokenizer: bool = True, half: bool = False) -> Path:
    """Write the folder as transformers does, in half precision if asked."""
    (model.half() if half else model).save_pretrained(path)
    model.float()
    if with_tokenizer:
        tokenizer().save_pretrained(path)
    return path
