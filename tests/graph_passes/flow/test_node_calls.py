"""What nodes compute from given inputs: equal for equal calls, whatever the names of tensors."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.node_calls import Known, NodeCall, node_call, output_contents, output_types
from tests.graph_passes.graphs import graph


def of_only_node(text: str) -> tuple[ir.Node, ir.Model]:
    model = graph(text)
    return next(iter(model.graph)), model


def call_with(node: ir.Node, model: ir.Model, value: ir.Value, content: np.ndarray) -> NodeCall | None:
    """The call of a node whose inputs are one tensor."""
    known = Known({value: content.shape}, {value: ir.DataType.from_numpy(content.dtype)}, {value: content})
    return node_call(node, model, known)


@pytest.mark.parametrize("names", [("x", "y"), ("first", "second")])
def test_names_of_tensors_are_no_part_of_a_call(names: tuple[str, str]) -> None:
    source, result = names
    node, model = of_only_node(f"{result} = Concat <axis=0> ({source}, {source})")
    content = {value: np.arange(3) for value in node.inputs if value is not None}
    types = dict.fromkeys(content, ir.DataType.INT64)
    call = node_call(node, model, Known(dict.fromkeys(content, (3,)), types, content))
    assert call is not None
    renamed, other_model = of_only_node("c = Concat <axis=0> (a, b)")
    values = [value for value in renamed.inputs if value is not None]
    known = Known(
        shapes=dict.fromkeys(values, (3,)),
        types=dict.fromkeys(values, ir.DataType.INT64),
        constants=dict.fromkeys(values, np.arange(3)),
    )
    expected = node_call(renamed, other_model, known)
    assert call == expected
    assert output_types(call) == (((6,), ir.DataType.INT64),)
    assert output_contents(call)[0].tolist() == [0, 1, 2, 0, 1, 2]
    assert output_contents(call)[0] is output_contents(call)[0]


@pytest.mark.parametrize("change", ["content", "shape", "dtype", "attribute"])
def test_everything_that_a_result_depends_on_is_part_of_a_call(change: str) -> None:
    node, model = of_only_node("y = Concat <axis=0> (x, x)")
    variant, variant_model = of_only_node(f"y = Concat <axis={int(change == 'attribute')}> (x, x)")
    (value, *_), (variant_value, *_) = node.inputs, variant.inputs
    assert value is not None
    assert variant_value is not None
    array = np.zeros((2, 2), np.int64)
    variants: dict[str, np.ndarray] = {
        "content": array + 1,
        "shape": array.reshape(4, 1),
        "dtype": array.astype(np.int32),
    }
    changed = variants.get(change, array)
    first = call_with(node, model, value, array)
    second = call_with(variant, variant_model, variant_value, changed)
    assert first != second


def test_a_large_call_is_computed_and_not_remembered() -> None:
    node, model = of_only_node("y = Neg (x)")
    (value,) = node.inputs
    assert value is not None
    content = np.arange(4096)
    call = call_with(node, model, value, content)
    assert call is not None
    assert np.array_equal(output_contents(call)[0], -content)
    assert output_contents(call)[0] is not output_contents(call)[0]


def test_a_damaged_attribute_gives_no_call() -> None:
    node, model = of_only_node("y = Softmax <axis=1> (x)")
    node.attributes["axis"] = ir.Attr("axis", ir.AttributeType.UNDEFINED, None)
    assert node_call(node, model, Known()) is None


def test_strings_are_read_by_the_nodes_after_them() -> None:
    model = graph('s = Constant <value_strings=["abc", "d"]> () y = Equal (s, s)', outputs="bool[2] y")
    probe = Probe(model)
    (output,) = model.graph.outputs
    assert probe.shape(output) == (2,)
    assert probe.dtype(output) == ir.DataType.BOOL
    strings = probe.constant(next(iter(model.graph)).outputs[0])
    assert strings is not None
    assert strings.tolist() == ["abc", "d"]
