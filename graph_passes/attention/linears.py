"""The matmuls of a graph with a weight of two axes, each with its bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from graph_passes.tape import input_of, producer_of

_MATMULS = ("MatMul", "Gemm")


@dataclasses.dataclass(frozen=True)
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


def find_linears(nodes: Iterable[ir.Node]) -> Iterator[tuple[GraphLinear, list[ir.Node]]]:
    """The matmuls of an activation with a weight of two axes, and the nodes that each replaces.

    These are the matmul, the addition of its bias, and the transposition that it alone reads.
    """
    for node in nodes:
        if node.op_type == "MatMul" and not node.domain:
            activation, operand = node.inputs
            transposition, weight, is_transposed = _weight_behind(operand)
            if activation is None or activation.is_initializer() or weight is None:
                continue
            if is_transposed and any(reader.op_type not in _MATMULS for reader, _ in weight.uses()):
                continue  # tied to a table in the other layout, of which it is no view
            add = _bias_addition(node.outputs[0], _outputs(weight, is_transposed))
            bias = None if add is None else next(value for value in add.inputs if value is not node.outputs[0])
            replaced = [node] if add is None else [add, node]
            linear = GraphLinear(activation, weight, is_transposed, bias, replaced[0].outputs[0])
            if transposition is not None and len(list(transposition.outputs[0].uses())) == 1:
                replaced.append(transposition)
            yield linear, replaced
        elif node.op_type == "Gemm":
            activation, weight = node.inputs[:2]
            bias = input_of(node, 2)
            is_transposed = not node.attributes.get_int("transB", 0)
            plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
            if (
                plain
                and activation is not None
                and not activation.is_initializer()
                and not node.attributes.get_int("transA", 0)
                and weight is not None
                and _is_matrix(weight)
                and (bias is None or _is_vector(bias, _outputs(weight, is_transposed)))
            ):
                yield GraphLinear(activation, weight, is_transposed, bias, node.outputs[0]), [node]


def _weight_behind(value: ir.Value | None) -> tuple[ir.Node | None, ir.Value | None, bool]:
    """The matrix that a matmul reads, behind a transposition or not, and whether it is `[inputs, outputs]`."""
    node = producer_of(value)
    if node is not None and node.op_type == "Transpose":
        source = node.inputs[0]
        return node, source if source is not None and _is_matrix(source) else None, False
    return None, value if value is not None and _is_matrix(value) else None, True


def _bias_addition(value: ir.Value, outputs: int) -> ir.Node | None:
    """The node that adds a bias to the output of a matmul, if nothing else reads that output."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0][0]
    if node.op_type != "Add":
        return None
    addends = [operand for operand in node.inputs if operand is not value]
    return node if len(addends) == 1 and addends[0] is not None and _is_vector(addends[0], outputs) else None


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    return value.is_initializer() and tensor is not None and len(tensor.shape) == 2 and tensor.dtype.is_floating_point()


def _outputs(weight: ir.Value, is_transposed: bool) -> int:
    assert weight.const_value is not None
    return int(weight.const_value.shape.numpy()[1 if is_transposed else 0])


def _is_vector(value: ir.Value, size: int) -> bool:
    tensor = value.const_value
    return value.is_initializer() and tensor is not None and tensor.shape.numpy() == (size,) and size > 1
