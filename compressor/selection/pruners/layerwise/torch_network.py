"""A model of PyTorch for refits, observed by hooks of its modules, and the network that a model runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors, patch_attributes
from transformers.pytorch_utils import Conv1D

from compressor.answers import AnswerKind, several_answers
from compressor.model_folder.access import access_of
from compressor.models.forwards import scored_logits_only
from compressor.progress import ProgressCallback, tracked
from compressor.selection.pruners.base import PruningInputs
from compressor.selection.pruners.layerwise.layer_run import (
    CallOrder,
    DenseSums,
    calls_in_order,
    collect_inputs,
    count_tokens,
    first_tensor,
    run_layers,
)
from compressor.selection.pruners.layerwise.output_sensitivity import sensitivity_of
from compressor.selection.pruners.layerwise.refit import CallTokens
from compressor.selection.pruners.layerwise.session_network import TEMPERATURE
from compressor.selection.pruners.reconstruct.method import Divergence, Network, RefitSet
from compressor.training.divergence import are_numbers, divergence, variances
from compressor.training.precision import autocast, usable_precision
from compressor.units.layers import AroundLayer, Linear, is_linear, removed_afterwards
from compressor.units.prunable import LinearWeights

_ROWS = 2
"""Rows on which feeders are searched."""
_RECORDED_BYTES = 2**30
"""Memory for outputs of layers, which the last batch that is recorded may exceed."""


class TorchNetwork(Network):
    """A model of PyTorch with its batches; see `Network`.

    Sums are accumulated on the device of the model. Forwards that measure losses run in bfloat16 where the machine
    computes it natively.
    """

    has_gradients = True

    def __init__(self, inputs: PruningInputs) -> None:
        super().__init__(inputs.tensors(inputs.statistics))
        self._inputs, self._model = inputs, inputs.network
        self._ends = list(dict.fromkeys(str(group.linear) for group in inputs.groups))

    def linear(self, path: str) -> LinearWeights:
        return access_of(self._model).linear(path)

    def set_linear(self, path: str, weights: LinearWeights) -> None:
        access_of(self._model).set_linear(path, weights)

    def count_tokens(self, linears: Sequence[str]) -> dict[str, int]:
        return count_tokens(self._model, self._statistics, linears)

    def weigh(self, linears: Sequence[str], on_progress: ProgressCallback) -> Mapping[str, np.ndarray]:
        inputs = self._inputs
        sensitivity = sensitivity_of(self._model, self._statistics, linears, inputs.outputs, inputs.seed, on_progress)
        self.token_weights = sensitivity.weights
        return sensitivity.metrics

    def observe_inputs(
        self, linears: Sequence[str], observer: Callable[[CallTokens], None], on_progress: ProgressCallback
    ) -> None:
        for number, batch in enumerate(tracked(self._statistics, on_progress)):
            collect_inputs(self._model, batch, linears, observer, number)

    def divergence(self) -> Divergence:
        batches, device = self._inputs.tensors(self._inputs.held_out), self._model.device
        precision = usable_precision(self._model, batches[0])

        def mean(linear: str, weights: LinearWeights) -> float:
            bias = None if weights.bias is None else torch.from_numpy(weights.bias)
            with autocast(device, precision):
                return float(losses.rows(linear, torch.from_numpy(weights.weight), bias).mean())

        with autocast(device, precision):
            losses = PartialKL(self._model, batches, self._inputs.outputs)
        return mean

    def feeders(self, linear: str) -> tuple[str, ...]:
        return self._feeders[linear]

    def targeted_calls(self, sets: Sequence[RefitSet], on_progress: ProgressCallback) -> Iterator[Iterator[CallTokens]]:
        linear_sets = [part.linears for part in sets]
        return calls_in_order(self._model, linear_sets, self._statistics, self._dense_sums, on_progress)

    @cached_property
    def _dense_sums(self) -> DenseSums:
        """The activations of the dense model that refits restore; computed before the first one."""
        linears = [name for end in self._ends for name in (*self._feeders[end], end)]
        return DenseSums(self._model, linears, self._statistics, unsummed=set(linears).difference(self._ends))

    @cached_property
    def _feeders(self) -> dict[str, tuple[str, ...]]:
        return feeders_of(self._model, self._ends, self._statistics[0])


class PartialKL:
    """The divergence of a model from itself with the weights of one linear replaced.

    The outputs of all layers are recorded once, which takes rows * positions * width * layers numbers; forwards of
    batches for which the memory does not suffice start at the first layer. The model must not change otherwise while
    this object is in use.

    Args:
        model: a transformers model; its present outputs are the dense ones.
        recorded_bytes: memory for outputs of layers; the batch that exceeds it is the last that is recorded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Mapping[str, Tensor]],
        names: Sequence[str],
        recorded_bytes: int = _RECORDED_BYTES,
    ) -> None:
        self._model, self._batches, self._names = model, batches, names
        self._kind = several_answers(model.config)
        self._free_bytes = recorded_bytes
        self._order = CallOrder(model, batches[0])
        self._layers: list[list[Any]] = [[] for _ in batches]
        self._dense: list[dict[str, Tensor] | None] = [self._record(number) for number in range(len(batches))]
        kept = [dense for dense in self._dense if dense is not None]
        self._variance = dense_variance(kept, names, self._kind)

    def rows(self, linear: str, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """KL(dense || changed) at `TEMPERATURE` of each row of all batches, `[rows]`, float64, on the CPU.

        Args:
            weight: another weight of the linear, `[out, in]`.
            bias: another bias `[out]`; None: the bias that it has.
        """
        start = self._order.of(linear)[0]
        module = self._model.get_submodule(linear)
        parts = []
        for number, batch in enumerate(self._batches):
            dense = self._dense[number] or self._forward(number, len(self._layers[number]))
            with with_weight(module, weight, bias):
                changed = self._forward(number, start)
            losses = divergence(
                dense, changed, self._names, batch, self._variance, kind=self._kind, temperature=TEMPERATURE
            )
            parts.append(losses.cpu())
        return torch.cat(parts)

    def _forward(self, batch: int, start: int) -> dict[str, Tensor]:
        """The scored outputs of a forward that starts at a layer call, where the layers of the batch are recorded."""
        layers = self._layers[batch][:start]

        def around(number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
            return layers[number] if number < len(layers) else run()

        return self._outputs(batch, around)

    def _record(self, batch: int) -> dict[str, Tensor] | None:
        """Record the layers; the outputs, or None where they are large and are computed from the last layer."""
        layers = self._layers[batch]

        def around(number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
            output = run()
            if is_recorded:
                layers.append(output)
                # Layers may pass on a tensor, such as a bias of positions.
                sizes.update({tensor.data_ptr(): tensor.nbytes for tensor in get_leaf_tensors(output).values()})
            return output

        is_recorded, sizes = self._free_bytes > 0, dict[int, int]()
        dense = self._outputs(batch, around)
        self._free_bytes -= sum(sizes.values())
        return dense if all(tensor.dim() <= 2 for tensor in dense.values()) else None

    def _outputs(self, batch: int, around: AroundLayer) -> dict[str, Tensor]:
        """The scored outputs of a forward whose layer calls are routed through a function."""
        with scored_logits_only(self._model, self._batches[batch]):
            outputs = run_layers(self._model, self._batches[batch], around)
        return {name: outputs[name] for name in self._names}


def dense_variance(
    dense: Sequence[Mapping[str, Tensor]], names: Sequence[str], kind: AnswerKind | None
) -> Tensor | None:
    """The variance of each output of a regression over all rows, `[numbers]`; None for other tasks."""
    if len(names) > 1 or not dense or not are_numbers(dense[0][names[0]], names[0], kind):
        return None
    return variances(torch.cat([outputs[names[0]] for outputs in dense]))


@contextmanager
def with_weight(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> Iterator[None]:
    """A linear with another weight; on exit it has its former tensors again.

    Args:
        module: `nn.Linear`, or transformers' `Conv1D`, whose weight is transposed.
        weight: `[out, in]`.
        bias: `[out]`; None: the bias that it has.
    """
    assert isinstance(module, Linear)
    changes = {module.weight: weight.T if isinstance(module, Conv1D) else weight}
    if bias is not None:
        changes[module.bias] = bias

    def changed(former: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach().to(former.device, former.dtype).contiguous()

    with patch_attributes([(weight, "data", partial(changed, tensor=tensor)) for weight, tensor in changes.items()]):
        yield


def feeders_of(
    model: PreTrainedModel, linears: Sequence[str], batch: Mapping[str, Tensor]
) -> dict[str, tuple[str, ...]]:
    """The linears that compute what the units of each linear are made of: queries, keys and values, or up-projections.

    Feeders are the linears called last before it in the same layer call that read one tensor, so that none of them
    depends on another. They read as many tokens as the linear does, and are in the order in which a forward calls them.

    Cases without feeders:
        1. The linear is outside layers.
        2. Experts, which are called for a part of the tokens each.
        3. Linears that read the output of an encoder, e.g. keys and values of a cross-attention.

    Args:
        batch: inputs of one forward `[batch, ...]`; a few rows are used.
    """
    example = {name: value[:_ROWS] for name, value in batch.items()}
    # The numbers of tokens that a flattened input of all rows may have.
    numbers = {value.shape[0] * value.shape[1] for value in example.values() if value.dim() == 2}
    feeders: dict[str, tuple[str, ...]] = {}
    # The inputs of the linears called since the last one of `linears`: equal addresses mean equal tensors.
    calls: list[tuple[str, Tensor]] = []
    encoded: list[Tensor] = []

    def on_linear(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        tensor = first_tensor(args, {})
        if tensor is None:
            return
        if name not in linears:
            calls.append((name, tensor))
            return
        shape = tensor.shape[:-1]
        if name not in feeders and (len(shape) > 1 or shape.numel() in numbers):
            outside = {value.data_ptr() for value in encoded}
            read = [(path, x.data_ptr()) for path, x in calls if x.shape[:-1] == shape and x.data_ptr() not in outside]
            feeders[name] = tuple(path for path, address in read if address == read[-1][1])
        calls.clear()

    def hooks() -> Iterator[RemovableHandle]:
        for name, module in model.named_modules():
            if is_linear(module):
                yield module.register_forward_hook(partial(on_linear, name))
        if model.config.is_encoder_decoder:
            yield model.get_encoder().register_forward_hook(lambda module, args, output: encoded.append(output[0]))

    order = CallOrder(model, example)
    with removed_afterwards(hooks()):
        run_layers(model, example)
    in_layer = {name: order.of(name)[0] for name in feeders}
    return {
        name: tuple(path for path in feeders[name] if in_layer[name] in order.of(path))
        if name in feeders and in_layer[name] < order.layer_calls
        else ()
        for name in linears
    }
