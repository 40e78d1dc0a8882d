"""An ONNX graph for refits: its layers run in ONNX Runtime, and its tokens are arrays."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple, TypeGuard

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
from compressor.selection.pruners.layerwise.refit import CallTokens
from compressor.selection.pruners.reconstruct.method import Divergence, Network, RefitSet
from compressor.units.prunable import LinearWeights
from graph_passes.attention.linears import GraphLinear
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

TokensAndMetrics = tuple[Sequence[Mapping[str, Sequence[np.ndarray]]], Mapping[str, np.ndarray]]
Weigh = Callable[[Sequence[str], ProgressCallback], TokensAndMetrics]
"""Computes, for paths of linears, the weights of the tokens of each call and the metrics of outputs."""
Compare = Callable[[int, Arrays, Arrays], np.ndarray]
"""The divergence of each row of a held-out batch, by its number, of outputs from those of the whole graph."""


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

    Without gradients, all tokens and all errors of outputs have equal weights, unless `weigh` computes them. The
    weights that the graph holds are those of the whole network; a request for sums starts from them again.

    Args:
        graph: a graph in float32, each of whose linears is called once.
        scored: the same without positions that no output depends on, which losses are measured with.
        ends: path of the linear of each group -> name of the initializer of its weight.
        statistics: the calibration examples: inputs of the graph by name, `[batch, ...]` each.
        comparing: returns how outputs are compared, by those of the whole graph that have at most two axes.
        write: called with the name of an initializer and its values after each refit.

    Attributes:
        obstacle: the operator of the graph for which the requested gradients of `weigh` cannot be computed; None: they
            can be, or were not requested.
    """

    obstacle: str | None = None

    def __init__(
        self,
        graph: LayeredGraph,
        scored: LayeredGraph,
        ends: Mapping[str, str],
        statistics: Sequence[Arrays],
        held_out: Sequence[Arrays],
        comparing: Callable[[Sequence[Arrays]], Compare],
        *,
        weigh: Weigh | None = None,
        write: Callable[[str, np.ndarray], None] = lambda name, values: None,
    ) -> None:
        super().__init__(statistics)
        self._graph, self._scored, self._held_out = graph, scored, held_out
        self._comparing, self._weigh, self._write = comparing, weigh, write
        self.has_gradients = weigh is not None
        self._changed: dict[str, np.ndarray] = {}
        paths = {name: path for path, name in ends.items()}
        self._calls, self._scored_calls = _calls_of(graph, paths), _calls_of(scored, paths)
        self._last_layer = max(call.layer for path, call in self._calls.items() if path in ends)
        inputs = self._inputs(statistics[:1], self._calls)
        self._shapes = {path: tokens.shape[:-1] for _, path, tokens in inputs}  # of the first batch
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
        return {path: self._count(self._shapes[path]) for path in linears}

    def weigh(self, linears: Sequence[str], on_progress: ProgressCallback) -> Mapping[str, np.ndarray]:
        if self._weigh is not None:
            try:
                self.token_weights, metrics = self._weigh(linears, on_progress)
                return metrics
            except InputError as error:
                if "op_type" not in error.details:
                    raise
                self.obstacle = str(error)
        return {path: np.zeros(2 * (len(self.linear(path).weight),)) for path in linears}

    def observe_inputs(
        self, linears: Sequence[str], observer: Callable[[CallTokens], None], on_progress: ProgressCallback
    ) -> None:
        for number, path, tokens in self._inputs(self._statistics, linears, on_progress):
            observer(self._tokens(number, path, tokens))

    def divergence(self) -> Divergence:
        graph, recorded = self._scored, _Recorded(self._scored, self._held_out)
        compare = self._comparing([outputs for outputs in recorded.outputs if outputs is not None])

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
                changed = recorded.outputs_after(number, call.layer, run(inputs))
                parts.append(compare(number, recorded.outputs_of(number), changed))
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

    def _inputs(
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

    def _count(self, shape: tuple[int, ...]) -> int:
        """Number of tokens of all batches, by the axes of those of the first."""
        is_masked = _is_mask(self._statistics[0].get(_MASK), shape)
        sizes = [
            np.count_nonzero(batch[_MASK]) if is_masked else next(iter(batch.values())).size
            for batch in self._statistics
        ]
        tokens = sizes[0] if is_masked else int(np.prod(shape))
        return int(tokens * sum(sizes) // max(sizes[0], 1))

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
            is_whole = len(shape) > 1 or _is_mask(self._statistics[0].get(_MASK), shape)
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
    scored = DropUnreadPositions()(model.clone()).model
    stored = {group.linear: group.weights for group in graph_passes.find_groups(model).groups}
    ends = {str(group.linear): stored[str(group.linear)] for group in inputs.groups}
    graph = LayeredGraph(model)
    linears = graph.division.linears
    uses = Counter(value.name for linear in linears for value in (linear.weight, linear.bias) if value is not None)
    if max(uses.values(), default=0) > 1 or any(
        len(weights) != 1 or weights[0] not in uses for weights in ends.values()
    ):
        return None

    def weigh(linears: Sequence[str], on_progress: ProgressCallback) -> TokensAndMetrics:
        modules = import_module(_MODULES).TorchNetwork(inputs)
        metrics = modules.weigh(linears, on_progress)
        weights = [
            {path: [call.numpy() for call in of] for path, of in batch.items()} for batch in modules.token_weights
        ]
        return weights, metrics

    return SessionNetwork(
        graph,
        LayeredGraph(scored),
        {path: weights[0] for path, weights in ends.items()},
        [file.wide_feeds(batch) for batch in inputs.statistics],
        [file.wide_feeds(batch) for batch in inputs.held_out],
        partial(_comparing, inputs),
        weigh=weigh if weights == "gradients" else None,
        write=file.write,
    )


def _comparing(inputs: PruningInputs, dense: Sequence[Arrays]) -> Compare:
    """How outputs on held-out batches are compared; see `SessionNetwork`."""
    names, kind = inputs.outputs, several_answers(inputs.model.config)
    variance = variance_of(dense, names, kind)

    def compare(number: int, before: Arrays, after: Arrays) -> np.ndarray:
        batch = {name: np.asarray(values) for name, values in inputs.held_out[number].items()}
        return divergence(before, after, names, batch, variance, kind=kind, temperature=TEMPERATURE)

    return compare


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


def _is_mask(mask: np.ndarray | None, shape: tuple[int, ...]) -> TypeGuard[np.ndarray]:
    """Whether there is a mask that has the axes of tokens, or those are flattened row by row."""
    return mask is not None and (mask.shape == shape or shape == (mask.size,))


def _mask(batch: Arrays, shape: tuple[int, ...]) -> np.ndarray:
    """The tokens that are not padding, of the axes of a linear's input without the last."""
    mask = batch.get(_MASK)
    return mask.reshape(shape) != 0 if _is_mask(mask, shape) else np.ones(shape, bool)
