"""Forwards on calibration batches: when they call layers and linears, and the inputs of the linears.

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

from compressor.errors import ErrorCode, InputError
from compressor.models.forwards import decoder_mask, forward_arguments, scored_logits_only
from compressor.selection.pruners.layerwise.refit import CallTokens
from compressor.units.find import evaluation_mode
from compressor.units.layers import AroundLayer, outermost_layers, removed_afterwards, routed_forwards


class EndForwardError(Exception):
    """Ends a forward early, raised from a hook; `run_layers` returns None."""


def run_layers(
    model: PreTrainedModel, batch: Mapping[str, Tensor], around: AroundLayer = lambda number, layer, run: run()
) -> Any:
    """The output of a forward in evaluation mode without gradients, each layer call routed through a function.

    The model keeps its hooks and gates, and is restored afterwards. None if `EndForwardError` was raised.
    """
    with torch.no_grad(), evaluation_mode(model), routed_forwards(outermost_layers(model), around):
        try:
            return model(**forward_arguments(model, batch))
        except EndForwardError:
            return None


class CallOrder:
    """When a forward of a few rows calls its layers and its other modules.

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
        """The number of layer calls that end before each call of a linear; ValueError if the forward never calls it."""
        if linear not in self._calls:
            raise ValueError(f"{linear}: a forward calls no such module; use the path of a linear of this model")
        return self._calls[linear]


def collect_inputs(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    linears: Sequence[str],
    observer: Callable[[CallTokens], None],
    number: int = 0,
) -> None:
    """Run the whole model on one batch, by its number, and pass on the inputs of all linears; nothing is stored.

    A linear that a forward calls several times is observed as often.

    Args:
        model: a transformers model; it runs in evaluation mode without gradients, and is restored afterwards.
        batch: inputs `[batch, ...]`, with or without `labels`.
    """
    counts = dict.fromkeys(linears, 0)

    def on_input(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x = args[0]
        mask = token_mask(model, name, batch, x.shape[:-1])
        observer(CallTokens(name, number, counts[name], mask.cpu(), x[mask]))
        counts[name] += 1

    hooks = (model.get_submodule(name).register_forward_hook(partial(on_input, name)) for name in linears)
    with removed_afterwards(hooks), scored_logits_only(model, batch):
        run_layers(model, batch)


def count_tokens(
    model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]], linears: Sequence[str]
) -> dict[str, int]:
    """The number of tokens that `collect_inputs` passes on for each linear, without a forward on every batch.

    The first batch runs; tokens of further batches are in proportion to their tokens without padding, or to the sizes
    of their inputs.
    """
    tokens = dict.fromkeys(linears, 0)

    def count(call: CallTokens) -> None:
        tokens[call.linear] += len(call.inputs)

    collect_inputs(model, batches[0], linears, count)
    elements = [next(iter(batch.values())).numel() for batch in batches]
    for name, number in tokens.items():
        masks = [padding_mask(model, name, batch) for batch in batches]
        sizes = [
            every if mask is None else int(mask.count_nonzero()) for mask, every in zip(masks, elements, strict=True)
        ]
        if number % max(sizes[0], 1):  # the mask is not that of the linear's inputs
            sizes = elements
        tokens[name] = number * sum(sizes) // max(sizes[0], 1)
    return tokens


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor among the arguments of a module's forward; None if it has none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def token_mask(model: PreTrainedModel, linear: str, batch: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """The tokens of a linear's input that are not padding: bool, of `shape`, on the device of the model.

    All tokens count if there is no mask (images), or if the axes of the input differ from those of the mask. Tokens
    that are flattened row by row are recognised.

    Args:
        batch: inputs of the model `[batch, ...]`, with or without `labels`.
        shape: shape of the linear's input without its last axis, usually `[batch, position]`.
    """
    mask = padding_mask(model, linear, batch)
    if mask is not None and (mask.shape == shape or shape == (mask.numel(),)):
        return mask.reshape(shape).to(model.device) != 0
    return torch.ones(shape, dtype=torch.bool, device=model.device)


def padding_mask(model: PreTrainedModel, linear: str, batch: Mapping[str, Tensor]) -> Tensor | None:
    """The mask `[batch, position]` of a batch that is zero where the input of a linear is padding; None: there is none.

    1. A module outside the encoder of an encoder-decoder: the mask of the decoder, see `decoder_mask`.
    2. Any other module: the attention mask.
    """
    module = model.get_submodule(linear)
    if not model.config.is_encoder_decoder or any(part is module for part in model.get_encoder().modules()):
        return batch.get("attention_mask")
    return decoder_mask(batch)


def entries_per_row(linear: str, entries: int, rows: int) -> int:
    """How many entries on the first axis of a linear's input belong to each row: windows, or tokens row by row.

    Raises:
        InputError: they do not belong to rows one after another, as in experts that read chosen tokens.
    """
    if entries % rows:
        text = (
            f"{linear}: reads {entries} tokens of {rows} rows, like an expert that reads chosen tokens, so its effect "
            f"on a row cannot be measured; leave it out of the groups"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, linear=linear, entries=entries, rows=rows)
    return entries // rows
