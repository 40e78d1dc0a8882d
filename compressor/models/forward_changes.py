"""What a forward changes in a model besides its outputs: attributes, buffers and modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.silence_libraries import quiet_transformers
from compressor.units.find import evaluation_mode

_CLASS = "__class__"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Change:
    """An attribute of a module that a forward changed.

    Attributes:
        module: path of the module; empty for the model itself.
        name: name of the attribute; `__class__` where another module is in its place.
        before: its value if that is a number or a text; None for tensors and what was not there.
        after: its value afterwards.
    """

    module: str
    name: str
    before: Any = None
    after: Any = None


def changes_of_forward(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> tuple[Change, ...]:
    """What a forward changes in the attributes of a model's modules; the model is changed.

    Args:
        model: a model.
        inputs: arguments of its forward.
    """
    with evaluation_mode(model), quiet_transformers(), torch.no_grad():
        before = _state(model)
        model(**inputs)
        after = _state(model)
    changes = []
    for module, name in sorted(before.keys() | after.keys()):
        pair = before.get((module, name)), after.get((module, name))
        if pair[0] != pair[1]:
            shown = [value if isinstance(value, _PLAIN) else None for value in pair]
            changes.append(Change(module, name, *shown))
    return tuple(changes)


def switch_of_changes(changes_at: Callable[[int], tuple[Change, ...]], shortest: int, longest: int) -> int | None:
    """The largest length up to which a forward changes the same attributes as at the shortest; None: at all lengths.

    Args:
        changes_at: what a forward on a text of some length changes in a model that nothing has run on.
        shortest: a length.
        longest: a greater length.
    """

    def changed(length: int) -> set[tuple[str, str]]:
        return {(change.module, change.name) for change in changes_at(length)}

    usual = changed(shortest)
    if longest <= shortest or changed(longest) == usual:
        return None
    low, high = shortest, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if changed(middle) == usual else (low, middle)
    return low


def _state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Path and name -> value of what modules hold besides weights; tensors as bytes, so that they can be compared."""
    state: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        state[path, _CLASS] = type(module).__name__
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                state[path, name] = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            elif isinstance(value, (np.generic, *_PLAIN)) and not name.startswith("_"):
                state[path, name] = value
    return state
