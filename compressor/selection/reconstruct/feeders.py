"""The linears that compute what the units of a group are made of: queries, keys and values, or up-projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from compressor.selection.reconstruct.replay import removed_afterwards, run_layers
from compressor.units.layers import is_linear


def feeders_of(
    model: PreTrainedModel, linears: Sequence[str], batch: Mapping[str, Tensor]
) -> dict[str, tuple[str, ...]]:
    """The feeders of each linear, in the order in which a forward calls them.

    A feeder is called in the same layer call, after the last of the other `linears`, and for the same tokens. Experts,
    which are called for some tokens each, and linears outside layers have none.

    Args:
        model: a transformers model.
        linears: module paths of the linears that groups end in.
        batch: inputs of one forward `[rows, ...]`; a few rows suffice.
    """
    ends = set(linears)
    feeders: dict[str, tuple[str, ...]] = dict.fromkeys(linears, ())
    calls: list[tuple[int, str, Sequence[int]]] = []
    for layer, name, tokens in linear_calls(model, batch):
        if name not in ends:
            calls.append((layer, name, tokens))
            continue
        if not feeders[name] and layer >= 0 and len(tokens) > 1:
            feeders[name] = tuple(other for number, other, same in calls if (number, same) == (layer, tokens))
        calls = []
    return feeders


def linear_calls(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> list[tuple[int, str, Sequence[int]]]:
    """The calls of linears in a forward: layer call (-1: outside layers), module path, and shape without channels."""
    calls: list[tuple[int, str, Sequence[int]]] = []
    current = -1

    def around(number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
        nonlocal current
        current = number
        output = run()
        current = -1
        return output

    def record(name: str, module: nn.Module, args: object, output: Tensor) -> None:
        calls.append((current, name, tuple(output.shape[:-1])))

    def hooks() -> Iterator[RemovableHandle]:
        for name, module in model.named_modules():
            if is_linear(module):
                yield module.register_forward_hook(partial(record, name))

    with removed_afterwards(hooks()):
        run_layers(model, batch, around)
    return calls
