"""Sentences of tagged words, and a tiny model that tags them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers as hf
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from compressor.model_folder import ModelFolder
from compressor.tasks.token_labels import TokenClassification
from tests.folders import rows_config
from tests.tasks.questions import wordpieces

TAGS = ("O", "B-LOC", "I-LOC", "B-NUM")
ROW = {"words": ["who", "xy", "paris"], "tags": ["O", "B-LOC", "I-LOC"]}
PLACES, OTHERS = ("paris", "rome", "river"), ("the", "who", "tall", "of", "in", "built", "xy")


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer like those of SentencePiece: a space is a character of the next word, or a piece by itself."""
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz0123456789.,'éT"]
    pieces = [("<pad>", 0.0), ("<unk>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("▁the", -1.0), ("▁r", -1.0), *letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")


def bert(tags: tuple[str, ...] = TAGS) -> PreTrainedModel:
    """A BERT of one layer and two heads of 8."""
    names = dict(enumerate(tags))
    return hf.BertForTokenClassification(
        hf.BertConfig(
            vocab_size=len(wordpieces()),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=20,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label=names,
            label2id={name: index for index, name in names.items()},
        )
    )


def folder_of(tokenizer: Any = None, tags: tuple[str, ...] = TAGS) -> ModelFolder:
    """An untrained BERT with a tokenizer."""
    model = bert(tags)
    tokenizer = tokenizer or wordpieces()
    return ModelFolder(Path("model"), model, tokenizer, model.config, "sha256:1", "token-classification", "bert")


def task_of(
    tokenizer: Any = None, metric: str = "f1", tags: tuple[str, ...] = TAGS, **fields: Any
) -> TokenClassification:
    """The task with rows of at most 16 tokens."""
    metrics = {known.name: known for known in TokenClassification.metrics}
    return TokenClassification(folder_of(tokenizer, tags), rows_config(**fields), metrics[metric])


def encode(task: TokenClassification, *rows: dict[str, Any]) -> Dataset:
    """Rows that the task has encoded."""
    dataset = Dataset.from_list(list(rows))
    task.learn_labels(dataset, "rows")
    return task.encode(dataset, "rows")


def sentence(seed: int) -> dict[str, list[str]]:
    """Words, and their tags: places of one or two words, and numbers."""
    rng = np.random.default_rng(seed)
    words, tags = [], []
    for _ in range(int(rng.integers(1, 6))):
        kind = rng.integers(4)
        if kind == 0:
            places = [str(city) for city in rng.choice(PLACES, int(rng.integers(1, 3)))]
            words += places
            tags += ["B-LOC", "I-LOC"][: len(places)]
        words.append("1889" if kind == 1 else str(rng.choice(OTHERS)))
        tags.append("B-NUM" if kind == 1 else "O")
    return {"words": words, "tags": tags}


def conll(path: Path, *rows: dict[str, list[str]]) -> str:
    """Write sentences with a column between words and tags; return the path."""
    blocks = [
        "".join(f"{word} -X- {tag}\n" for word, tag in zip(row["words"], row["tags"], strict=True)) for row in rows
    ]
    path.write_text("-DOCSTART- -X- O\n\n" + "\n".join(blocks))
    return str(path)
