"""A `GatherND` by constant positions on one axis becomes a `Gather`."""

from __future__ import annotations

import pytest

from graph_passes.passes import SimplifyLookups
from tests.graph_passes.graphs import graph, operators
from tests.graph_passes.passes.checks import assert_untouched, rewritten


@pytest.mark.parametrize("positions", ["int64[1, 1] i = {-2}", "int64[3, 1] i = {1, 0, 1}"])
def test_constant_positions_on_the_first_axis_are_gathered(positions: str) -> None:
    body = "t = Transpose <perm = [2, 0, 1]> (x) g = GatherND (t, i) y = Transpose <perm = [1, 2, 0]> (g)"
    result = rewritten(SimplifyLookups(), graph(body, positions, outputs="float[B, S, N] y"), tolerance=0)
    assert operators(result.model) == ["Transpose", "Gather", "Transpose"]
    assert len(result.report) == 1


def test_an_output_of_the_graph_keeps_its_name() -> None:
    model = graph("y = GatherND (x, i)", "int64[1, 1] i = {0}", outputs="float[1, S, 8] y")
    result = rewritten(SimplifyLookups(), model, tolerance=0)
    assert [value.name for value in result.model.graph.outputs] == ["y"]


@pytest.mark.parametrize(
    ("body", "positions", "output"),
    [
        ("y = GatherND (x, i)", "int64[1, 2] i = {0, 1}", "float[1, 8] y"),
        ("y = GatherND <batch_dims = 1> (x, i)", "int64[2, 1, 1] i = {0, 1}", "float[2, 1, 8] y"),
        (
            "s = Shape (x) j = Sub (s, s) i = Reshape (j, to) y = GatherND (x, i)",
            "int64[2] to = {3, 1}",
            "float[3, S, 8] y",
        ),
    ],
    ids=["two axes", "batches", "computed positions"],
)
def test_other_lookups_stay(body: str, positions: str, output: str) -> None:
    assert assert_untouched(SimplifyLookups(), graph(body, positions, outputs=output)) == ()
