"""A `Squeeze` of all axes of size one removes the same axes for any batch."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.passes import NameSqueezedAxes
from tests.graph_passes.graphs import graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("source", "target", "shape"), [("B, 1, 5, 1", "B, 5", (1, 5, 1)), ("B, 1", "B", (1,)), ("B, 5", "B, 5", (5,))]
)
def test_a_batch_of_one_row_stays(source: str, target: str, shape: tuple[int, ...], batch: int) -> None:
    model = graph("y = Squeeze(x)", inputs=f"float[{source}] x", outputs=f"float[{target}] y")
    x = np.random.default_rng(0).standard_normal((batch, *shape), np.float32)
    result = NameSqueezedAxes()(model)
    assert len(result.report) == 1
    np.testing.assert_array_equal(
        run(result.model, {"x": x})[0], x.reshape(batch, *(size for size in shape if size > 1))
    )
    assert_untouched(NameSqueezedAxes(), result.model)


def test_named_axes_and_fixed_shapes_stay() -> None:
    named = graph("y = Squeeze(x, axes)", "int64[1] axes = {1}", inputs="float[B, 1] x", outputs="float[B] y")
    fixed = graph("y = Squeeze(x)", inputs="float[1, 5] x", outputs="float[5] y")
    for model in (named, fixed):
        assert_untouched(NameSqueezedAxes(), model)
        assert operators(model) == ["Squeeze"]
