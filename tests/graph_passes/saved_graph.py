"""A graph with a data file, for the tests of files."""

from __future__ import annotations

import onnx_ir as ir

from tests.graph_passes.graphs import graph


def model() -> ir.Model:
    """A graph whose two weights are large enough for the data file."""
    return graph("h = MatMul (x, W) g = Relu (h) y = MatMul (g, V)", "float[8, 64] W, float[64, 8] V")
