"""Questions about contexts of a few words, and tiny models with two kinds of tokenizers that answer them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from datasets import Dataset
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from compressor.model_folder import ModelFolder
from compressor.models.forwards import tensors_of
from compressor.tasks import Task
from compressor.tasks.base import Batch, Forward
from compressor.tasks.question_answering import Answer, QuestionAnswering
from tests.folders import rows_config

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,'é"
WORDS = "paris rome river tall the of in built tower who city 1889".split()
WORD = st.one_of(st.sampled_from([*WORDS, "Tower.", "d'été"]), st.text(LETTERS, min_size=1, max_size=8))
CONTEXTS = st.lists(WORD, min_size=1).map(" ".join)


def wordpieces() -> PreTrainedTokenizerFast:
    """A tokenizer like BERT's, of whole words and letters."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    pieces = dict.fromkeys((*special, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)))
    tokenizer = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def byte_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's, of bytes: a space belongs to the next word, and a letter may be two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(["<s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <s>", pair="<s> $A <s> $B <s>", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<s>",
        eos_token="<s>",
        model_input_names=["input_ids", "attention_mask"],
    )


def bert() -> PreTrainedModel:
    """A BERT of one layer and two heads of 8."""
    return hf.BertForQuestionAnswering(
        hf.BertConfig(
            vocab_size=len(wordpieces()),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=20,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def folder_of(tokenizer: Any) -> ModelFolder:
    """An untrained BERT with a tokenizer."""
    model = bert()
    return ModelFolder(Path("model"), model, tokenizer, model.config, "sha256:1", "question-answering", "bert")


def task_of(tokenizer: Any, max_length: int = 24, stride: int = 5, metric: str = "f1") -> QuestionAnswering:
    """The task with windows of `max_length` tokens that share `stride` of them."""
    metrics = {known.name: known for known in QuestionAnswering.metrics}
    rows = rows_config(max_length=max_length, stride=stride)
    return QuestionAnswering(folder_of(tokenizer), rows, metrics[metric])


def row(context: str, question: str = "who", *answers: Answer) -> dict[str, Any]:
    """A question; unless answers are given, the first word of the context answers it."""
    accepted = answers or (Answer(context.split()[0], context.index(context.split()[0])),)
    return {"id": "1", "context": context, "question": question, "answers": [answer._asdict() for answer in accepted]}


def encode(task: Task, *rows: dict[str, Any]) -> Any:
    """Rows that the task has encoded."""
    dataset = Dataset.from_list(list(rows))
    task.learn_labels(dataset, "rows")
    return task.encode(dataset, "rows")


def forward_of(task: Task, model: PreTrainedModel) -> Forward:
    """Run batches on a PyTorch model."""

    def forward(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return task.logits(model(**tensors_of(batch)))

    return forward
