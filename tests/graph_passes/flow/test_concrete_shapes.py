"""Concrete shapes: fixed ones, those that depend on the inputs, and those unknown to ONNX's inference."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.sizes import BATCH
from tests.graph_passes.fused_layers import FUSED
from tests.graph_passes.graphs import draw, graph, run
from tests.graph_passes.layers import LAYERS


def value(model: ir.Model, name: str) -> ir.Value:
    return next(output for node in model.graph for output in node.outputs if output.name == name)


def test_every_free_dimension_has_its_own_size_and_batches_share_theirs() -> None:
    model = graph("y = MatMul (x, z)", inputs="float[B, S, T] x, float[C, T, U] z", outputs="float[B, S, U] y")
    shapes = Probe(model).shapes(model.graph.outputs[0])
    for batch, shape in zip(BATCH, shapes, strict=True):
        assert shape is not None
        assert shape[0] == batch
        assert len(set(shape)) == len(shape)


def test_symbols_that_an_operator_needs_to_be_equal_get_one_size() -> None:
    model = graph("y = Add (x, z)", inputs="float[B, S, 8] x, float[B, T, 8] z")
    probe = Probe(model)
    first, second = (probe.shapes(source) for source in model.graph.inputs)
    assert first == second == probe.shapes(model.graph.outputs[0])


def test_sizes_and_contents_are_fixed_if_they_do_not_depend_on_the_inputs() -> None:
    model = graph(
        "s = Shape (x) width = Gather (s, i2) length = Gather (s, i1) y = Relu (x)", "int64 i1 = {1}, int64 i2 = {2}"
    )
    probe = Probe(model)
    assert [probe.fixed(model.graph.inputs[0], axis) for axis in range(3)] == [False, False, True]
    assert probe.constant(value(model, "width")) == 8
    assert probe.constant(value(model, "length")) is None
    first, second = probe.contents(value(model, "length"))
    assert first is not None
    assert second is not None
    assert first != second


def test_a_length_that_is_rounded_up_is_no_fixed_size() -> None:
    """Both made-up lengths are below the block of 128 positions, so that both have one block."""
    body = "s = Shape <start = 1, end = 2> (x) n = Neg (s) m = Mod (n, b) whole = Add (s, m) blocks = Div (whole, b)"
    probe = Probe(model := graph(f"{body} y = Relu (x)", "int64[1] b = {128}"))
    first, second = probe.contents(value(model, "blocks"))
    assert first is not None
    assert second is not None
    assert 0 < first < second


def test_a_new_tensor_can_take_over_the_shape_of_another() -> None:
    model = graph("y = Relu (x)")
    probe, replacement = Probe(model), ir.Value(name="replacement")
    assert probe.shapes(replacement) == (None, None)
    probe.copy_shape(replacement, model.graph.outputs[0])
    assert probe.shapes(replacement) == probe.shapes(model.graph.outputs[0])


@pytest.mark.parametrize("name", [*LAYERS, *FUSED])
def test_shapes_equal_those_that_the_runtime_computes(name: str) -> None:
    model = (LAYERS | FUSED)[name].graph()
    probe = Probe(model)
    for node in model.graph:
        for output in node.outputs[:1]:
            shape, dtype = probe.shape(output), probe.dtype(output)
            if shape is not None and dtype is not None and output.name != "y" and output.dtype is None:
                output.shape, output.type = ir.Shape([None] * len(shape)), ir.TensorType(dtype)
                model.graph.outputs.append(output)
    sizes = dict(zip(("B", "S"), probe.shape(model.graph.inputs[0]) or (), strict=False))
    computed = run(model, draw(model, sizes))
    assert len(computed) > 1
    assert [array.shape for array in computed] == [probe.shape(output) for output in model.graph.outputs]
