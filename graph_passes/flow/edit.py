"""Small edits that rules and passes share: cut and scale tensors, and give nodes constant inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.indices import Index, Need


def ints(content: Sequence[int] | np.ndarray) -> ir.Node:
    """A `Constant` node of int64 values, not yet in a graph."""
    return ir.node("Constant", [], {"value": ir.tensor(np.asarray(content, np.int64))})


def opset(node: ir.Node) -> int:
    """Version of the ONNX operator set that a node of a graph follows."""
    assert node.graph is not None
    return node.version or node.graph.opset_imports.get("", 1)


def cut_value(value: ir.Value, axis: int, positions: Index, before: ir.Node) -> ir.Value:
    """A tensor that holds only some positions of an axis, computed by Slice if they are consecutive, else by Gather.

    Args:
        value: the tensor to cut.
        axis: the axis to cut.
        positions: positions among those that the tensor holds; None: all, and the tensor is returned as it is.
        before: the node before which the new nodes are inserted.
    """
    graph = before.graph
    if positions is None or graph is None:
        return value
    positions = np.asarray(positions)
    if len(positions) and np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))):
        constants = [ints([bound]) for bound in (positions[0], positions[-1] + 1, axis)]
        cut = ir.node("Slice", [value, *(constant.outputs[0] for constant in constants)])
    else:
        constants = [ints(positions)]
        cut = ir.node("Gather", [value, constants[0].outputs[0]], {"axis": axis})
    graph.insert_before(before, [*constants, cut])
    if value.dtype is not None:
        cut.outputs[0].dtype = value.dtype
    return cut.outputs[0]


def positions_among(index: Index, held: Index) -> Index:
    """The positions of an index within an axis that holds only the positions `held` (None: all of them)."""
    return index if index is None or held is None else np.searchsorted(held, index)


def cut_value_of_rows(value: ir.Value, axis: int, positions: np.ndarray, width: int, before: ir.Node) -> ir.Value:
    """A tensor that holds only some positions of each row, on an axis that merges rows with what each row has.

    Args:
        value: the tensor to cut.
        axis: the axis to cut.
        positions: positions within a row, `[n]`.
        width: number of positions that a row holds.
        before: the node before which the new nodes are inserted.
    """
    assert before.graph is not None
    nodes: list[ir.Node] = []

    def constant(content: Sequence[int] | np.ndarray | int) -> ir.Value:
        nodes.append(ints(np.asarray(content)))
        return nodes[-1].outputs[0]

    def compute(operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(operator, list(inputs), attributes))
        return nodes[-1].outputs[0]

    size = compute("Gather", compute("Shape", value), constant(axis), axis=0)
    starts = compute("Range", constant(0), size, constant(width))
    selected = compute("Add", compute("Reshape", starts, constant([-1, 1])), constant(positions))
    cut = compute("Gather", value, compute("Reshape", selected, constant([-1])), axis=axis)
    before.graph.insert_before(before, nodes)
    if value.dtype is not None:
        cut.dtype = value.dtype
    return cut


def set_ints(node: ir.Node, position: int, values: Sequence[int] | np.ndarray) -> None:
    """Replace one input of a node by an int64 constant with the values and the rank of `values`."""
    assert node.graph is not None
    constant = ints(values)
    node.graph.insert_before(node, constant)
    if position >= len(node.inputs):
        node.resize_inputs(position + 1)
    node.replace_input_with(position, constant.outputs[0])


def cut_tensor(tensor: ir.TensorProtocol, need: Need, name: str) -> ir.LazyTensor:
    """A tensor cut to the needed indices; its data are read only when it is written."""
    shape = [size if index is None else len(index) for size, index in zip(tensor.shape.numpy(), need, strict=True)]

    def read() -> ir.TensorProtocol:
        content = tensor.numpy()
        for axis, index in enumerate(need):
            if index is not None:
                content = np.take(content, index, axis=axis)
        return ir.Tensor(content, dtype=tensor.dtype, name=name)

    return ir.LazyTensor(read, tensor.dtype, ir.Shape(shape), name=name)


def scale_tensor(tensor: ir.TensorProtocol, axis: int, factors: np.ndarray, name: str) -> ir.LazyTensor:
    """A tensor multiplied along one axis; computed only when it is written.

    Args:
        tensor: the tensor.
        axis: the axis.
        factors: the factor of each index of the axis, `[size]`.
        name: the name of the new tensor.
    """

    def read() -> ir.TensorProtocol:
        shape = [1] * len(tensor.shape)
        shape[axis] = -1
        content = tensor.numpy()
        return ir.Tensor((content * factors.reshape(shape)).astype(content.dtype), dtype=tensor.dtype, name=name)

    return ir.LazyTensor(read, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=name)
