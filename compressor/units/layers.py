"""Layers and linears of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle
from transformers.exporters.utils import patch_attributes
from transformers.pytorch_utils import Conv1D

from compressor.units.hook import unwrap

_TOLERANCE = 1e-3
"""Largest difference, relative to the largest magnitude, between a linear and what a subclass of it computes."""
Linear = nn.Linear | Conv1D
"""A linear map of the last axis; `Conv1D`, which GPT-2 uses, holds its weight transposed."""
AroundLayer = Callable[[int, nn.Module, Callable[[], Any]], Any]
"""Called with the number of a layer call, the layer, and a function that runs it; returns the output to go on with."""


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost module lists of a model; none of them is inside another, and none is a list."""
    layers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():  # without the gaps of Informer's list
            if isinstance(child, ParametrizationList):
                continue  # it computes a weight, and is no layer
            if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
                layers.append(child)
            else:
                visit(child)

    visit(unwrap(model))
    return list(dict.fromkeys(layers))


@contextmanager
def routed_forwards(layers: Sequence[nn.Module], around: AroundLayer) -> Iterator[None]:
    """Route the forwards of layers, whose calls are numbered from zero, through a function; restore them on exit."""
    count = 0

    def forward(layer: nn.Module, former: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return around(count - 1, layer, partial(former, *args, **kwargs))

    former_forwards = [(layer, vars(layer).get("forward")) for layer in layers]
    try:
        for layer in layers:
            layer.forward = partial(forward, layer, layer.forward)
        yield
    finally:
        for layer, former in former_forwards:
            del layer.forward
            if former is not None:
                layer.forward = former


@contextmanager
def removed_afterwards(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register hooks, one for each handle; remove them on exit."""
    with ExitStack() as undo:
        for handle in handles:
            undo.enter_context(handle)
        yield


@contextmanager
def gradients_of(parameters: Iterable[nn.Parameter], *, required: bool) -> Iterator[None]:
    """Let parameters require gradients, or none: then a forward keeps no activations for them. Restored on exit."""
    changed = [parameter for parameter in parameters if parameter.requires_grad != required]
    with patch_attributes([(parameter, "requires_grad", lambda _: required) for parameter in changed]):
        yield


def embedding_tables(model: nn.Module) -> list[nn.Parameter]:
    """The table of a model with the embeddings of tokens, which a head may share; all tables of a graph."""
    if isinstance(tables := getattr(model, "embedding_tables", None), list):
        return tables
    try:
        module = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return []
    # The class is not PyTorch's in some families (I-BERT); those of images have weights of another kind.
    return [module.weight] if hasattr(module, "padding_idx") else []


def linear_at(model: nn.Module, path: str) -> Linear:
    """The linear at a module path."""
    linear = model.get_submodule(path)
    assert isinstance(linear, Linear)
    return linear


def linear_sizes(linear: Linear) -> tuple[int, int]:
    """Number of inputs and of outputs of a linear."""
    rows, columns = linear.weight.shape
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def linear_weight(linear: Linear) -> Tensor:
    """The weight of a linear, `[outputs, inputs]`; a view of its parameter."""
    return linear.weight.T if isinstance(linear, Conv1D) else linear.weight


def is_linear(module: nn.Module) -> TypeGuard[Linear]:
    """Whether a module is a linear map, and not a quantized or otherwise changed subclass of it."""
    return type(module) in (nn.Linear, Conv1D) or (isinstance(module, nn.Linear) and _computes_linear(module))


@torch.no_grad()
def _computes_linear(module: nn.Linear) -> bool:
    """Whether a subclass computes what a linear with its weight does, as Falcon's does."""
    if not module.weight.is_floating_point():
        return False
    x = torch.linspace(-1, 1, 2 * module.in_features, dtype=torch.float32).reshape(2, -1)
    try:
        x = x.to(module.weight)
        expected = nn.functional.linear(x, module.weight, module.bias)
        actual = type(module).forward(module, x)
    except (RuntimeError, TypeError, NotImplementedError):  # a packed weight has another shape or type
        return False
    return isinstance(actual, Tensor) and is_close(actual, expected, _TOLERANCE)


def is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether tensors have one shape and differ by at most a share of the largest magnitude that is expected."""
    if actual.shape != expected.shape:
        return False
    return not expected.numel() or bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
