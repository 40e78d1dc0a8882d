"""The model of a folder as it is before its first forward: the reference of every proof.

Some models change themselves when they run, e.g. the attention of BigBird at the first short text, or the frequencies
of dynamic rotary embeddings. What has run before a proof must not matter to it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from compressor.model_folder import loading
from compressor.model_folder.folder import ModelFolder
from compressor.models.block_sparse import attend_by_masks
from compressor.units.find import restored_modes, share_unread_sites

_unused = WeakKeyDictionary[nn.Module, PreTrainedModel]()
"""Model of a run -> the model of its folder, loaded again, on which nothing runs. Equal weights are shared."""


def load(path: str | Path, **options: Any) -> ModelFolder:
    """Load a model folder; nothing is downloaded.

    The model has the forms in which it can be exported; `fresh_model` has those of the folder. The model of a folder of
    sentence-transformers is a `SentenceEncoder`.

    Args:
        path: the folder.
        options: see `loading.load`.

    Raises:
        InputError: the folder cannot be used.
        UsageError: the task does not exist, or transformers has no class of this family for it.
    """
    folder = loading.load(path, **options)
    notes = attend_by_masks(folder.model)
    return replace(folder, notes=(*folder.notes, *notes), load_again=partial(loading.load, path, **options))


def fresh_model(folder: ModelFolder, *, trained: bool = False) -> PreTrainedModel:
    """The model of a folder, loaded afresh: nothing has run on it.

    Args:
        folder: the folder. One that was not loaded from files has no other model than its own, which is copied.
        trained: whether its weights are those of `folder.model`, which were trained; otherwise they are those of the
            files.

    Raises:
        InputError: the folder cannot be loaded again.
    """
    unused = _unused.get(folder.model)
    if unused is None:
        unused = copy_of(folder.model) if folder.load_again is None else folder.load_again().model
        _share_equal_weights(unused, folder.model)
        _unused[folder.model] = unused
    fresh = copy_of(unused)
    if trained:
        tensors = folder.model.state_dict()
        weights = {name for name, _ in folder.model.named_parameters(remove_duplicate=False)}
        values = {name: value if name in weights else value.clone() for name, value in tensors.items()}
        fresh.load_state_dict(values, assign=True)
    share_unread_sites(folder.model, fresh)
    return fresh


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model in evaluation mode, which shares its parameters and nothing else that a forward can change."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    with restored_modes(model):
        model.train()  # LeViT caches in evaluation mode what cannot be copied
        duplicate = copy.deepcopy(model, parameters)
    share_unread_sites(model, duplicate)
    return duplicate.eval()


def _share_equal_weights(model: nn.Module, other: nn.Module) -> None:
    """Let a model have the parameters of another one where both are equal, so that one copy is in memory."""
    modules = dict(model.named_modules(remove_duplicate=False))
    others = dict(other.named_parameters(remove_duplicate=False))
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        twin = others.get(name)
        if twin is not None and twin.shape == parameter.shape and torch.equal(twin.to(parameter.device), parameter):
            path, _, leaf = name.rpartition(".")
            setattr(modules[path], leaf, twin)
