"""A graph that PyTorch has loaded, with forwards in ONNX Runtime: gradients alone are computed in PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

import graph_passes
from compressor.graph.layers import Arrays, LayeredGraph
from compressor.graph.network import GraphNetwork
from compressor.graph.source import SentenceGraph
from compressor.models.classifiers import several_answers
from compressor.progress import ProgressCallback
from compressor.selection.pruners.base import Batch, PruningInputs
from compressor.selection.pruners.layerwise.curves import TEMPERATURE, dense_variance
from compressor.selection.pruners.layerwise.torch_network import TorchNetwork
from compressor.selection.pruners.network import Network
from compressor.selection.pruners.session_network import Compare, SessionNetwork
from compressor.tasks.divergence import divergence


def network_of(inputs: PruningInputs) -> Network:
    """The network that forwards run on: sessions of ONNX Runtime for a graph on the CPU, else modules of PyTorch.

    Modules run graphs in half precision, encoder-decoders, graphs in which several matmuls have one weight or bias, and
    encoders of sentences, whose scored output is computed from that of the graph.
    """
    return sessions_of(inputs) or TorchNetwork(inputs)


def sessions_of(inputs: PruningInputs) -> SessionNetwork | None:
    """Sessions of the graph of a model; None: modules of PyTorch run it."""
    network = inputs.model
    if (
        not isinstance(network, GraphNetwork)
        or isinstance(network, SentenceGraph)
        or torch.cuda.is_available()
        or network.precision != "fp32"
        or network.config.is_encoder_decoder
        or not set(inputs.outputs) <= network.output_specs.keys()
    ):
        return None
    model = network.with_weights()
    stored = {group.linear: group.weights for group in graph_passes.find_groups(model).groups}
    ends = {str(group.linear): stored[str(group.linear)] for group in inputs.groups}
    graph = LayeredGraph(model)
    linears = graph.division.linears
    uses = Counter(value.name for linear in linears for value in (linear.weight, linear.bias) if value is not None)
    if max(uses.values(), default=0) > 1 or any(
        len(weights) != 1 or weights[0] not in uses for weights in ends.values()
    ):
        return None

    def write(name: str, values: np.ndarray) -> None:
        with torch.no_grad():
            network.weights[name].value.copy_(torch.from_numpy(values))

    def weigh(
        linears: Sequence[str], on_progress: ProgressCallback
    ) -> tuple[list[dict[str, np.ndarray]], Mapping[str, np.ndarray]]:
        modules = TorchNetwork(inputs)
        metrics = modules.weigh(linears, on_progress)
        return [{path: calls[0].numpy() for path, calls in batch.items()} for batch in modules.token_weights], metrics

    return SessionNetwork(
        graph,
        {path: weights[0] for path, weights in ends.items()},
        [_arrays(network, batch) for batch in inputs.statistics],
        [_arrays(network, batch) for batch in inputs.held_out],
        partial(_comparing, inputs),
        weigh=weigh,
        write=write,
    )


def _comparing(inputs: PruningInputs, dense: Sequence[Arrays]) -> Compare:
    """How outputs on held-out batches are compared; see `SessionNetwork`."""
    names, kind = inputs.outputs, several_answers(inputs.model.config)
    variance = dense_variance([_tensors(outputs) for outputs in dense], names, kind)

    def compare(number: int, before: Arrays, after: Arrays) -> np.ndarray:
        outputs, batch = (_tensors(before), _tensors(after)), inputs.held_out[number]
        return divergence(*outputs, names, batch, variance, kind=kind, temperature=TEMPERATURE).numpy()

    return compare


def _arrays(network: GraphNetwork, batch: Batch) -> dict[str, np.ndarray]:
    """The inputs of a graph among those of a batch."""
    specs = network.input_specs
    return {name: batch[name].cpu().numpy().astype(spec.dtype, copy=False) for name, spec in specs.items()}


def _tensors(outputs: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in outputs.items()}
