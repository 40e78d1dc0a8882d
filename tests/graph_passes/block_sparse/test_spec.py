"""The tape of a function records each constant once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.block_sparse.spec import GraphBuilder


def test_nodes_are_recorded_in_order() -> None:
    op, x = GraphBuilder(ir.DataType.FLOAT), ir.Value(name="x")
    y = op("Add", x, op.floats(1.0))
    z = op("Gather", y, op.ints([0]), axis=1)
    assert [node.op_type for node in op.nodes] == ["Constant", "Add", "Constant", "Gather"]
    assert op.nodes[-1].attributes.get_int("axis") == 1
    assert op.nodes[-1].outputs[0] is z


def test_equal_constants_share_a_node() -> None:
    op = GraphBuilder(ir.DataType.FLOAT16)
    assert op.ints([1, 2]) is op.ints(np.array([1, 2]))
    distinct = {op.ints([1]), op.ints(1), op.ints([[1]]), op.floats([1]), op.ints([2])}
    assert len(distinct) == 5
    tensor = op.floats(0.5).producer().attributes["value"].as_tensor()  # type: ignore[union-attr]
    assert tensor.dtype == ir.DataType.FLOAT16


def test_one_part_is_the_tensor_itself() -> None:
    op, x = GraphBuilder(ir.DataType.FLOAT), ir.Value(name="x")
    assert op.split(x, [3]) == [x]
    assert len(op.split(x, [1, 2])) == 2
    assert [node.op_type for node in op.nodes] == ["Constant", "Split"]


def test_a_scalar_has_no_axes() -> None:
    op, x = GraphBuilder(ir.DataType.FLOAT), ir.Value(name="x")
    node = op.scalar(x).producer()
    assert node is not None
    assert node.op_type == "Squeeze"
