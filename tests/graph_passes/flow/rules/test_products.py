"""Means over dropped heads, and products in forms that no rule covers."""

from __future__ import annotations

import pytest

from graph_passes.flow.concrete_shapes import Probe
from tests.graph_passes.graphs import graph, plan, shrink_and_compare
from tests.graph_passes.layer_parts import CORE, PROJECT, PROJECTIONS, SPLIT, TO_HEADS

HEADS = PROJECT + TO_HEADS + CORE.partition("back =")[0]
"""Gated heads `[batch, heads, length, 3]`, of which the last layer takes no product."""


@pytest.mark.parametrize("kept", [[1], [0, 2, 3], []], ids=str)
@pytest.mark.parametrize("axes", ["1", "1, 2"])
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_a_mean_divides_by_the_number_of_all_heads(opset: int, axes: str, kept: list[int]) -> None:
    attribute, constant = f"axes = [{axes}], ", ""
    if opset == 18:
        attribute, constant = "", f"int64[{axes.count(',') + 1}] axes = {{{axes}}}"
    mean = f"y = ReduceMean <{attribute}keepdims = 0> (gated{', axes' if constant else ''})"
    weights = [PROJECTIONS, SPLIT, 'float[4, 1, 1] "a.head_gate"', constant]
    outputs = "float[B, S, 3] y" if axes == "1" else "float[B, 3] y"
    shrunk = shrink_and_compare(graph(HEADS + mean, *weights, outputs=outputs, opset=opset), plan(kept))
    assert shrunk.refused == ()
    assert shrunk.removed


def test_a_product_that_transposes_leading_axes_has_no_rule() -> None:
    product = "q = com.microsoft.FusedMatMul <transBatchA = 1> (x, w)  y = Relu (q)"
    model = graph(product, "float[5, 8, 3] w", inputs="float[S, 5, 8] x", outputs="float[5, S, 3] y")
    assert Probe(model).shape(next(iter(model.graph)).outputs[0]) is None
