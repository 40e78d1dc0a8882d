"""Reshapes between reshapes go where the result stays the same."""

from __future__ import annotations

import pytest

from graph_passes.passes import MergeReshapes
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten


@pytest.mark.parametrize(
    ("sizes", "left"),
    [
        (["0, 0, 2, 4", "0, 0, 8"], 0),
        (["0, 0, 2, 4", "0, -1, 8"], 0),
        (["0, 0, 2, 4", "0, 0, 4, 2"], 1),
        (["0, 0, 2, 2, 2", "0, 0, 4, 2", "0, 0, 2, 4"], 1),
        (["0, -1, 2, 4", "-1, 8"], 1),
        (["0, 0, 8"], 0),
    ],
)
def test_one_reshape_is_left_or_none(sizes: list[str], left: int) -> None:
    nodes = "".join(f"r{index + 1} = Reshape(r{index}, s{index}) " for index in range(len(sizes)))
    shapes = [f"int64[{text.count(',') + 1}] s{index} = {{{text}}}" for index, text in enumerate(sizes)]
    free = ", ".join(f"D{axis}" for axis in range(sizes[-1].count(",") + 1))
    model = graph(
        f"r0 = Identity(x) {nodes} y = Relu(r{len(sizes)})",
        *shapes,
        inputs="float[B, S, 8] x",
        outputs=f"float[{free}] y",
    )
    result = rewritten(MergeReshapes(), model)
    assert operators(result.model).count("Reshape") == left


def test_a_size_that_only_the_shape_between_has_is_copied_from_it() -> None:
    model = graph(
        "a = Reshape(x, first) y = Reshape(a, second)",
        "int64[3] first = {0, -1, 4}, int64[3] second = {0, 0, 4}",
        outputs="float[B, T, 4] y",
    )
    assert_untouched(MergeReshapes(), model)


def test_sizes_that_are_computed_stay() -> None:
    model = graph(
        "a = Reshape(x, first) n = Shape(x) y = Reshape(a, n)",
        "int64[4] first = {0, 0, 2, 4}",
    )
    assert_untouched(MergeReshapes(), model)
