"""Concrete shapes: fixed ones, those that depend on the inputs, and those unknown to ONNX's inference."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.sizes import BATCH, record_example_sizes
from tests.graph_passes.fused_layers import FUSED
from tests.graph_passes.graphs import draw, graph, run
from tests.graph_passes.layers import LAYERS
from tests.quick_cases import quick


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


def test_a_length_with_special_tokens_is_no_other_length_and_no_multiple_of_the_batch() -> None:
    names = "STUVWXY"
    model = graph("y = Relu (x0)", inputs=", ".join(f"float[B, {name}, 8] x{n}" for n, name in enumerate(names)))
    probe = Probe(model)
    lengths = [tuple(shape[1] for shape in probe.shapes(value) if shape) for value in model.graph.inputs]
    assert len({*lengths, BATCH}) == 1 + len(names)
    for first, second in lengths:
        longer = [(first + tokens, second + tokens) for tokens in range(1, 65)]
        assert not {*longer} & {*lengths, BATCH}
        assert all(a * BATCH[1] != b * BATCH[0] for a, b in longer)


def test_a_fixed_size_that_equals_a_made_up_one_does_not_join_two_symbols() -> None:
    """A table of as many positions as one length has under the first assignment is added to the other length."""
    inputs = "float[B, S, 8] x, float[B, T, 8] z"
    free = graph("y = Relu (x)", inputs=inputs)
    _, size, _ = Probe(free).shape(free.graph.inputs[0]) or ()
    model = graph("y = Relu (x)  w = Add (z, table)", f"float[{size}, 8] table", inputs=inputs)
    probe = Probe(model)
    assert probe.shape(model.graph.inputs[0]) != probe.shape(model.graph.inputs[1])


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


def test_sizes_at_which_a_table_is_too_short_do_not_serve() -> None:
    """A table of 8 positions, of which as many are read from its middle as the signal has; made-up lengths reach 17."""
    body = """
    length = Shape <start = 1, end = 2> (x)
    half = Div (length, two)
    start = Sub (middle, half)
    end = Add (start, length)
    part = Slice (table, start, end, axis)
    target = Concat <axis = 0> (length, rest, four)
    entries = Reshape (part, target)
    """
    constants = (
        "float[8, 8] table, int64[1] middle = {4}, int64[1] two = {2}, int64[1] axis = {0}, int64[1] rest = {-1}, "
        "int64[1] four = {4}, float[S, 2, 4] entries"
    )
    model = graph(f"{body} y = Relu (x)", constants, inputs="float[B, S] x", outputs="float[B, S] y")
    record_example_sizes(model, {"x": (2, 6)})
    shapes = Probe(model).shapes(value(model, "entries"))
    assert shapes == ((6, 2, 4), (3, 2, 4))


def test_a_selection_has_a_size_that_depends_on_the_inputs() -> None:
    body = """
    sums = ReduceSum <keepdims = 0> (x, axes)
    mask = Cast <to = 9> (sums)
    positions = NonZero (mask)
    indices = Transpose (positions)
    rows = GatherND (x, indices)
    y = Relu (x)
    """
    model = graph(body, "int64[1] axes = {2}")
    probe = Probe(model)
    rows = value(model, "rows")
    first, second = probe.shapes(rows)
    assert first is not None
    assert second is not None
    assert first[1:] == second[1:] == (8,)
    assert not probe.fixed(rows, 0)
    assert first[0] not in (probe.shape(model.graph.inputs[0]) or ())


def test_a_selection_of_known_content_has_a_fixed_size() -> None:
    model = graph("positions = NonZero (mask) y = Relu (x)", "int64[4] mask = {1, 0, 2, 3}")
    assert Probe(model).shapes(value(model, "positions")) == ((1, 3), (1, 3))


def test_a_selection_whose_size_does_not_fit_has_none() -> None:
    body = """
    mask = Cast <to = 9> (x)
    positions = NonZero (mask)
    flat = Transpose (positions)
    values = GatherND (x, flat)
    count = Shape <start = 0, end = 1> (x)
    target = Concat <axis = 0> (count, eight)
    back = Reshape (values, target)
    y = Relu (x)
    """
    model = graph(body, "int64[1] eight = {8}")
    assert Probe(model).shapes(value(model, "values")) == (None, None)


def test_a_new_tensor_can_take_over_the_shape_of_another() -> None:
    model = graph("y = Relu (x)")
    probe, replacement = Probe(model), ir.Value(name="replacement")
    assert probe.shapes(replacement) == (None, None)
    probe.copy_shape(replacement, model.graph.outputs[0])
    assert probe.shapes(replacement) == probe.shapes(model.graph.outputs[0])


@pytest.mark.parametrize("name", quick([*LAYERS, *FUSED], [*list(LAYERS)[::4], *list(FUSED)[::3]]))
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


@pytest.mark.parametrize("chunk", [4, 12, 32, 64, 256])
def test_the_number_of_padded_chunks_is_not_fixed(chunk: int) -> None:
    """Lengths below a chunk give one chunk; a width that is computed from lengths without rounding merges none."""
    body = """
    length = Shape <start = 1, end = 2> (x)
    rest = Mod (length, chunk)
    short = Sub (chunk, rest)
    missing = Mod (short, chunk)
    pads = Concat <axis = 0> (before, missing, none)
    padded = Pad (x, pads)
    rows = Shape <start = 0, end = 1> (x)
    numbers = Mul (length, eight)
    width = Div (numbers, length)
    target = Concat <axis = 0> (rows, infer, chunk, width)
    chunks = Reshape (padded, target)
    y = Relu (x)
    """
    constants = f"int64[1] none = {{0}}, int64[1] eight = {{8}}, int64[1] infer = {{-1}}, int64[1] chunk = {{{chunk}}}"
    model = graph(body, f"{constants}, int64[4] before = {{0, 0, 0, 0}}")
    probe = Probe(model)
    chunks = value(model, "chunks")
    assert probe.shape(chunks) is not None
    assert not probe.fixed(chunks, 1)
    assert probe.fixed(chunks, 2)
    assert probe.fixed(chunks, 3)
