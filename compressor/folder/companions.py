"""What a user of the engine needs beside it: the configuration, and the files of the tokenizer or processor."""

from __future__ import annotations

import shutil
from pathlib import Path

from compressor.folder.loading import ModelFolder

_PATTERNS = (
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
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "NOTICE*",
)


def save_companions(folder: ModelFolder, out: Path) -> None:
    """Copy the configuration, the processor's files and the licence into `out`, which exists. No weights, no code."""
    for pattern in _PATTERNS:
        for file in sorted(folder.path.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
