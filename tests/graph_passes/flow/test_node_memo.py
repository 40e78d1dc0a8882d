"""Equal nodes are inferred once, whatever their names, and nodes that differ in anything are not mixed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.node_memo import content_key, node_key, once
from tests.graph_passes.graphs import graph


def shape_of(model: ir.Model) -> Any:
    return Probe(model).shapes(model.graph.outputs[0])


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that ONNX infers from now on."""
    operators: list[str] = []
    infer: Callable[..., Any] = onnx.shape_inference.infer_node_outputs

    def count(schema: Any, node: onnx.NodeProto, *arguments: Any, **options: Any) -> Any:
        operators.append(node.op_type)
        return infer(schema, node, *arguments, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_node_outputs", count)
    return operators


def test_equal_nodes_are_inferred_once(inferred: list[str]) -> None:
    inputs: dict[str, Any] = {"inputs": "float[B, S, 13] x", "outputs": "float[B, S, 13] y"}
    shapes = shape_of(graph("a = Softmax (x) y = Softmax (a)", **inputs))
    assert inferred == ["Softmax", "Softmax"]  # one for each assignment of sizes
    assert shape_of(graph("first = Softmax (x) y = Softmax (first)", **inputs)) == shapes
    assert len(inferred) == 2


@pytest.mark.parametrize(
    ("body", "other"),
    [
        ("y = Transpose <perm = [0, 2, 1]> (x)", "y = Transpose <perm = [1, 0, 2]> (x)"),
        (
            "i = Constant <value = int64[1] {2}> () y = Unsqueeze (x, i)",
            "i = Constant <value = int64[1] {3}> () y = Unsqueeze (x, i)",
        ),
        ("y = ReduceSum <keepdims = 0> (x)", "y = ReduceSum <keepdims = 1> (x)"),
        ("a, y = Split <num_outputs = 2, axis = 2> (x)", "y = Split <num_outputs = 1, axis = 2> (x)"),
    ],
)
def test_nodes_that_differ_have_shapes_of_their_own(body: str, other: str) -> None:
    shapes = [shape_of(graph(text)) for text in (body, other)]
    assert shapes[0] != shapes[1]
    assert [shape_of(graph(text)) for text in (body, other)] == shapes


def test_contents_of_equal_nodes_cannot_be_changed() -> None:
    model = graph("s = Shape (x) d = Add (s, s) y = Relu (x)")
    (sums,) = model.graph[1].outputs
    content, _ = Probe(model).contents(sums)
    assert content is not None
    with pytest.raises(ValueError, match="read-only"):
        content[0] = 0


def test_a_key_tells_types_and_shapes_apart() -> None:
    arrays = [np.zeros(4, np.int64), np.zeros((4, 1), np.int64), np.zeros(4, np.float64), np.ones(4, np.int64)]
    assert len({content_key(array) for array in arrays}) == len(arrays)


def test_a_node_with_a_graph_has_no_key() -> None:
    branch = ir.Attr("then_branch", ir.AttributeType.GRAPH, graph("y = Relu (x)").graph)
    node = ir.Node("", "If", [], [branch])
    assert node_key(node) is None
    results = iter(range(2))
    assert [once(node_key(node), lambda: next(results)) for _ in range(2)] == [0, 1]
