"""The linears that compute what the units of a group are made of: queries, keys and values, or up-projections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from compressor.selection.pruners.layerwise.layer_calls import CallOrder, run_layers
from compressor.selection.pruners.layerwise.linear_inputs import first_tensor
from compressor.units.layers import is_linear, removed_afterwards

_ROWS = 2
"""Rows on which feeders are searched."""


def feeders_of(
    model: PreTrainedModel, linears: Sequence[str], batch: Mapping[str, Tensor]
) -> dict[str, tuple[str, ...]]:
    """The feeders of each linear, in the order in which a forward calls them.

    Feeders are the linears called last before it in the same layer call that read one tensor, so that none of them
    depends on another. They read as many tokens as the linear does.

    Cases without feeders:
        1. The linear is outside layers.
        2. Experts, which are called for a part of the tokens each.
        3. Linears that read the output of an encoder, e.g. keys and values of a cross-attention.

    Args:
        model: a transformers model.
        linears: module paths of the linears that groups end in.
        batch: inputs of one forward `[batch, ...]`; a few rows are used.
    """
    example = {name: value[:_ROWS] for name, value in batch.items()}
    # The numbers of tokens that a flattened input of all rows may have.
    numbers = {value.shape[0] * value.shape[1] for value in example.values() if value.dim() == 2}
    recorder = _FeederRecorder(set(linears), numbers)
    order = CallOrder(model, example)
    with removed_afterwards(recorder.hooks(model)):
        run_layers(model, example, lambda number, layer, run: run())
    feeders: dict[str, tuple[str, ...]] = dict.fromkeys(linears, ())
    for name, paths in recorder.feeders.items():
        layer = order.of(name)[0]
        if layer < order.layer_calls:
            feeders[name] = tuple(path for path in paths if layer in order.of(path))
    return feeders


@dataclass
class _FeederRecorder:
    """Collects the feeders of the linears `ends` in one forward, at the first call of each.

    `calls` holds the inputs of the linears that were called since the last one of `ends`, so that equal addresses mean
    equal tensors.
    """

    ends: set[str]
    numbers: set[int]
    feeders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    calls: list[tuple[str, Tensor]] = field(default_factory=list)
    encoded: list[Tensor] = field(default_factory=list)

    def hooks(self, model: PreTrainedModel) -> Iterator[RemovableHandle]:
        for name, module in model.named_modules():
            if is_linear(module):
                yield module.register_forward_hook(partial(self._on_linear, name))
        if model.config.is_encoder_decoder:
            yield model.get_encoder().register_forward_hook(self._on_encoder)

    def _on_encoder(self, module: nn.Module, args: object, output: Sequence[Tensor]) -> None:
        self.encoded.append(output[0])

    def _on_linear(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        tensor = first_tensor(args, {})
        if tensor is None:
            return
        if name not in self.ends:
            self.calls.append((name, tensor))
            return
        shape = tensor.shape[:-1]
        if name not in self.feeders and (len(shape) > 1 or shape.numel() in self.numbers):
            self.feeders[name] = self._last_run(shape)
        self.calls = []

    def _last_run(self, shape: Sequence[int]) -> tuple[str, ...]:
        """The linears that read the tensor which the last one of this shape reads."""
        encoded = {tensor.data_ptr() for tensor in self.encoded}
        calls = [
            (path, tensor.data_ptr())
            for path, tensor in self.calls
            if tensor.shape[:-1] == shape and tensor.data_ptr() not in encoded
        ]
        return tuple(path for path, address in calls if address == calls[-1][1])
