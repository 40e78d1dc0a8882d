"""Copy the files that an application needs beside the engine: configuration, tokenizer or processor, licence."""

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
    """Copy configuration, tokenizer or processor files and licence, but no weights or code, into the folder `out`."""
    for pattern in _PATTERNS:
        for file in sorted(folder.path.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    _save_label_names(folder, out / "config.json")


def _save_label_names(folder: ModelFolder, file: Path) -> None:
    """Write class names that were learned from rows, so that the labels of other rows are mapped in the same way."""
    config = json.loads(file.read_text(encoding="utf-8"))
    names = {str(index): name for index, name in (folder.config.id2label or {}).items()}
    if not _are_defaults(names) and config.get("id2label") != names:
        config["id2label"], config["label2id"] = names, {name: int(index) for index, name in names.items()}
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _are_defaults(names: dict[str, str]) -> bool:
    """Whether the names are those that transformers generates."""
    return all(name == f"LABEL_{index}" for index, name in names.items())
