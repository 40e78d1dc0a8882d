"""Attributes that a forward changes in a model, and lengths and equal scores at which its function changes.

The indexer of sparse attention chooses the keys with the largest scores. These are sums of rectified matmuls, so that
several keys may have the score zero. PyTorch chooses among them by its kernel; ONNX's TopK chooses the first.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from compressor.model_folder.text_limits import DYNAMIC, extension, text_config
from compressor.silence_libraries import quiet_transformers
from compressor.units.find import evaluation_mode, restored_modes, share_unread_sites

_CLASS = "__class__"
_PLAIN = (bool, int, float, str, type(None))
_REACH = re.compile(r"(sliding_|attention_)?window(_size)?|local_(attention|radius)|\w*chunk_(size|length)")
"""Names of configuration entries that hold a number of positions."""
_PARTIAL = ("sliding", "chunk", "local", "window", "linear", "mamba", "conv")
"""Parts of the names of layer types to which such an entry may apply."""
_CHOSEN = "index_topk"
"""Name of the entry with the number of keys that sparse attention chooses."""
_TOPK: tuple[Callable[..., Any], ...] = (torch.topk, torch.Tensor.topk)


def copy_of(model: PreTrainedModel, *, with_weights: bool = False) -> PreTrainedModel:
    """Copy a model, in evaluation mode; only its parameters are shared, unless they are copied `with_weights`."""
    parameters = {} if with_weights else {id(parameter): parameter for parameter in model.parameters()}
    with restored_modes(model):
        model.train()  # LeViT caches in evaluation mode what cannot be copied
        duplicate = copy.deepcopy(model, parameters)
    share_unread_sites(model, duplicate)
    return duplicate.eval()


@dataclass(frozen=True)
class Change:
    """An attribute of a module that a forward changed.

    Attributes:
        module: path of the module; empty for the model itself.
        name: name of the attribute; `__class__` if the module was replaced.
        before: its value if that is a number or text; None for a tensor, or if it did not exist.
        after: its value after the forward.
    """

    module: str
    name: str
    before: Any = None
    after: Any = None


def changes_of_forward(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> tuple[Change, ...]:
    """Attributes of modules that a forward with these inputs changes; the model stays changed."""
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
    """The largest length at which a forward changes the same attributes as at the shortest; None: all lengths do.

    `changes_at` returns the changes of a forward of some length in a model that has not run.
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
    """Path and name -> value of attributes of modules except weights; tensors as bytes, to be compared."""
    state: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        state[path, _CLASS] = type(module).__name__
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                state[path, name] = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            elif isinstance(value, (np.generic, *_PLAIN)) and not name.startswith("_"):
                state[path, name] = value
    return state


def configured_switches(config: PretrainedConfig) -> tuple[int, ...]:
    """Lengths in tokens above which a model may compute another function, ascending.

    A window may extend over half of its width to each side, so that both numbers are among the lengths.
    """
    sizes = set(_sizes(text_config(config)))
    return tuple(sorted(sizes | {size // 2 for size in sizes if size > 3}))


def chosen_keys(config: PretrainedConfig) -> int | None:
    """The number of keys that sparse attention chooses by scores; None if the model attends to all."""
    chosen: Any = getattr(text_config(config), _CHOSEN, None)
    return chosen if _is_reach(chosen) else None


def _sizes(config: PretrainedConfig) -> Iterator[int]:
    """Numbers of positions in a configuration at which its layers may change."""
    layers = getattr(config, "layer_types", None) or ()
    if not layers or any(word in layer for layer in layers for word in _PARTIAL):
        for name in (name for name in vars(config) if _REACH.fullmatch(name)):
            value = getattr(config, name)
            yield from (size for size in (value if isinstance(value, list | tuple) else [value]) if _is_reach(size))
    if (chosen := chosen_keys(config)) is not None:
        yield chosen
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    usual = getattr(config, "original_max_position_embeddings", None)
    for part in (part for part in kinds if part.get("rope_type") == "longrope"):
        size: Any = part.get("original_max_position_embeddings", usual)
        if _is_reach(size):
            yield size
    if any(part.get("rope_type") == DYNAMIC for part in kinds) and extension(config) > 1:
        yield config.max_position_embeddings
    drawn, block = getattr(config, "num_random_blocks", None), getattr(config, "block_size", None)
    if drawn is not None and block is not None and getattr(config, "attention_type", None) == "block_sparse":
        yield (5 + 2 * drawn) * block


def _is_reach(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 1


class FirstOfEqual(TorchFunctionMode):
    """Inside, `topk` chooses the first of equal values, as ONNX's TopK does.

    Args:
        watches: whether ties are only recorded, and PyTorch chooses.

    Attributes:
        tied: the smallest `k` of a `topk` whose last chosen value equals a value that is not chosen; None without such
            a tie. Values of masked positions, infinite or the lowest of their type, do not count.
    """

    tied: int | None = None

    def __init__(self, *, watches: bool = False) -> None:
        super().__init__()
        self._watches = watches

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _TOPK:
            return func(*args, **(kwargs or {}))
        first = self._first(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if self._watches else first

    def _first(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
        if 0 < k < values.shape[dim] and values.is_floating_point():
            last, following = values.select(dim, k - 1), values.select(dim, k)
            is_score = last.isfinite() & (last.abs() < torch.finfo(last.dtype).max / 2)
            if bool(((last == following) & is_score).any()):
                self.tied = min(k, self.tied or k)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
