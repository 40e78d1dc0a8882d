"""Layers and linears of a model."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compressor.units.hook import unwrap

Linear = nn.Linear | Conv1D
"""A linear map of the last axis; `Conv1D`, which GPT-2 uses, holds its weight transposed."""


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost module lists of a model; none of them is inside another."""
    layers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                layers.extend(child)
            else:
                visit(child)

    visit(unwrap(model))
    return list(dict.fromkeys(layers))


def linear_sizes(linear: Linear) -> tuple[int, int]:
    """Number of inputs and of outputs of a linear."""
    rows, columns = linear.weight.shape
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def linear_weight(linear: Linear) -> Tensor:
    """The weight of a linear, `[outputs, inputs]`; a view of its parameter."""
    return linear.weight.T if isinstance(linear, Conv1D) else linear.weight


def is_linear(module: nn.Module) -> TypeGuard[Linear]:
    """Whether a module is a linear map, and not a quantized or otherwise changed subclass of it."""
    return type(module) in (nn.Linear, Conv1D)
