"""Forwards whose first layer calls return recorded outputs and whose last ones may be left out.

A layer is an element of the model's outermost module lists, see `outermost_layers`. Layers of one list form a chain:
each reads the output of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.tasks.forwards import forward_arguments
from compressor.units.find import evaluation_mode
from compressor.units.layers import AroundLayer, outermost_layers, removed_afterwards, routed_forwards


class EndForwardError(Exception):
    """Ends a forward early, raised from a hook; `run_layers` returns None."""


def run_layers(model: PreTrainedModel, batch: Mapping[str, Tensor], around: AroundLayer) -> Any:
    """One forward in evaluation mode without gradients, each layer call routed through a function.

    Args:
        model: a transformers model with its hooks and gates as they are; it is restored afterwards.
        batch: inputs `[batch, ...]`.
        around: runs or replaces each layer call.

    Returns:
        The model's output; None if `EndForwardError` was raised.
    """
    with torch.no_grad(), evaluation_mode(model), routed_forwards(outermost_layers(model), around):
        try:
            return model(**forward_arguments(model, batch))
        except EndForwardError:
            return None


def layer_groups(model: PreTrainedModel) -> dict[nn.Module, int]:
    """The number of the module list of each layer."""
    layers = set(outermost_layers(model))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    groups: dict[nn.Module, int] = {}
    for number, members in enumerate(lists):
        for layer in layers.intersection(members):
            groups.setdefault(layer, number)
    return groups


class CallOrder:
    """When a forward calls its layers and its other modules.

    Args:
        model: a transformers model.
        batch: inputs of one forward `[batch, ...]`; a few rows suffice.

    Attributes:
        layer_calls: number of layer calls.
    """

    def __init__(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
        self.layer_calls = 0
        self._calls: dict[str, list[int]] = {}

        def around(number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
            output = run()
            self.layer_calls = number + 1
            return output

        def record(name: str, *_: object) -> None:
            self._calls.setdefault(name, []).append(self.layer_calls)

        leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
        with removed_afterwards(module.register_forward_hook(partial(record, name)) for name, module in leaves):
            run_layers(model, batch, around)

    def of(self, linear: str) -> Sequence[int]:
        """The number of layer calls that end before each call of a linear: the layer call that contains it.

        Raises:
            ValueError: the forward does not call the linear.
        """
        if linear not in self._calls:
            raise ValueError(f"{linear}: no module that a forward calls; use the path of a linear of this model")
        return self._calls[linear]
