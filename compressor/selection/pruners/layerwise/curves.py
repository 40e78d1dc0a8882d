"""The divergence that the change of a single linear causes, from forwards that start at the layer of the linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compressor.models.classifiers import AnswerKind, several_answers
from compressor.selection.prefix_cache import tensors_of
from compressor.selection.pruners.layerwise.layer_calls import CallOrder, run_layers
from compressor.tasks.divergence import are_numbers, divergence, variances
from compressor.tasks.forwards import scored_logits_only
from compressor.units.layers import AroundLayer, Linear

TEMPERATURE = 2.0
"""Temperature of the divergence. At temperature 1, few rows whose answer flips have most of it, and its mean over the
rows varies more from draw to draw."""
_RECORDED_BYTES = 2**30
"""Memory for outputs of layers, which the last batch that is recorded may exceed."""


class PartialKL:
    """The divergence of a model from itself with the weights of one linear replaced.

    The outputs of all layers are recorded once, which takes rows * positions * width * layers numbers; forwards of
    batches for which the memory does not suffice start at the first layer. The model must not change otherwise while
    this object is in use.

    Args:
        model: a transformers model; its present outputs are the dense ones.
        batches: inputs `[batch, ...]` of each batch, with or without `labels`.
        names: the outputs that the task scores, see `Task.outputs`.
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
        self._variance = self._dense_variance()

    def rows(self, linear: str, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """KL(dense || changed) at `TEMPERATURE` of each row of all batches, `[rows]`, float64, on the CPU.

        Args:
            linear: module path of the linear.
            weight: its weight `[out, in]`.
            bias: its bias `[out]`; None: the bias that it has.

        Raises:
            ValueError: a forward does not call the linear.
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

    def mean(self, linear: str, weight: Tensor, bias: Tensor | None = None) -> float:
        """The mean of `rows`."""
        return float(self.rows(linear, weight, bias).mean())

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
                sizes.update({tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(output)})
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

    def _dense_variance(self) -> Tensor | None:
        return dense_variance([dense for dense in self._dense if dense is not None], self._names, self._kind)


def dense_variance(
    dense: Sequence[Mapping[str, Tensor]], names: Sequence[str], kind: AnswerKind | None
) -> Tensor | None:
    """The variance of each output of a regression over all rows, `[numbers]`; None for other tasks.

    Args:
        dense: outputs of the whole model for each batch.
        names: the scored outputs.
        kind: see `several_answers`.
    """
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
    changes = [(module.weight, weight.T if isinstance(module, Conv1D) else weight)]
    if bias is not None:
        changes.append((module.bias, bias))
    former = [(parameter, parameter.data) for parameter, _ in changes]
    try:
        for parameter, tensor in changes:
            parameter.data = tensor.detach().to(parameter.device, parameter.dtype).contiguous()
        yield
    finally:
        for parameter, data in former:
            parameter.data = data
