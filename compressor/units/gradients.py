"""Gradients of a model whose parameters may be frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def recorded_gradients(model: nn.Module) -> Iterator[None]:
    """Inside the context gradients are recorded, and all parameters require them."""
    parameters = [weight for weight in model.parameters() if weight.is_floating_point() and not weight.requires_grad]
    with ExitStack() as undo:
        for weight in parameters:
            undo.callback(weight.requires_grad_, False)
            weight.requires_grad_(True)
        undo.enter_context(torch.enable_grad())
        yield
