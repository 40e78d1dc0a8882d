"""Replace parameters of a model by slices of them, and write the slices back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compressor.units.layers import Linear


@dataclass(frozen=True, eq=False)
class Slice:
    """The entries of a parameter along one axis that remain.

    Attributes:
        module: the module that holds the parameter.
        parameter: name of the parameter in its module.
        axis: axis of the parameter.
        kept: indices `[entries]` along the axis, ascending.
    """

    module: nn.Module
    parameter: str
    axis: int
    kept: Tensor


@dataclass(frozen=True, eq=False)
class Resize:
    """An attribute of a module that holds a size."""

    module: nn.Module
    attribute: str
    value: int


def output_slices(linear: Linear, kept: Tensor) -> tuple[list[Slice], list[Resize]]:
    """The changes that reduce the outputs of a linear, and its bias, to `kept`."""
    transposed = isinstance(linear, Conv1D)
    slices = [Slice(linear, "weight", 1 if transposed else 0, kept)]
    if linear.bias is not None:
        slices.append(Slice(linear, "bias", 0, kept))
    return slices, [Resize(linear, "nf" if transposed else "out_features", len(kept))]


def input_slices(linear: Linear, kept: Tensor) -> tuple[list[Slice], list[Resize]]:
    """The changes that reduce the inputs of a linear to `kept`."""
    transposed = isinstance(linear, Conv1D)
    return (
        [Slice(linear, "weight", 0 if transposed else 1, kept)],
        [Resize(linear, "nx" if transposed else "in_features", len(kept))],
    )


@contextmanager
def sliced(slices: Iterable[Slice], sizes: Iterable[Resize]) -> Iterator[None]:
    """Modules whose parameters are smaller, contiguous ones that require gradients as the full ones do.

    On exit, also after an error, every module has its full parameter again, the same object, with the values of the
    smaller one at the entries that remained. The full parameter is moved to the device of the smaller one.

    Args:
        slices: at most one for each axis of a parameter.
        sizes: attributes to change meanwhile.
    """
    by_parameter: dict[tuple[nn.Module, str], list[Slice]] = defaultdict(list)
    for part in slices:
        by_parameter[part.module, part.parameter].append(part)
    with ExitStack() as undo:
        for (module, name), parts in by_parameter.items():
            undo.enter_context(_sliced_parameter(module, name, parts))
        for size in sizes:
            undo.callback(setattr, size.module, size.attribute, getattr(size.module, size.attribute))
            setattr(size.module, size.attribute, size.value)
        yield


@contextmanager
def _sliced_parameter(module: nn.Module, name: str, parts: Iterable[Slice]) -> Iterator[None]:
    full = module.get_parameter(name)
    small: Tensor = full.detach()
    for part in parts:
        small = small.index_select(part.axis, part.kept.to(small.device))
    setattr(module, name, nn.Parameter(small.contiguous(), requires_grad=full.requires_grad))
    try:
        yield
    finally:
        # A loaded checkpoint can have replaced the smaller parameter.
        trained = module.get_parameter(name).detach()
        setattr(module, name, full)
        if full.device != trained.device:
            full.data = full.data.to(trained.device)
        full.data[_entries(full, parts)] = trained.to(full.dtype)


def _entries(full: Tensor, parts: Iterable[Slice]) -> tuple[Tensor, ...]:
    """The index of the remaining entries of a tensor: one tensor for each axis, to be broadcast."""
    axes = [torch.arange(size, device=full.device) for size in full.shape]
    for part in parts:
        axes[part.axis] = part.kept.to(full.device)
    return tuple(index.reshape(-1, *(1,) * (full.dim() - axis - 1)) for axis, index in enumerate(axes))


def owners(model: nn.Module) -> dict[Any, int]:
    """Parameter -> number of places in modules that hold it; more than one where weights are tied."""
    counts: dict[Any, int] = defaultdict(int)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            counts[parameter] += 1
    return counts
