"""The layers of a graph, between sums of its residual stream, and how they run one by one in ONNX Runtime.

They run over many batches, with weights that change on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from compressor.errors import ErrorCode, InputError
from compressor.targets.machine import usable_cores
from compressor.targets.onnxruntime.ort_session import error_line, run_session
from graph_passes.attention.linears import GraphLinear, find_linears

_LARGEST = 1e4
"""Magnitude above which a constant is a mask and not a weight."""
_LONG_LIVED = 3
"""A value that is read after this many sums of the residual stream, such as an encoder's output, belongs to no single
layer."""
_SUMS = ("Add", "Sum")


@dataclass(frozen=True)
class Operator:
    """A single node, or the last of those that a linear replaces."""

    node: ir.Node
    linear: GraphLinear | None

    @property
    def reads(self) -> Sequence[ir.Value | None]:
        """The tensors that it reads; of a linear, the activation alone."""
        return self.node.inputs if self.linear is None else (self.linear.activation,)

    @property
    def adds_activations(self) -> bool:
        """Whether it is the sum of two activations."""
        return self.linear is None and is_sum(self.node)


@dataclass(frozen=True)
class Layer:
    """The operators between two sums of the residual stream.

    Attributes:
        operators: the operators.
        operands: values that earlier layers compute and this or later layers read, the residual stream first.
        results: values that later layers read, the residual stream first; of the last layer, those that are returned.
        unused: for each operator, the values that no later operator of the layer reads.
    """

    operators: tuple[Operator, ...]
    operands: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]
    unused: tuple[tuple[ir.Value, ...], ...]


class Division:
    """A graph in layers.

    Args:
        graph: a normalized graph, whose local functions are inlined and whose constants are initializers.

    Attributes:
        parameters: the initializers that are weights.
        linears: the matmuls with a weight of two axes, in order.
        before: operators that depend on inputs and constants alone, such as those of an attention mask.
        layers: the layers, of which the last one ends with the outputs of the graph.
        uses: initializer -> number of nodes other than linears that read it.
    """

    def __init__(self, graph: ir.Graph) -> None:
        nodes = list(graph)
        linears = list(find_linears(nodes))
        matmuls = {linear.output: linear for linear, _ in linears}
        absorbed = {node for _, replaced in linears for node in replaced}
        self.parameters, self.linears = _parameters(graph), tuple(matmuls.values())
        self.uses = Counter(
            value for node in nodes if node not in absorbed for value in node.inputs if value is not None
        )
        depends = _dependent(nodes, self.parameters)
        operators = [
            Operator(node, matmuls.get(next(iter(node.outputs))))
            for node in nodes
            if node not in absorbed or node.outputs[0] in matmuls
        ]
        self.before = tuple(part for part in operators if part.node.outputs[0] not in depends)
        self.layers = tuple(_layers([part for part in operators if part.node.outputs[0] in depends], depends, graph))


def _layers(operators: Sequence[Operator], depends: set[ir.Value], graph: ir.Graph) -> Iterator[Layer]:
    last_use = {
        value: position
        for position, operator in enumerate(operators)
        for value in operator.reads
        if value is not None and value in depends
    }
    returned = [value for value in graph.outputs if value in depends]
    held: list[ir.Value] = []
    start = 0
    for end in (*(cut + 1 for cut in _cuts(operators, depends, last_use)), len(operators)):
        part, results = operators[start:end], returned
        if end < len(operators):
            stream = part[-1].node.outputs[0]
            produced = [*held, *(value for operator in part for value in operator.node.outputs)]
            alive = [value for value in produced if last_use.get(value, -1) >= end or value in returned]
            results = [stream, *(value for value in dict.fromkeys(alive) if value is not stream)]
        unused = tuple(
            tuple(
                value
                for value in dict.fromkeys(operator.reads)
                if value is not None and last_use.get(value) == position and value not in results
            )
            for position, operator in enumerate(part, start)
        )
        yield Layer(tuple(part), tuple(held), tuple(results), unused)
        held, start = list(results), end


def _cuts(operators: Sequence[Operator], depends: set[ir.Value], last_use: Mapping[ir.Value, int]) -> list[int]:
    """Positions of the sums at which layers end: what crosses them is the sum, or outlives several sums."""
    crossings: dict[int, list[ir.Value]] = {}
    alive: dict[ir.Value, int] = {}
    for position, operator in enumerate(operators):
        node = operator.node
        alive = {value: end for value, end in alive.items() if end > position}
        adds = operator.adds_activations and all(value in depends for value in node.inputs)
        if adds and last_use.get(node.outputs[0], -1) > position:
            crossings[position] = list(alive)
        for value in node.outputs:
            if _is_float(value, node) and last_use.get(value, -1) > position:
                alive[value] = last_use[value]
    crossed = Counter(value for values in crossings.values() for value in values)
    return [
        position for position, values in crossings.items() if all(crossed[value] >= _LONG_LIVED for value in values)
    ]


def is_sum(node: ir.Node) -> bool:
    """Whether a node adds activations."""
    return (
        node.op_type in _SUMS
        and len(node.inputs) == 2
        and all(value is not None and not value.is_initializer() for value in node.inputs)
        and _is_float(node.outputs[0], node)
    )


def _is_float(value: ir.Value, node: ir.Node) -> bool:
    """Whether a value has floating-point numbers; one of unknown type has, unless its node computes shapes."""
    if value.dtype is not None:
        return value.dtype.is_floating_point()
    return node.op_type not in ("Shape", "Size", "NonZero", "ArgMax", "ArgMin")


def _parameters(graph: ir.Graph) -> set[ir.Value]:
    """The initializers that are weights: floating-point numbers, several of them, which are no mask."""
    weights = set()
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or tensor.size < 2:
            continue
        array = tensor.numpy()
        largest = np.abs(array.astype(np.float32)).max()
        if np.isfinite(largest) and largest < _LARGEST:
            weights.add(value)
    return weights


def _dependent(nodes: Sequence[ir.Node], parameters: set[ir.Value]) -> set[ir.Value]:
    """The values that are computed from a weight."""
    dependent: set[ir.Value] = set()
    for node in nodes:
        if any(value in parameters or value in dependent for value in node.inputs if value is not None):
            dependent.update(node.outputs)
    return dependent


Arrays = Mapping[str, np.ndarray]
"""Name of a tensor -> its values."""


class LayeredGraph(Division):
    """A graph whose layers run one by one; see `Division` for the graph."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__(model.graph)
        self._model = model
        types = (linear.weight.dtype for linear in self.linears)
        self._floats = next(filter(None, types), ir.DataType.FLOAT)

    def run_of(
        self, layer: int, outputs: Sequence[ir.Value], weights: Arrays, known: Sequence[ir.Value] = ()
    ) -> Callable[[Arrays], dict[str, np.ndarray]]:
        """Compile the operators that compute some values of a layer by name, from the inputs of the graph and operands
        of the layer.

        The values are of this layer or before it; `weights` are initializers with other values than in the graph, and
        `known` are further values that it gets, from which the rest of the layer is computed.

        Raises:
            InputError: ONNX Runtime cannot load it, or, when it runs, the graph does not run on these inputs, e.g. with
                more positions than it has.
        """
        operands = {value.name or "": value for value in (*self.layers[layer].operands, *known)}
        wanted = {value.name or "": value for value in outputs}
        computed = [value for name, value in wanted.items() if name not in operands]
        session = _session(self._part(computed, operands.values(), weights)) if computed else None
        for value, output in zip(computed, [] if session is None else session.get_outputs(), strict=True):
            kind = output.type.removeprefix("tensor(").removesuffix(")").upper()
            value.type = value.type or ir.TensorType(ir.DataType[kind])  # which the next layer needs

        def run(feeds: Arrays) -> dict[str, np.ndarray]:
            try:
                results = {} if session is None else run_session(session, feeds)
            except InputError as error:
                raise InputError(
                    f"the graph does not run on these inputs ({error}); give rows of sizes that the graph takes, e.g. "
                    f"shorter rows",
                    code=ErrorCode.TENSOR_MISMATCH,
                ) from error
            return {**results, **{name: feeds[name] for name in wanted if name in operands}}

        return run

    def _part(self, outputs: Sequence[ir.Value], known: Iterable[ir.Value], weights: Arrays) -> ir.Model:
        """A graph that computes some values from the inputs of the graph and from values that are known."""
        graph = self._model.graph
        inputs = (value for value in graph.inputs if not value.is_initializer())
        part = ir.convenience.extract(graph, list(dict.fromkeys([*known, *inputs])), outputs)
        part.inputs[:] = [value for value in part.inputs if value.uses()]
        for value in part.inputs:
            value.type = value.type or ir.TensorType(self._floats)  # of a layer before which none was compiled
        for name, value in part.initializers.items():
            if name in weights:
                value.const_value = ir.Tensor(weights[name], name=name)
            elif isinstance(tensor := value.const_value, ir.ExternalTensor):
                # ONNX Runtime reads no file beside a graph that is no file.
                value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=name)
        return ir.Model(part, ir_version=self._model.ir_version)


def _session(part: ir.Model) -> ort.InferenceSession:
    """Load a part, which shares the machine with many others: no memory is kept and no thread waits between runs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = usable_cores(), 4
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(ir.to_proto(part).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the exceptions of ONNX Runtime share no other base class
        text = f"ONNX Runtime cannot load a part of the graph ({error_line(error)}); export the graph again"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED) from error


class LayerPass:
    """All batches at the start of a layer, computed with weights that may change on the way.

    The values observed last are kept, and the rest of the layer is computed from them.

    Args:
        graph: the graph.
        batches: its inputs by name, `[batch, ...]` each.
        weights: initializers with other values than in the graph; changes have no effect before the present layer or
            the values observed last.

    Attributes:
        layer: number of the present layer.
    """

    def __init__(self, graph: LayeredGraph, batches: Sequence[Arrays], weights: Arrays) -> None:
        self._graph, self._batches, self._weights, self.layer = graph, batches, weights, 0
        self._operands: list[Arrays] = [{} for _ in batches]
        self._observed: list[Arrays] = [{} for _ in batches]
        self._known: Sequence[ir.Value] = ()

    def observe(self, values: Sequence[ir.Value], *, advance: bool = False) -> Iterator[dict[str, np.ndarray]]:
        """Some values of the present layer by name, batch by batch, all of which have to be consumed.

        Args:
            values: the values.
            advance: whether the pass goes on to the start of the next layer.
        """
        results = self._graph.layers[self.layer].results if advance else ()
        run = self._graph.run_of(self.layer, [*values, *results], self._weights, self._known)
        for number, batch in enumerate(self._batches):
            computed = run({**batch, **self._operands[number], **self._observed[number]})
            observed = {value.name or "": computed[value.name or ""] for value in values}
            if advance:
                self._operands[number] = {value.name or "": computed[value.name or ""] for value in results}
            self._observed[number] = {} if advance else observed
            yield observed
        self.layer += advance
        self._known = () if advance else tuple(values)

    def advance(self, layer: int) -> None:
        """Run all batches up to the start of a layer."""
        while self.layer < layer:
            for _ in self.observe((), advance=True):
                pass
