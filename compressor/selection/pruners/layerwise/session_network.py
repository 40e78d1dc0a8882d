"""An ONNX graph for refits: its layers run in ONNX Runtime, and its tokens are arrays."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

import graph_passes
from compressor.answers import several_answers
from compressor.environment import has_gpu
from compressor.errors import InputError
from compressor.graph.file import GraphFile
from compressor.graph.layers import Arrays, LayeredGraph, LayerPass, is_sum
from compressor.measure.divergence import divergence, variance_of
from compressor.progress import ProgressCallback, ignore_progress, tracked
from compressor.selection.pruners.base import PruningInputs
from compressor.selection.pruners.layerwise.refit import CallTokens, count_in_proportion, is_token_mask
from compressor.selection.pruners.reconstruct.method import Divergence, Network, RefitSet
from compressor.units.prunable import LinearWeights
from graph_passes.attention.linears import GraphLinear, find_linears
from graph_passes.passes import DropUnreadPositions

_MODULES = "compressor.selection.pruners.layerwise.torch_network"
"""The module of `TorchNetwork`, which is imported where gradients are computed."""
TEMPERATURE = 2.0
"""Temperature of the divergence. At temperature 1, the few rows with changed answers have most of the divergence, and
its mean over the rows varies more from draw to draw."""
_MASK = "attention_mask"
_RECORDED_BYTES = 2**30
"""Memory for values between layers of the held-out examples, which the last batch that is recorded may exceed."""
_PASSING = ("Identity", "Dropout")
"""Operators that pass on the output of a linear to the residual sum."""


class _Call(NamedTuple):
    """A call of a linear in a layer; the residual stream that its output is added to, if there is one; and the sum."""

    layer: int
    linear: GraphLinear
    residual: ir.Value | None
    total: ir.Value

    @property
    def reads(self) -> list[ir.Value]:
        """What the linear and the sum are computed from."""
        return [self.linear.activation] if self.residual is None else [self.linear.activation, self.residual]


class SessionNetwork(Network):
    """A graph with its batches; see `Network`.

    Without gradients, all tokens and all errors of outputs have equal weights. The weights that the graph holds are
    those of the whole network; a request for sums starts from them again. The file gets those of each refit.

    Args:
        inputs: the model of the file, and its rows.
        graph: its graph in float32, each of whose linears is called once.
        ends: path of the linear of each group -> name of the initializer of its weight.
        has_gradients: whether PyTorch weighs tokens and errors of outputs by gradients.

    Attributes:
        obstacle: the operator of the graph for which the requested gradients of `weigh` cannot be computed; None: they
            can be, or were not requested.
    """

    obstacle: str | None = None

    def __init__(
        self, inputs: PruningInputs, graph: ir.Model, ends: Mapping[str, str], *, has_gradients: bool = False
    ) -> None:
        file: GraphFile = inputs.model
        super().__init__([file.wide_feeds(batch) for batch in inputs.statistics])
        self._inputs, self._write, self.has_gradients = inputs, file.write, has_gradients
        self._held_out = [file.wide_feeds(batch) for batch in inputs.held_out]
        # Losses are measured without positions that no output depends on.
        self._graph, self._scored = LayeredGraph(graph), LayeredGraph(DropUnreadPositions()(graph.clone()).model)
        self._changed: dict[str, np.ndarray] = {}
        paths = {name: path for path, name in ends.items()}
        self._calls, self._scored_calls = _calls_of(self._graph, paths), _calls_of(self._scored, paths)
        self._last_layer = max(call.layer for path, call in self._calls.items() if path in ends)
        read = self._read(self._statistics[:1], self._calls)
        self._shapes = {path: tokens.shape[:-1] for _, path, tokens in read}  # of the first batch
        self._feeders = self._find_feeders(ends.keys())

    def linear(self, path: str) -> LinearWeights:
        linear = self._calls[path].linear
        weight = self._values(linear.weight)
        bias = None if linear.bias is None else self._values(linear.bias).astype(np.float64)
        return LinearWeights((weight.T if linear.is_transposed else weight).copy(), bias)

    def set_linear(self, path: str, weights: LinearWeights) -> None:
        for value, array in self._stored(path, weights).items():
            self._changed[value] = array
            self._write(value, array)

    def count_tokens(self, linears: Sequence[str]) -> dict[str, int]:
        batches = self._statistics
        masks, sizes = [batch.get(_MASK) for batch in batches], [next(iter(batch.values())).size for batch in batches]
        firsts = {path: int(_mask(batches[0], self._shapes[path]).sum()) for path in linears}
        return {path: count_in_proportion(first, masks, sizes) for path, first in firsts.items()}

    def weigh(self, linears: Sequence[str], on_progress: ProgressCallback) -> Mapping[str, np.ndarray]:
        if self.has_gradients:
            try:
                modules = import_module(_MODULES).TorchNetwork(self._inputs)
                metrics: Mapping[str, np.ndarray] = modules.weigh(linears, on_progress)
                self.token_weights = [
                    {path: [call.numpy() for call in calls] for path, calls in batch.items()}
                    for batch in modules.token_weights
                ]
                return metrics
            except InputError as error:
                if "op_type" not in error.details:
                    raise
                self.obstacle = str(error)
        return {path: np.zeros(2 * (len(self.linear(path).weight),)) for path in linears}

    def observe_inputs(
        self, linears: Sequence[str], observer: Callable[[CallTokens], None], on_progress: ProgressCallback
    ) -> None:
        for number, path, tokens in self._read(self._statistics, linears, on_progress):
            observer(self._tokens(number, path, tokens))

    def divergence(self) -> Divergence:
        graph, recorded = self._scored, _Recorded(self._scored, self._held_out)
        names, kind = self._inputs.outputs, several_answers(self._inputs.model.config)
        variance = variance_of([outputs for outputs in recorded.outputs if outputs is not None], names, kind)

        @functools.lru_cache(maxsize=1)
        def read(path: str) -> list[dict[str, np.ndarray]]:
            """What the call of a linear reads on each batch, and the operands of its layer."""
            call = self._scored_calls[path]
            run = graph.run_of(call.layer, call.reads, {})
            operands = (recorded.operands(number, call.layer) for number in range(len(self._held_out)))
            inputs = [{**batch, **known} for batch, known in zip(self._held_out, operands, strict=True)]
            return [{**known, **run(known)} for known in inputs]

        def mean(path: str, weights: LinearWeights) -> float:
            call = self._scored_calls[path]
            run = graph.run_of(call.layer, graph.layers[call.layer].results, self._stored(path, weights), call.reads)
            parts = []
            for number, inputs in enumerate(read(path)):
                before, after = recorded.outputs_of(number), recorded.outputs_after(number, call.layer, run(inputs))
                batch = {name: np.asarray(values) for name, values in self._inputs.held_out[number].items()}
                parts.append(divergence(before, after, names, batch, variance, kind=kind, temperature=TEMPERATURE))
            return float(np.concatenate(parts).mean())

        return mean

    def feeders(self, linear: str) -> tuple[str, ...]:
        return self._feeders[linear]

    def targeted_calls(self, sets: Sequence[RefitSet], on_progress: ProgressCallback) -> Iterator[Iterator[CallTokens]]:
        self._changed.clear()
        dense = LayerPass(self._graph, self._statistics, {})
        pruned = LayerPass(self._graph, self._statistics, self._changed)
        for part in tracked(sets, on_progress):
            layer = self._calls[part.linears[0]].layer
            dense.advance(layer)
            pruned.advance(layer)
            yield self._targeted(part, dense, pruned)

    def _targeted(self, part: RefitSet, dense: LayerPass, pruned: LayerPass) -> Iterator[CallTokens]:
        calls = {path: self._calls[path] for path in part.linears}
        if part.columns is None:  # feeders, whose outputs are the targets
            calls = {path: call._replace(residual=None, total=call.linear.output) for path, call in calls.items()}
        passes = zip(
            dense.observe([call.total for call in calls.values()]),
            pruned.observe(list(dict.fromkeys(value for call in calls.values() for value in call.reads))),
            strict=True,
        )
        for number, (expected, actual) in enumerate(passes):
            for path, call in calls.items():
                tokens, target = actual[_name(call.linear.activation)], expected[_name(call.total)]
                if call.residual is not None:
                    target = target - actual[_name(call.residual)]
                yield self._tokens(number, path, tokens, target)

    def _tokens(self, batch: int, path: str, inputs: np.ndarray, targets: np.ndarray | None = None) -> CallTokens:
        mask = _mask(self._statistics[batch], inputs.shape[:-1])
        return CallTokens(path, batch, 0, mask, inputs[mask], None if targets is None else targets[mask])

    def _read(
        self, batches: Sequence[Arrays], paths: Iterable[str], on_progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[int, str, np.ndarray]]:
        """Number of the batch, path and inputs of linears of the whole graph, up to the layer of the last end."""
        dense, last = LayerPass(self._graph, batches, {}), self._last_layer
        for layer in range(last + 1):
            on_progress(layer * len(batches) // (last + 1), len(batches))
            here = {path: self._calls[path].linear.activation for path in paths if self._calls[path].layer == layer}
            activations = list(dict.fromkeys(here.values()))
            for number, values in enumerate(dense.observe(activations, advance=layer < last)):
                yield from ((number, path, values[_name(activation)]) for path, activation in here.items())
        on_progress(len(batches), len(batches))

    def _values(self, value: ir.Value) -> np.ndarray:
        """The present values of an initializer."""
        assert value.const_value is not None
        name = _name(value)
        return self._changed[name] if name in self._changed else value.const_value.numpy()

    def _stored(self, path: str, weights: LinearWeights) -> dict[str, np.ndarray]:
        """Name of the initializer -> its values, for weights of a linear."""
        linear = self._calls[path].linear
        weight = weights.weight.T if linear.is_transposed else weights.weight
        stored = {_name(linear.weight): np.ascontiguousarray(weight, self._values(linear.weight).dtype)}
        if linear.bias is not None and weights.bias is not None:
            stored[_name(linear.bias)] = weights.bias.astype(self._values(linear.bias).dtype)
        return stored

    def _find_feeders(self, ends: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The feeders of each end: of the linears before it in its layer, those that read what the last one reads."""
        feeders: dict[str, tuple[str, ...]] = {}
        before: list[str] = []  # the linears of the layer since its last end
        for path, call in self._calls.items():
            before = [earlier for earlier in before if self._calls[earlier].layer == call.layer]
            if path not in ends:
                before.append(path)
                continue
            shape = self._shapes[path]
            alike = [earlier for earlier in before if self._shapes[earlier] == shape]
            is_whole = len(shape) > 1 or is_token_mask(self._statistics[0].get(_MASK), shape)
            is_last = call.layer == len(self._graph.layers) - 1
            read = [self._calls[earlier].linear.activation for earlier in alike]
            same = zip(alike, read, strict=True) if is_whole and not is_last else ()
            feeders[path] = tuple(earlier for earlier, activation in same if activation is read[-1])
            before = []
        return feeders


class _Recorded:
    """What the whole graph computes on batches: the operands of layers as far as the memory suffices, and outputs.

    Outputs with more than two axes are None; they are computed again when needed.
    """

    def __init__(self, graph: LayeredGraph, batches: Sequence[Arrays]) -> None:
        self._batches = batches
        self._runs = [graph.run_of(number, layer.results, {}) for number, layer in enumerate(graph.layers)]
        self._operands: list[list[Arrays]] = []
        self.outputs: list[Arrays | None] = []
        free = _RECORDED_BYTES
        for batch in batches:
            recorded, operands = list[Arrays]([{}]), dict[str, np.ndarray]()
            for run in self._runs:
                known = {id(array) for array in operands.values()}
                operands = run({**batch, **operands})
                if free > 0 and len(recorded) < len(self._runs):
                    recorded.append(operands)
                    free -= sum(array.nbytes for array in operands.values() if id(array) not in known)
            self._operands.append(recorded)
            self.outputs.append(operands if all(array.ndim <= 2 for array in operands.values()) else None)

    def operands(self, batch: int, layer: int) -> Arrays:
        """The operands of a layer on a batch; behind the last layer, the outputs of the graph."""
        start = min(layer, len(self._operands[batch]) - 1)
        return self._run(batch, start, self._operands[batch][start], layer)

    def outputs_of(self, batch: int) -> Arrays:
        return self.outputs[batch] or self.operands(batch, len(self._runs))

    def outputs_after(self, batch: int, layer: int, results: Arrays) -> Arrays:
        """The outputs of the graph on a batch with other results of a layer."""
        return self._run(batch, layer + 1, results, len(self._runs))

    def _run(self, batch: int, start: int, operands: Arrays, end: int) -> Arrays:
        for run in self._runs[start:end]:
            operands = run({**self._batches[batch], **operands})
        return operands


def sessions_of(inputs: PruningInputs, weights: str | None = None) -> SessionNetwork | None:
    """Sessions of the graph of a file on the CPU; None: modules of PyTorch run it.

    Modules run encoder-decoders, graphs in which several matmuls have one weight, encoders of sentences, whose scored
    output is computed from that of the graph, and, unless weights are to be equal, every graph on a GPU.

    Args:
        inputs: the model of the file, and its rows.
        weights: `gradients`: PyTorch weighs tokens and errors of outputs by them; `equal` or None: all count alike.
    """
    file = inputs.model
    if (
        not isinstance(file, GraphFile)
        or (weights != "equal" and has_gpu())
        or file.config.is_encoder_decoder
        or not set(inputs.outputs) <= file.output_specs.keys()
    ):
        return None
    model = file.wide()
    stored = {group.linear: group.weights for group in graph_passes.find_groups(model).groups}
    ends = {str(group.linear): stored[str(group.linear)] for group in inputs.groups}
    linears = find_linears(list(model.graph))
    uses = Counter(value.name for linear, _ in linears for value in (linear.weight, linear.bias) if value is not None)
    if max(uses.values(), default=0) > 1 or any(len(names) != 1 or names[0] not in uses for names in ends.values()):
        return None
    by_path = {path: names[0] for path, names in ends.items()}
    return SessionNetwork(inputs, model, by_path, has_gradients=weights == "gradients")


def _name(value: ir.Value) -> str:
    return value.name or ""


def _calls_of(graph: LayeredGraph, paths: Mapping[str, str]) -> dict[str, _Call]:
    """Path of a linear, or the name of its weight -> its call, in order; `paths` are those of some weights."""
    return {
        paths.get(_name(linear.weight), _name(linear.weight)): _call_of(number, linear)
        for number, layer in enumerate(graph.layers)
        for linear in (operator.linear for operator in layer.operators)
        if linear is not None
    }


def _call_of(layer: int, linear: GraphLinear) -> _Call:
    """The call of a linear in a layer, with the residual sum that its output joins first."""
    output = linear.output
    while True:
        readers = [node for node, _ in output.uses()]
        sums = [node for node in readers if is_sum(node)]
        if sums:
            residual = next((value for value in sums[0].inputs if value is not output), None)
            return _Call(layer, linear, residual, sums[0].outputs[0])
        if len(readers) != 1 or readers[0].op_type not in _PASSING:
            return _Call(layer, linear, None, linear.output)
        output = readers[0].outputs[0]


def _mask(batch: Arrays, shape: tuple[int, ...]) -> np.ndarray:
    """The tokens that are not padding, of the axes of a linear's input without the last."""
    mask = batch.get(_MASK)
    return mask.reshape(shape) != 0 if is_token_mask(mask, shape) else np.ones(shape, bool)
