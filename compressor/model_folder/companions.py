"""The names of the files that an application needs beside an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compressor.model_folder.thresholds import THRESHOLD_FILES

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "chat_template.*",
    "additional_chat_templates/*",
    "*preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    THRESHOLD_FILES,
    "LICENSE*",
    "NOTICE*",
)


def vocabulary_files(processor: Any) -> Iterator[str]:
    """The files that a tokenizer, or that of a processor, reads its vocabulary from, by the names of its class."""
    tokenizer = getattr(processor, "tokenizer", processor)
    yield from getattr(tokenizer, "vocab_files_names", {}).values()
