"""Load a model folder, whose faults are reported before any other stage runs, also afresh: as it is before any forward.

Some models change themselves when they run, e.g. the attention of BigBird at the first short text, or the frequencies
of dynamic rotary embeddings. What has run before a proof must not matter to it, so that its reference is a model on
which nothing has run.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from compressor.config.own_tasks import load_own_task
from compressor.config.tasks import SEQUENCE_CLASSIFIERS
from compressor.errors import ErrorCode, InputError
from compressor.model_folder.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, find_adapter, merge_adapter
from compressor.model_folder.companions import COMPANIONS, notes_on_files, vocabulary_files
from compressor.model_folder.configuration import MODULES, load_config, read_config
from compressor.model_folder.example_inputs import example_inputs as make_inputs
from compressor.model_folder.example_inputs import read_example
from compressor.model_folder.fingerprints import fingerprint
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.model_class import model_class
from compressor.model_folder.network import load_network
from compressor.model_folder.processor import (
    IMAGE_CLASSIFICATION,
    load_processor,
    processed_size,
    require_processor,
    set_padding_token,
)
from compressor.model_folder.sentence_modules import module_folders, read_reranker_modules, read_sentence_modules
from compressor.model_folder.weight_checks import WeightFiles, check_finite, check_weight_files
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
"""Rows and tokens of the inputs by which a merged adapter is proven."""
_unused = WeakKeyDictionary[nn.Module, tuple[PreTrainedModel, Mapping[str, int]]]()
"""Model of a run -> the model of its folder, loaded again, on which nothing runs; and the names of the parameters that
the two share, because they are equal, with the checksums of what is shared."""


def load_unchanged(
    path: str | Path,
    *,
    task: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    needs_processor: bool = True,
    example_inputs: str | Path | None = None,
    pool_in_graph: bool = True,
) -> ModelFolder:
    """Load a model folder with the modules that transformers gives it; see `load`.

    The model of a folder of sentence-transformers is a `SentenceEncoder`.

    Args:
        path: the folder.
        task: the task of the model, if its class does not determine it, or a custom task.
        allow_pickle: load `pytorch_model.bin` too; reading it can run code.
        trust_remote_code: run the Python files of the folder.
        needs_processor: raise an error for a text model without a tokenizer.
        example_inputs: an .npz file with one array `[row, ...]` for each input, for a model whose inputs cannot be made
            up; None: they are made up.
        pool_in_graph: whether the exported graph of a sentence encoder pools.

    Raises:
        InputError: the folder cannot be used.
        UsageError: the task does not exist, or transformers has no class of this family for it.
    """
    own_task = load_own_task(task)
    if own_task is not None:
        task = own_task.task_class.model_task
    path = Path(path)
    adapter = find_adapter(path, remote=trust_remote_code)
    config_folder = path if adapter is None else adapter.config_folder
    weights_folder = path if adapter is None else adapter.base
    raw = read_config(config_folder)
    if weights_folder != config_folder:
        read_config(weights_folder)
    if raw.get("auto_map") and not trust_remote_code:
        raise InputError(
            f"{path}: the folder has its own Python code (auto_map in config.json), which runs only with permission;"
            " read it, then add --trust-remote-code",
            code=ErrorCode.UNSAFE_CODE,
            path=path,
            field="trust_remote_code",
        )
    files = check_weight_files(weights_folder, raw, allow_pickle)
    remote = bool(raw.get("auto_map")) and trust_remote_code
    with quiet_transformers():
        config = load_config(config_folder, trust_remote_code)
        modules_folder = path if (path / MODULES).is_file() else weights_folder
        reranker = read_reranker_modules(modules_folder) if task in (None, *SEQUENCE_CLASSIFIERS) else None
        cls, name = model_class(
            config_folder,
            config,
            task,
            remote,
            adapter_task=None if adapter is None else adapter.task,
            head=None if reranker is None else reranker.head,
        )
        if adapter is not None and not remote:
            adapter.fit_labels(cls, config)
        # A reranker of sentence-transformers has modules too, and is a classifier with one class.
        has_modules = name == _ENCODER and task is None and (modules_folder / MODULES).is_file()
        sentence = read_sentence_modules(modules_folder) if has_modules or name == SENTENCE_SIMILARITY else None
        supplied = () if adapter is None else adapter.whole
        with_summary = sentence is None and reranker is None
        model, network_notes, is_renamed = load_network(
            files, cls, config, remote=remote, with_summary=with_summary, supplied=supplied
        )
        images = name == IMAGE_CLASSIFICATION
        processor = load_processor(path, trust_remote_code, images=images)
        if processor is None and adapter is not None:
            processor = load_processor(adapter.base, trust_remote_code, images=images)
    if needs_processor and model.main_input_name == "input_ids":
        require_processor(processor, path)
    set_padding_token(model, name, processor)
    size = processed_size(path, model, processor) if images and processor is not None else None
    example = {} if example_inputs is None else read_example(example_inputs, model)
    folder = ModelFolder(
        path=path,
        model=model,
        processor=processor,
        config=model.config,
        fingerprint="",
        task=name,
        family=model.config.model_type,
        example=example,
        own_task=own_task,
        image_size=size,
    )
    check_finite(weights_folder, model)
    if adapter is not None:
        model = merge_adapter(adapter, model, make_inputs(folder, *_EXAMPLE))
    modules = sentence or reranker
    if modules is not None:
        model = modules.wrap(modules_folder, model, processor, pool_in_graph=pool_in_graph, allow_pickle=allow_pickle)
    if sentence is not None:
        name = SENTENCE_SIMILARITY
    logger.debug("%s: loaded %s for %s", path, cls.__name__, name)
    file_notes = _file_notes(path, files, adapter, processor)
    has_head = any(note.code is NoteCode.FILES_COPIED for note in file_notes)
    return replace(
        folder,
        model=model,
        config=model.config,
        fingerprint=fingerprint(model),
        task=name,
        sentence=sentence,
        notes=(*_adapter_notes(adapter), *network_notes, *file_notes),
        base=None if weights_folder == path else weights_folder,
        needs_weights=adapter is not None or is_renamed or has_head,
    )


def _adapter_notes(adapter: Adapter | None) -> tuple[Note, ...]:
    """A note on an adapter that was merged."""
    if adapter is None:
        return ()
    file = adapter.path / ADAPTER_CONFIG
    hint = "; if they contain it already, move it out of the folder" if adapter.base == adapter.path else ""
    text = f"{file}: the adapter ({adapter.kind}) is merged into the weights of {adapter.base}{hint}"
    return (Note(text=text, code=NoteCode.ADAPTER_MERGED),)


def _file_notes(path: Path, files: WeightFiles, adapter: Adapter | None, processor: Any) -> tuple[Note, ...]:
    """Notes on the files of the folder, and of that of its weights, that are not read."""
    notes: list[Note] = []
    for folder in dict.fromkeys((path, files.folder)):
        read = [*COMPANIONS, *vocabulary_files(processor)]
        read += [f"{module.partition('/')[0]}/" for module in module_folders(folder)]
        if folder == files.folder:
            read += [files.name, *files.shards]
        if adapter is not None and folder == path:
            read += [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
        elif adapter is not None and path.resolve().is_relative_to(folder.resolve()):
            read.append(f"{path.resolve().relative_to(folder.resolve()).parts[0]}/")
        notes += notes_on_files(folder, read)
    return tuple(notes)


def load(path: str | Path, **options: Any) -> ModelFolder:
    """Load a model folder; nothing is downloaded.

    The model has the forms in which it can be exported; `fresh_model` has those of the folder. The model of a folder of
    sentence-transformers is a `SentenceEncoder`.

    Args:
        path: the folder.
        options: see `load_unchanged`.

    Raises:
        InputError: the folder cannot be used.
        UsageError: the task does not exist, or transformers has no class of this family for it.
    """
    folder = load_unchanged(path, **options)
    notes = attend_by_masks(folder.model)
    return replace(folder, notes=(*folder.notes, *notes), load_again=partial(load_unchanged, path, **options))


def fresh_model(folder: ModelFolder, *, trained: bool = False) -> PreTrainedModel:
    """The model of a folder, loaded afresh: nothing has run on it.

    Args:
        folder: the folder. One that was not loaded from files has no other model than its own, which is copied with its
            weights at the first call.
        trained: whether its weights are those of `folder.model`, which were trained; otherwise they are those of the
            files.

    Raises:
        InputError: the folder cannot be loaded again.
    """
    unused = _unused.get(folder.model)
    # Training changes weights in place, and with them those that are shared.
    if unused is None or not (trained or _is_unchanged(*unused)):
        unused = _unused[folder.model] = _load_unused(folder)
    fresh = copy_of(unused[0])
    if trained:
        tensors = folder.model.state_dict()
        weights = {name for name, _ in folder.model.named_parameters(remove_duplicate=False)}
        values = {name: value if name in weights else value.clone() for name, value in tensors.items()}
        fresh.load_state_dict(values, assign=True)
    share_unread_sites(folder.model, fresh)
    return fresh


def _is_unchanged(model: nn.Module, shared: Mapping[str, int]) -> bool:
    """Whether all shared parameters have the values that they were shared with."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return all(_checksum(parameters[name]) == checksum for name, checksum in shared.items())


def _load_unused(folder: ModelFolder) -> tuple[PreTrainedModel, Mapping[str, int]]:
    """The model of a folder, which shares the parameters of `folder.model` that have not been trained."""
    if folder.load_again is None:
        return copy_of(folder.model, with_weights=True), {}
    model = folder.load_again().model
    shared = _share_equal_weights(model, folder.model)
    return model, {name: _checksum(parameter) for name, parameter in shared.items()}


def _share_equal_weights(model: nn.Module, other: nn.Module) -> dict[str, nn.Parameter]:
    """Let a model have the parameters of another one where both are equal, so that one copy is in memory.

    Returns:
        Their names in the model, and the parameters.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    others = dict(other.named_parameters(remove_duplicate=False))
    shared = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        twin = others.get(name)
        if twin is not None and twin.shape == parameter.shape and torch.equal(twin.to(parameter.device), parameter):
            path, _, leaf = name.rpartition(".")
            setattr(modules[path], leaf, twin)
            shared[name] = twin
    return shared


def _checksum(parameter: nn.Parameter) -> int:
    """A checksum of the values; versions of tensors miss what is written to `parameter.data`."""
    values = parameter.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().data)
