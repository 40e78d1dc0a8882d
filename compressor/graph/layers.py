"""What a graph consists of: linears, sums of the residual stream, and the layers between those sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

_LARGEST = 1e4
"""Magnitude of a constant above which it is a mask, and no weight."""
_LONG_LIVED = 3
"""Sums of the residual stream that a value outlives if it belongs to no single layer, such as an encoder's output."""
_SUMS = ("Add", "Sum")
_MATMULS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class GraphLinear:
    """A matmul with a weight of two axes, and the addition of its bias.

    Attributes:
        is_transposed: whether the initializer of the weight is `[inputs, outputs]`.
    """

    activation: ir.Value
    weight: ir.Value
    is_transposed: bool
    bias: ir.Value | None
    output: ir.Value


@dataclass(frozen=True)
class Operator:
    """A single node, or the last of those that a linear replaces."""

    node: ir.Node
    linear: GraphLinear | None

    @property
    def reads(self) -> Sequence[ir.Value | None]:
        """What it reads; of a linear, the activation alone."""
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
        operands: values that earlier layers compute and this or later ones read, the residual stream first.
        results: values that later layers read, the residual stream first; of the last layer, those that are returned.
        unused: for each operator, what no later operator of the layer reads.
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
        found = list(_linears_of(nodes))
        matmuls = {linear.output: linear for linear, _ in found}
        absorbed = {node for _, replaced in found for node in replaced}
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
    """Operators in layers."""
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


def _linears_of(nodes: Sequence[ir.Node]) -> Iterator[tuple[GraphLinear, list[ir.Node]]]:
    """The matmuls of an activation with a weight of two axes, and the nodes that each replaces.

    These are the matmul, the addition of its bias, and the transposition that it alone reads.
    """
    for node in nodes:
        if node.op_type == "MatMul" and node.domain in ("", "ai.onnx"):
            activation, operand = node.inputs
            transposition, weight, is_transposed = _weight_behind(operand)
            if activation is None or activation.is_initializer() or weight is None:
                continue
            if is_transposed and any(reader.op_type not in _MATMULS for reader, _ in weight.uses()):
                continue  # tied to a table in the other layout, of which it is no view
            add = _bias_addition(node.outputs[0])
            bias = None if add is None else next(value for value in add.inputs if value is not node.outputs[0])
            replaced = [node] if add is None else [add, node]
            linear = GraphLinear(activation, weight, is_transposed, bias, replaced[0].outputs[0])
            if transposition is not None and len(list(transposition.outputs[0].uses())) == 1:
                replaced.append(transposition)
            yield linear, replaced
        elif node.op_type == "Gemm":
            activation, weight = node.inputs[:2]
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
            if (
                plain
                and activation is not None
                and not activation.is_initializer()
                and not node.attributes.get_int("transA", 0)
                and weight is not None
                and _is_matrix(weight)
                and (bias is None or _is_vector(bias))
            ):
                is_transposed = not node.attributes.get_int("transB", 0)
                yield GraphLinear(activation, weight, is_transposed, bias, node.outputs[0]), [node]


def _weight_behind(value: ir.Value | None) -> tuple[ir.Node | None, ir.Value | None, bool]:
    """The matrix that a matmul reads, behind a transposition or not, and whether it is `[inputs, outputs]`."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == "Transpose":
        source = node.inputs[0]
        return node, source if source is not None and _is_matrix(source) else None, False
    return None, value if value is not None and _is_matrix(value) else None, True


def _bias_addition(value: ir.Value) -> ir.Node | None:
    """The node that adds a bias to the output of a matmul, if nothing else reads that output."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0][0]
    if node.op_type != "Add":
        return None
    others = [operand for operand in node.inputs if operand is not value]
    return node if len(others) == 1 and others[0] is not None and _is_vector(others[0]) else None


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    return value.is_initializer() and tensor is not None and len(tensor.shape) == 2 and tensor.dtype.is_floating_point()


def _is_vector(value: ir.Value) -> bool:
    tensor = value.const_value
    return value.is_initializer() and tensor is not None and len(tensor.shape) == 1 and tensor.size > 1


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
