"""Copy the files that an application needs beside an engine: configuration, tokenizer or processor, licence.

Folders of sentence-transformers have further files. Notes name the files of a model folder that are neither read nor
copied, except those without effect on the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from compressor.answers import has_default_names, several_answers
from compressor.model_folder.files import CONFIG, THRESHOLD_FILES, read_json
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.sentence_texts import module_folders
from compressor.results import Note, NoteCode
from graph_passes.errors import listed

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.spm", "*.tiktoken", "chat_template.*", "additional_chat_templates/*"),
)
COMPANIONS = (
    *("config.json", "generation_config.json", "*preprocessor_config.json", "processor_config.json", THRESHOLD_FILES),
    *TOKENIZER_FILES,
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "LICENSE*", "NOTICE*"),
)
HEADS = ("model_head.*", "config_setfit.json")
"""Files of heads that other libraries run on embeddings: SetFit's, which is often a pickle and is never opened."""
_HARMLESS = (
    *(".*", "README*", "*.md", "*.py", "*.log", "*.png", "*.jpg", "*.jpeg", "*.svg", "*.gif", "*.pdf"),
    *("requirements.txt", "USE_POLICY*"),
    # of training
    *("training_args.bin", "optimizer.*", "scheduler.*", "scaler.pt", "rng_state*", "trainer_state.json"),
    *("*_results.json", "events.out.tfevents*", "checkpoint-*/", "runs/", "logs/", "__pycache__/"),
    # the same weights in other formats
    *("pytorch_model*.bin", "pytorch_model*.bin.index.json", "adapter_model.bin", "consolidated*", "params.json"),
    *("*.msgpack", "*.h5", "*.ot", "*.gguf", "*.tflite", "*.onnx", "*.onnx.data", "*.onnx_data"),
    *("onnx/", "openvino/", "coreml/", "gguf/"),
    # of this package
    *("compress.toml", "plan.json", "plan.safetensors", "maps.safetensors", "report.*", "run-report.*"),
    *("training.json", "engine.*", "blocks/"),
)
"""Names of files and folders without effect on the model that is loaded. Weights in other formats than safetensors are
copies."""


def vocabulary_files(processor: Any) -> Iterator[str]:
    """The files that a tokenizer, or that of a processor, reads its vocabulary from, by the names of its class."""
    tokenizer = getattr(processor, "tokenizer", processor)
    yield from getattr(tokenizer, "vocab_files_names", {}).values()


def notes_on_files(folder: Path, read: Collection[str]) -> Iterator[Note]:
    """Notes on heads that are copied, and on what is neither read nor copied.

    Args:
        read: patterns of the files and folders that are read or copied; those of folders end in `/`.
    """
    heads = sorted(file.name for pattern in HEADS for file in folder.glob(pattern))
    if heads:
        text = f"{folder}: {' and '.join(heads)} are copied; the library that wrote them runs them, not the engine"
        yield Note(text=text, code=NoteCode.FILES_COPIED)
    known = (*read, *HEADS, *_HARMLESS)
    names = (f"{path.name}/" if path.is_dir() else path.name for path in sorted(folder.iterdir()))
    unread = [name for name in names if not any(fnmatch(name, pattern) for pattern in known)]
    unread = [name for name in unread if not name.endswith("/") or any((folder / name).iterdir())]
    if unread:
        text = f"{folder}: {listed(unread, 5)} are neither read nor copied, because no file refers to them"
        yield Note(text=text, code=NoteCode.FILES_UNREAD)


def save_companions(folder: ModelFolder, out: Path) -> None:
    """Copy configuration, tokenizer or processor files and licence, but no weights or code, into the folder `out`.

    Weights of dense layers are written too, because the library loads them with every engine. Heads that other
    libraries run are copied unread. Files of an adapter replace those of its base in another folder, and
    those of a tokenizer in another folder the tokenizer beside a graph.
    """
    vocabulary = tuple(vocabulary_files(folder.processor))
    for source in filter(None, (folder.base, folder.path)):
        modules = (f"{path}/config.json" for path in module_folders(source))
        _copy_files(source, (*COMPANIONS, *HEADS, *modules, *vocabulary), out)
    if folder.tokenizer is not None:
        _copy_files(folder.tokenizer, (*TOKENIZER_FILES, *vocabulary), out)
    _save_labels(folder, out / CONFIG)
    folder.access.save_layers(folder, out)


def _copy_files(source: Path, patterns: Iterable[str], out: Path) -> None:
    """Copy the files of a folder that match patterns, to the same paths in another folder."""
    for pattern in dict.fromkeys(patterns):
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                copy = out / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def _save_labels(folder: ModelFolder, file: Path) -> None:
    """Write class names that were learned from labels, so that later runs map them alike, and a `problem_type`."""
    if not file.is_file():  # a graph without configuration
        return
    config = read_json(file)
    names = {str(index): name for index, name in (folder.config.id2label or {}).items()}
    has_names = not has_default_names(folder.config) and config.get("id2label") != names
    has_problem = several_answers(folder.config) and config.get("problem_type") != folder.config.problem_type
    if has_names:
        config["id2label"], config["label2id"] = names, {name: int(index) for index, name in names.items()}
    if has_problem:
        config["problem_type"] = folder.config.problem_type
    if has_names or has_problem:
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
