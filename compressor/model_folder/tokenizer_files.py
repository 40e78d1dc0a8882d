"""What a user of the engine needs beside it: the configuration, and the files of the tokenizer or processor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from compressor.model_folder.loading import ModelFolder

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
    _name_labels(folder, out / "config.json")


def _name_labels(folder: ModelFolder, file: Path) -> None:
    """Write the names that the classes got from the rows, so that other rows are read the same way."""
    known = json.loads(file.read_text(encoding="utf-8"))
    names = {str(index): name for index, name in (folder.config.id2label or {}).items()}
    if _told(names) and known.get("id2label") != names:
        known["id2label"], known["label2id"] = names, {name: int(index) for index, name in names.items()}
        file.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _told(names: dict[str, str]) -> bool:
    """Whether the names are more than the ones that transformers makes up."""
    return any(name != f"LABEL_{index}" for index, name in names.items())
