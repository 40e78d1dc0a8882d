"""Sizes that suit a graph: of its example, or raised until every window fits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import GraphError, GraphErrorCode
from graph_passes.flow.concrete_shapes import Probe, Shapes
from graph_passes.flow.indices import Need, same_index
from graph_passes.flow.rule import RuleContext
from graph_passes.flow.rules import RULES
from graph_passes.flow.sizes import BATCH, EXAMPLE_SIZES, example_sizes, record_example_sizes
from tests.graph_passes.graphs import graph

PATCHES = (
    "p = Conv <kernel_shape = [14, 14], strides = [14, 14]> (x, w)"
    " f = Reshape (p, s) t = Transpose <perm = [0, 2, 1]> (f)"
)
WEIGHTS = "float[8, 3, 14, 14] w, int64[3] s = {0, 8, -1}"
IMAGE, OUTPUT = "float[B, 3, H, W] x", "float[B, N, 8] y"


def output_shapes(model: ir.Model) -> Shapes:
    return Probe(model).shapes(model.graph.outputs[0])


def images(*, positions: int | None = None, example: tuple[int, int] | None = (224, 224)) -> ir.Model:
    """Patches of images, to which the positions of one size are added; None: of any size."""
    end, weights = ("y = Relu (t)", "") if positions is None else ("y = Add (t, e)", f"float[1, {positions}, 8] e")
    model = graph(f"{PATCHES} {end}", WEIGHTS, weights, inputs=IMAGE, outputs=OUTPUT)
    if example is not None:
        record_example_sizes(model, {"x": (2, 3, *example)})
    return model


def test_images_have_the_size_of_the_example_and_one_that_its_patches_divide() -> None:
    model = images()
    assert Probe(model).shapes(model.graph.inputs[0]) == ((BATCH[0], 3, 224, 224), (BATCH[1], 3, 448, 672))
    assert output_shapes(model) == ((BATCH[0], 16 * 16, 8), (BATCH[1], 32 * 48, 8))


def test_images_of_the_only_size_that_a_graph_accepts_are_fixed() -> None:
    model = images(positions=256)
    assert output_shapes(model) == ((BATCH[0], 256, 8), (BATCH[1], 256, 8))
    assert [Probe(model).fixed(model.graph.inputs[0], axis) for axis in range(4)] == [False, True, True, True]


def test_sizes_are_raised_until_windows_fit_where_there_is_no_example() -> None:
    first, second = output_shapes(images(example=None))
    assert first is not None
    assert second is not None
    assert 0 < first[1] < second[1]


@pytest.mark.parametrize("example", [(64, 64), None])
def test_a_window_that_gives_one_size_for_two_shows_no_fixed_size(example: tuple[int, int] | None) -> None:
    body = (
        "p = MaxPool <kernel_shape = [9, 9], strides = [8, 8], pads = [4, 4, 4, 4]> (x)"
        " y = MaxPool <kernel_shape = [5, 5], strides = [4, 4], pads = [2, 2, 2, 2]> (p)"
    )
    model = graph(body, inputs=IMAGE, outputs="float[B, 3, U, V] y")
    if example is not None:
        record_example_sizes(model, {"x": (2, 3, *example)})
    output = model.graph.outputs[0]
    assert [Probe(model).fixed(output, axis) for axis in range(4)] == [False, True, False, False]


def test_lengths_of_tokens_are_made_up() -> None:
    model = graph("y = Cast <to = 1> (x)", inputs="int64[B, S] x", outputs="float[B, S] y")
    record_example_sizes(model, {"x": (2, 9)})
    assert EXAMPLE_SIZES not in model.metadata_props


def test_an_example_that_does_not_suit_the_graph_leaves_shapes_unknown() -> None:
    assert output_shapes(images(positions=256, example=(28, 28))) == (None, None)


@pytest.mark.parametrize("step", [1, -1])
def test_a_slice_of_nothing_does_not_end_the_process(step: int) -> None:
    """ONNX's inference would abort by an assertion."""
    body = "z = Slice (x, i0, i0, a) v = Slice (z, i3, i0, a, t) y = Relu (v)"
    weights = f"int64[1] i0 = {{0}}, int64[1] i3 = {{3}}, int64[1] a = {{1}}, int64[1] t = {{{step}}}"
    model = graph(body, weights, outputs="float[B, U, 8] y")
    assert output_shapes(model) == (None, None)


def test_a_window_larger_than_its_input_gives_no_shape() -> None:
    model = graph("y = MaxPool <kernel_shape = [9]> (x)", inputs="float[B, 8, 4] x", outputs="float[B, 8, U] y")
    assert output_shapes(model) == (None, None)


@pytest.mark.parametrize("text", ["x", "[1]", '{"H": 0}', '{"H": "a"}'])
def test_metadata_that_hold_no_sizes_are_refused(text: str) -> None:
    model = images()
    model.metadata_props[EXAMPLE_SIZES] = text
    with pytest.raises(GraphError) as caught:
        example_sizes(model)
    assert caught.value.code is GraphErrorCode.FILE_UNREADABLE


def test_axes_of_one_element_are_grouped_as_larger_ones_are() -> None:
    """The example has one position, with which it is open whether positions are merged with heads."""
    body = (
        "p = MaxPool <kernel_shape = [9, 9]> (x) h = Shape <start = 0, end = 2> (p) t = Shape <start = 2> (p)"
        " n = Gather (t, i) s = Concat <axis = 0> (h, n)"
    )
    model = graph(
        f"{body} y = Reshape (p, s)", "int64[2] i = {1, 0}", inputs="float[B, 4, S, T] x", outputs="float[B, 4, T, S] y"
    )
    record_example_sizes(model, {"x": (2, 4, 9, 9)})
    node = model.graph[-1]
    heads: Need = (None, np.array([1, 3]), None, None)
    demand = RULES["", "Reshape"].demand(node, [heads], RuleContext(Probe(model)))
    states = demand.inputs[0]
    assert states is not None
    assert same_index(states[1], heads[1])
