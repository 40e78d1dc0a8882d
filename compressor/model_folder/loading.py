"""Load a model folder, and load it again as a reference of proofs.

Some models change when they run, e.g. the attention of BigBird at the first short text, or the frequencies of dynamic
rotary embeddings. The reference of a proof is therefore a model that has not run.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.config.tasks import SEQUENCE_CLASSIFIERS, load_own_task
from compressor.errors import ErrorCode, InputError
from compressor.model_folder.access import access_of
from compressor.model_folder.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, find_adapter, merge_adapter
from compressor.model_folder.companions import COMPANIONS, notes_on_files, vocabulary_files
from compressor.model_folder.examples import example_inputs as make_inputs
from compressor.model_folder.feeds import read_example
from compressor.model_folder.files import (
    MODULES,
    WeightFiles,
    check_finite,
    check_weight_files,
    load_config,
    read_config,
)
from compressor.model_folder.fingerprints import fingerprint
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.model_class import model_class
from compressor.model_folder.network import load_network
from compressor.model_folder.processor import (
    IMAGE_CLASSIFICATION,
    load_processor,
    readable_size,
    require_processor,
    set_padding_token,
)
from compressor.model_folder.sentence_modules import (
    RerankerModules,
    SentenceModules,
    read_reranker_modules,
    read_sentence_modules,
)
from compressor.model_folder.sentence_texts import module_folders
from compressor.models.block_sparse import attend_by_masks
from compressor.models.forward_changes import copy_of
from compressor.results import Note, NoteCode
from compressor.silence_libraries import quiet_transformers
from compressor.units.find import share_unread_sites

logger = logging.getLogger(__name__)

SENTENCE_SIMILARITY = "sentence-similarity"
_ENCODER = "feature-extraction"
"""Names of the tasks of an encoder with and without pooling."""
_EXAMPLE = (2, 8)
"""Examples and tokens of the inputs by which a merged adapter is proven."""
_NEED_WEIGHTS = (NoteCode.FILES_COPIED, NoteCode.PREFIX_REMOVED)
"""Notes on folders whose output needs a file of the weights; see `ModelFolder.needs_weights`."""
_unused = WeakKeyDictionary[nn.Module, tuple[PreTrainedModel, Mapping[str, int]]]()
"""Model of a run -> the model of its folder, loaded again, which never runs; and the names of the parameters that both
share because they are equal, with their checksums."""


@dataclass(frozen=True)
class _Parts:
    """Where the parts of a model folder are, which an adapter divides among two folders.

    Attributes:
        path: the folder.
        adapter: its adapter; None: it has none.
        config: the folder of the configuration.
        weights: the files of the weights.
        remote: whether Python files of the folder run.
    """

    path: Path
    adapter: Adapter | None
    config: Path
    weights: WeightFiles
    remote: bool

    @property
    def modules(self) -> Path:
        """The folder that lists modules of sentence-transformers, if one does."""
        return self.path if (self.path / MODULES).is_file() else self.weights.folder


def load_unchanged(
    path: str | Path,
    *,
    task: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    needs_processor: bool = True,
    inputs: str | Path | None = None,
    pool_in_graph: bool = True,
) -> ModelFolder:
    """Load a model folder with the modules that transformers gives it; see `load`.

    Args:
        task: the task of the model, if its class does not determine it, or a custom task.
        allow_pickle: load `pytorch_model.bin` too; reading it can run code.
        trust_remote_code: run the Python files of the folder.
        needs_processor: raise an error for a text model without a tokenizer.
        inputs: an .npz file with an array `[example, ...]` for each input, for a model whose inputs cannot be
            generated; None: they are generated.
        pool_in_graph: whether the exported graph of a sentence encoder pools.

    Raises:
        InputError: the folder cannot be used.
        UsageError: the task does not exist, or transformers has no class of this family for it.
    """
    own_task = load_own_task(task)
    if own_task is not None:
        task = own_task.task_class.model_task
    parts = _find_parts(Path(path), allow_pickle, trust_remote_code)
    with quiet_transformers():
        config = load_config(parts.config, trust_remote_code)
        cls, name, modules = _choose_class(parts, config, task)
        supplied = () if parts.adapter is None else parts.adapter.whole
        model, notes = load_network(
            parts.weights, cls, config, remote=parts.remote, with_summary=modules is None, supplied=supplied
        )
        folders = [parts.path] if parts.adapter is None else [parts.path, parts.adapter.base]
        is_of_images = name == IMAGE_CLASSIFICATION
        loaded = (load_processor(folder, trust_remote_code, images=is_of_images) for folder in folders)
        processor = next((processor for processor in loaded if processor is not None), None)
    if needs_processor and model.main_input_name == "input_ids":
        require_processor(processor, parts.path)
    set_padding_token(model, name, processor)
    has_images = is_of_images and processor is not None
    folder = ModelFolder(
        path=parts.path,
        model=model,
        processor=processor,
        config=model.config,
        fingerprint="",
        task=name,
        family=model.config.model_type,
        notes=notes,
        example={} if inputs is None else read_example(inputs, model),
        own_task=own_task,
        image_size=readable_size(parts.path, access_of(model).forward(), processor) if has_images else None,
    )
    return _complete(folder, parts, modules, pool_in_graph=pool_in_graph, allow_pickle=allow_pickle)


def _find_parts(path: Path, allow_pickle: bool, trust_remote_code: bool) -> _Parts:
    """Find the files of a folder; raise InputError where they cannot be used or run code without permission."""
    adapter = find_adapter(path, remote=trust_remote_code)
    config, weights = (path, path) if adapter is None else (adapter.config_folder, adapter.base)
    raw = read_config(config)
    if weights != config:
        read_config(weights)
    has_code = bool(raw.get("auto_map"))
    if has_code and not trust_remote_code:
        raise InputError.of_file(
            path,
            "the folder has its own Python code (auto_map in config.json), which runs only with permission;"
            " read it, then add --trust-remote-code",
            ErrorCode.UNSAFE_CODE,
            field="trust_remote_code",
        )
    return _Parts(path, adapter, config, check_weight_files(weights, raw, allow_pickle), has_code)


def _choose_class(
    parts: _Parts, config: PretrainedConfig, task: str | None
) -> tuple[Any, str, SentenceModules | RerankerModules | None]:
    """The class to load, the name of its task, and the modules of sentence-transformers around the model."""
    adapter = parts.adapter
    reranker = read_reranker_modules(parts.modules) if task in (None, *SEQUENCE_CLASSIFIERS) else None
    cls, name = model_class(
        parts.config,
        config,
        task,
        parts.remote,
        adapter_task=None if adapter is None else adapter.task,
        head=None if reranker is None else reranker.head,
    )
    if adapter is not None and not parts.remote:
        adapter.fit_labels(cls, config)
    # A reranker of sentence-transformers has modules too, and is a classifier with one class.
    has_modules = name == _ENCODER and task is None and (parts.modules / MODULES).is_file()
    if has_modules or name == SENTENCE_SIMILARITY:
        return cls, name, read_sentence_modules(parts.modules)
    return cls, name, reranker


def _complete(
    folder: ModelFolder, parts: _Parts, modules: SentenceModules | RerankerModules | None, **options: bool
) -> ModelFolder:
    """A folder whose adapter is merged into its model, and whose modules surround it."""
    model, weights, sentence = folder.model, parts.weights.folder, None
    check_finite(weights, model)
    merged: tuple[Note, ...] = ()
    if (adapter := parts.adapter) is not None:
        model = merge_adapter(adapter, model, make_inputs(folder, *_EXAMPLE))
        hint = "; if they contain it already, move it out of the folder" if adapter.base == adapter.path else ""
        text = f"{adapter.file}: the adapter ({adapter.kind}) is merged into the weights of {adapter.base}{hint}"
        merged = (Note(text=text, code=NoteCode.ADAPTER_MERGED),)
    if modules is not None:
        model = modules.wrap(parts.modules, model, folder.processor, **options)
        sentence = modules if isinstance(modules, SentenceModules) else None
    notes = (*merged, *folder.notes, *_file_notes(parts, folder.processor))
    task = folder.task if sentence is None else SENTENCE_SIMILARITY
    logger.debug("%s: loaded %s for %s", folder.path, type(model).__name__, task)
    return replace(
        folder,
        model=model,
        config=model.config,
        fingerprint=fingerprint(model),
        task=task,
        sentence=sentence,
        notes=notes,
        base=None if weights == folder.path else weights,
        needs_weights=adapter is not None or any(note.code in _NEED_WEIGHTS for note in notes),
    )


def _file_notes(parts: _Parts, processor: Any) -> Iterator[Note]:
    """Notes on the files of the folder, and of that of its weights, that are not read."""
    path, files, adapter = parts.path, parts.weights, parts.adapter
    for folder in dict.fromkeys((path, files.folder)):
        read = [*COMPANIONS, *vocabulary_files(processor)]
        read += [f"{module.partition('/')[0]}/" for module in module_folders(folder)]
        if folder == files.folder:
            read += [files.name, *files.shards]
        if adapter is not None and folder == path:
            read += [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
        elif adapter is not None and path.resolve().is_relative_to(folder.resolve()):
            read.append(f"{path.resolve().relative_to(folder.resolve()).parts[0]}/")
        yield from notes_on_files(folder, read)


def load_exportable(path: str | Path, **options: Any) -> ModelFolder:
    """Load a model folder, whose modules that cannot be exported are replaced; `fresh_model` keeps them.

    The model of a folder of sentence-transformers is a `SentenceEncoder`, or a `ModuleReranker`.

    Args:
        options: see `load_unchanged`.

    Raises:
        InputError: the folder cannot be used.
        UsageError: the task does not exist, or transformers has no class of this family for it.
    """
    folder = load_unchanged(path, **options)
    notes = attend_by_masks(folder.model)
    return replace(folder, notes=(*folder.notes, *notes), load_again=partial(load_unchanged, path, **options))


def fresh_model(folder: ModelFolder, *, trained: bool = False) -> PreTrainedModel:
    """The model of a folder, loaded again; it has not run.

    Args:
        folder: the folder. The model of a folder that was not loaded from files is copied at the first call.
        trained: whether the weights are those of `folder.model`, instead of those of the files.

    Raises:
        InputError: the folder cannot be loaded again.
    """
    unused = _unused.get(folder.model)
    # Training changes weights in place, and with them those that are shared.
    if unused is None or not (trained or _checksums(unused[0], unused[1]) == unused[1]):
        unused = _unused[folder.model] = _load_unused(folder)
    fresh = copy_of(unused[0])
    if trained:
        tensors = folder.model.state_dict()
        weights = {name for name, _ in folder.model.named_parameters(remove_duplicate=False)}
        values = {name: value if name in weights else value.clone() for name, value in tensors.items()}
        fresh.load_state_dict(values, assign=True)
    share_unread_sites(folder.model, fresh)
    return fresh


def _load_unused(folder: ModelFolder) -> tuple[PreTrainedModel, Mapping[str, int]]:
    """The model of a folder, which shares the parameters of `folder.model` that have not been trained."""
    if folder.load_again is None:
        return copy_of(folder.model, with_weights=True), {}
    model = folder.load_again().model
    return model, _checksums(model, _share_equal_weights(model, folder.model))


def _share_equal_weights(model: nn.Module, source: nn.Module) -> list[str]:
    """Replace parameters of a model by equal ones of `source`, to keep one copy in memory; returns their names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(source.named_parameters(remove_duplicate=False))
    shared = []
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        twin = parameters.get(name)
        if twin is not None and twin.shape == parameter.shape and torch.equal(twin.to(parameter.device), parameter):
            path, _, leaf = name.rpartition(".")
            setattr(modules[path], leaf, twin)
            shared.append(name)
    return shared


def _checksums(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Name -> checksum of a parameter's values; a tensor's version counter misses what is written to its `data`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = ((name, parameters[name].detach().cpu().contiguous().reshape(-1)) for name in names)
    return {name: zlib.crc32(tensor.view(torch.uint8).numpy().data) for name, tensor in values}
