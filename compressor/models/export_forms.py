"""Functions of transformers are exported in forms whose graph runs at any length, and with any number of images."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as shape_settings
from transformers.exporters.utils import patch_attributes

from compressor.models.image_positions import resized_at_once
from compressor.models.recurrences import chunk_by_chunk, cut_to_length, linear_recurrence, selective_scan
from compressor.models.rotary import frequencies_by_length

Function = Callable[..., Any]
_FORMS: dict[str, Callable[[Function], Function]] = {
    "mamba2_chunk_scan": cut_to_length,
    "mamba_selective_scan": selective_scan,
    "_rnn_scan": linear_recurrence,
    "torch_chunk_gated_delta_rule": chunk_by_chunk,
    "chunk_kimi_delta_attention": chunk_by_chunk,
    "resize_positional_embeddings": resized_at_once,
}
"""Name of a function or method of transformers -> the form for the export, from the original."""


@contextlib.contextmanager
def any_length(model: nn.Module) -> Iterator[None]:
    """While inside, functions of a model have the forms that torch.export exports for inputs of any length.

    These are the functions and methods of a name in `_FORMS`, in a module of Python or a class of the model's parts,
    and dynamic rotary embeddings.
    """
    with frequencies_by_length(model), _forms(model):
        yield


@contextlib.contextmanager
def _forms(model: nn.Module) -> Iterator[None]:
    """While inside, the functions of a name in `_FORMS` have their forms."""
    classes = {type(part) for part in model.modules()}
    modules = {module for cls in classes if (module := sys.modules.get(cls.__module__)) is not None}
    owners: tuple[type | ModuleType, ...] = (*classes, *modules)
    patches = [(owner, name, form) for owner in owners for name, form in _FORMS.items() if name in vars(owner)]
    if not patches:
        yield
        return
    with contextlib.ExitStack() as undo:
        for owner, name, form in patches:
            undo.enter_context(_replaced(owner, name, form))
        # Sizes of one, such as a single chunk, stay free too.
        undo.enter_context(patch_attributes([(shape_settings, "backed_size_oblivious", lambda _: True)]))
        undo.enter_context(torch.no_grad())  # what `scan` repeats may write in place, without gradients
        yield


@contextlib.contextmanager
def _replaced(owner: type | ModuleType, name: str, form: Callable[[Function], Function]) -> Iterator[None]:
    """While inside, an attribute has another form; a static method stays one."""
    original, replacement = vars(owner)[name], form(getattr(owner, name))
    setattr(owner, name, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
