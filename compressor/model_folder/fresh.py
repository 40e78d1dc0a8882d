"""The model of a folder as it is before its first forward: the reference of every proof.

Some models change themselves when they run, e.g. the attention of BigBird at the first short text, or the frequencies
of dynamic rotary embeddings. What has run before a proof must not matter to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from compressor.models.model_copy import copy_of
from compressor.units.find import share_unread_sites


@dataclass(frozen=True)
class _Unused:
    """A model on which nothing runs.

    Attributes:
        model: the model.
        shared: name of each parameter that is also one of the model of a run, which may be trained -> its checksum.
    """

    model: PreTrainedModel
    shared: Mapping[str, int]

    @property
    def is_unchanged(self) -> bool:
        """Whether all shared parameters have the values that they were shared with."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return all(_checksum(parameters[name]) == checksum for name, checksum in self.shared.items())


_unused = WeakKeyDictionary[nn.Module, _Unused]()
"""Model of a run -> the model of its folder, loaded again. Equal weights are shared."""


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
        folder: the folder. One that was not loaded from files has no other model than its own, which is copied with its
            weights at the first call.
        trained: whether its weights are those of `folder.model`, which were trained; otherwise they are those of the
            files.

    Raises:
        InputError: the folder cannot be loaded again.
    """
    unused = _unused.get(folder.model)
    # Training changes weights in place, and with them those that are shared.
    if unused is None or not (trained or unused.is_unchanged):
        unused = _unused[folder.model] = _load_unused(folder)
    fresh = copy_of(unused.model)
    if trained:
        tensors = folder.model.state_dict()
        weights = {name for name, _ in folder.model.named_parameters(remove_duplicate=False)}
        values = {name: value if name in weights else value.clone() for name, value in tensors.items()}
        fresh.load_state_dict(values, assign=True)
    share_unread_sites(folder.model, fresh)
    return fresh


def _load_unused(folder: ModelFolder) -> _Unused:
    """The model of a folder, which shares the parameters of `folder.model` that have not been trained."""
    if folder.load_again is None:
        return _Unused(copy_of(folder.model, with_weights=True), {})
    model = folder.load_again().model
    shared = _share_equal_weights(model, folder.model)
    return _Unused(model, {name: _checksum(parameter) for name, parameter in shared.items()})


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
