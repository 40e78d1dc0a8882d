"""Sizes of what replaces a layer are those of the inputs that it was computed from."""

from __future__ import annotations

import numpy as np

from graph_passes import shrink
from tests.graph_passes.graphs import error, gated, graph, plan, run
from tests.graph_passes.layer_parts import CORE, OUTPUT, PROJECT, PROJECTIONS, SPLIT, TO_HEADS


def test_a_layer_without_heads_has_the_rows_of_its_own_input() -> None:
    body = PROJECT + TO_HEADS + CORE.replace("y = MatMul", "o = MatMul")
    body += "biased = Add (o, bo)  scaled = Mul (biased, gamma)  y = Add (scaled, x)  z = Relu (text)"
    model = graph(
        body,
        *(PROJECTIONS, SPLIT, OUTPUT, "float[8] bo, float[8] gamma"),
        inputs="float[T, 8] text, float[B, S, 8] x",
        outputs="float[B, S, 8] y, float[T, 8] z",
    )
    reference, shrunk = gated(model, plan([])), shrink(model, plan([])).model
    for texts in (1, 2, 3):
        rows = {"text": np.ones((texts, 8), np.float32), "x": np.ones((2, 5, 8), np.float32)}
        assert error(run(shrunk, rows), run(reference, rows)) <= 1e-5
