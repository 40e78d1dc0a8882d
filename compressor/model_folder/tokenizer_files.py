"""Copy the files that an application needs beside the engine: configuration, tokenizer or processor, licence.

Folders of sentence-transformers have further files, and the library looks for engines under names of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from compressor.model_folder.companions import COMPANIONS, vocabulary_files
from compressor.model_folder.dense_layers import save_layers
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.sentence_files import MODULES
from compressor.model_folder.sentence_modules import module_folders
from compressor.model_folder.unread_files import HEADS
from compressor.models.answer_kind import several_answers
from compressor.models.class_names import has_default_names
from compressor.models.module_reranker import ModuleReranker
from compressor.models.sentence_encoder import SentenceEncoder

_LIBRARY_NAMES = {
    "engine.xml": "openvino/openvino_model.xml",
    "engine.bin": "openvino/openvino_model.bin",
}
"""File of an engine -> name under which sentence-transformers searches it."""
_LIBRARY_SETTINGS = {"sentence_transformers", "sbert_ce_default_activation_function"}
"""Keys of `config.json` for settings of sentence-transformers, such as the activation of a reranker; the second is that
of older versions."""


def save_companions(folder: ModelFolder, out: Path) -> None:
    """Copy configuration, tokenizer or processor files and licence, but no weights or code, into the folder `out`.

    Weights of dense layers are written too: the library loads them beside every engine. Heads that other libraries run
    are copied unread. Where an adapter is in another folder than its base, its files replace those of the base.
    """
    for source in filter(None, (folder.base, folder.path)):
        modules = (f"{path}/config.json" for path in module_folders(source))
        for pattern in dict.fromkeys((*COMPANIONS, *HEADS, *modules, *vocabulary_files(folder.processor))):
            for file in sorted(source.glob(pattern)):
                if file.is_file():
                    copy = out / file.relative_to(source)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)
    _save_labels(folder, out / "config.json")
    if isinstance(folder.model, SentenceEncoder) and folder.sentence is not None:
        save_layers(folder.model.dense_layers, [out / path for path in folder.sentence.dense])
    if isinstance(folder.model, ModuleReranker):
        save_layers(folder.model.layers, [out / path for path in folder.model.folders])


def link_library_files(out: Path) -> None:
    """Give an engine for OpenVINO the name by which sentence-transformers finds it, where the folder is one of its own.

    Folders of older rerankers have no `modules.json`; the library's settings in `config.json` tell them apart.
    The ONNX backend of the library reads `model.onnx`, which is in every output folder. Links take no space; an earlier
    engine's are replaced.
    """
    if not _is_of_library(out):
        return
    for name, library_name in _LIBRARY_NAMES.items():
        link = out / library_name
        link.unlink(missing_ok=True)
        if (out / name).is_file():
            link.parent.mkdir(exist_ok=True)
            try:
                link.hardlink_to(out / name)
            except OSError:  # a file system without links
                shutil.copyfile(out / name, link)


def _save_labels(folder: ModelFolder, file: Path) -> None:
    """Write class names that were learned from rows, so that the labels of other rows are mapped in the same way.

    Whether a row has several answers is written too, where `--task` says so: applications read it.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    names = {str(index): name for index, name in (folder.config.id2label or {}).items()}
    has_names = not has_default_names(folder.config) and config.get("id2label") != names
    has_problem = several_answers(folder.config) and config.get("problem_type") != folder.config.problem_type
    if has_names:
        config["id2label"], config["label2id"] = names, {name: int(index) for index, name in names.items()}
    if has_problem:
        config["problem_type"] = folder.config.problem_type
    if has_names or has_problem:
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _is_of_library(out: Path) -> bool:
    """Whether a folder is one of sentence-transformers."""
    if (out / MODULES).is_file():
        return True
    config = out / "config.json"
    return config.is_file() and not _LIBRARY_SETTINGS.isdisjoint(json.loads(config.read_text(encoding="utf-8")))
