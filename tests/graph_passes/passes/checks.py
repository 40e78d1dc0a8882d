"""Checks that every pass has to satisfy.

A pass keeps the numbers, writes a valid graph, and changes nothing the second time. A graph that does not concern it
remains unchanged byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import onnx
import onnx_ir as ir

from graph_passes.passes.base import GraphPass, ReportedResult
from tests.graph_passes.graphs import SIZES, assert_same

Report = TypeVar("Report")


def content(model: ir.Model) -> bytes:
    """The whole model as bytes, weights included, but not the names of constants, which nothing refers to."""
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                attribute.t.name = ""
    return proto.SerializeToString(deterministic=True)


def rewritten(
    rewrite: GraphPass[Report],
    model: ir.Model,
    *,
    sizes: Sequence[Mapping[str, int]] = SIZES,
    tolerance: float = 1e-5,
) -> ReportedResult[Report]:
    """The result of a pass on a copy of a graph that it changes.

    Args:
        rewrite: the pass.
        model: the graph, which is not changed.
        sizes: sizes of the free dimensions at which outputs are compared before and after.
        tolerance: largest difference over the largest magnitude of an output.
    """
    result = rewrite(model.clone())
    assert result.modified
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    assert_same(result.model, model, sizes, tolerance)
    assert_untouched(rewrite, result.model)
    return result


def assert_untouched(rewrite: GraphPass[Report], model: ir.Model) -> Report:
    """The pass reports no change of a graph and makes none; returns its report."""
    copy = model.clone()
    before = content(copy)
    result = rewrite(copy)
    assert not result.modified
    assert content(result.model) == before
    return result.report
