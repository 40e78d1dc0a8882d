"""Drop the caches that no other output depends on: those of attentions without heads."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.flow.axis_flow import captured_by_bodies
from graph_passes.flow.caches import cache_names, cache_writers, read_caches, record_caches
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import shape_axes


class DropIdleCaches(GraphPass[Names]):
    """Drop the input and the output of a cache that is read for nothing but the next cache.

    Cases:
        1. Only outputs of caches are computed from the input: both are removed. A number of positions that is read from
           the input is read from another cache.
        2. Nothing reads the input, and the output belongs to another graph: the input is removed.

    The report has the names of the removed inputs.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        graph, caches = model.graph, read_caches(model)
        outputs = frozenset(output for output in caches.values() if output is not None)
        writers = cache_writers(list(graph), outputs, captured_by_bodies(graph))
        left = [value for value in caches if not all(node in writers or _is_shape(node) for node, _ in value.uses())]
        for value in caches:
            if value not in left and not _read_elsewhere(value, left):
                left.append(value)
        idle = caches.keys() - left
        if not idle:
            return changed(model, ())
        names = tuple(value.name or "" for value in graph.inputs if value in idle)
        gone = {caches[value] for value in idle}
        graph.outputs[:] = [value for value in graph.outputs if value not in gone]
        RemoveUnusedNodesPass()(model)
        graph.inputs[:] = [value for value in graph.inputs if value not in idle]
        record_caches(model, [pair for pair in cache_names(model).items() if pair[0] not in names])
        return changed(model, names)


def _is_shape(node: ir.Node) -> bool:
    return node.op_type == "Shape" and not node.domain


def _read_elsewhere(value: ir.Value, caches: Sequence[ir.Value]) -> bool:
    """Let nodes that read sizes of a cache read them from other caches; returns whether there is one for each node."""
    sources = {node: _of_equal_sizes(value, caches, node) for node, _ in value.uses() if _is_shape(node)}
    if None in sources.values():
        return False
    for node, source in sources.items():
        node.replace_input_with(0, source)
    return True


def _of_equal_sizes(value: ir.Value, caches: Sequence[ir.Value], shape: ir.Node) -> ir.Value | None:
    """The first of some caches whose sizes have the symbols of those that a `Shape` reads; None: there is none."""
    axes = shape_axes(shape, len(value.shape or ()))
    sizes = list(value.shape or ())[axes.start : axes.stop]
    if not sizes or any(isinstance(size, int) or size.value is None for size in sizes):
        return None
    return next((cache for cache in caches if list(cache.shape or ())[axes.start : axes.stop] == sizes), None)
