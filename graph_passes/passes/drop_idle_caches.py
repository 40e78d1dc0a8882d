"""Drop the caches that no other output depends on: those of attentions without heads."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.flow.axis_flow import captured_by_bodies
from graph_passes.flow.caches import cache_names, cache_writers, read_caches, record_caches
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed


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
        left = [value for value in caches if not all(node in writers or _sizes(node) for node, _ in value.uses())]
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


def _sizes(node: ir.Node) -> tuple[int, int] | None:
    """The axes whose sizes a `Shape` returns, as the first one and the end; None for other nodes."""
    if node.op_type != "Shape" or node.domain:
        return None
    value = node.inputs[0]
    rank = len(value.shape) if value is not None and value.shape is not None else 0
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
    return start, end


def _read_elsewhere(value: ir.Value, caches: Sequence[ir.Value]) -> bool:
    """Let nodes that read sizes of a cache read them from other caches; returns whether there is one for each node."""
    readers = {node: sizes for node, _ in value.uses() if (sizes := _sizes(node)) is not None}
    sources = {node: _of_equal_sizes(value, caches, *sizes) for node, sizes in readers.items()}
    if any(source is None for source in sources.values()):
        return False
    for node, source in sources.items():
        node.replace_input_with(0, source)
    return True


def _of_equal_sizes(value: ir.Value, caches: Sequence[ir.Value], start: int, end: int) -> ir.Value | None:
    """The first of some caches whose axes have the same symbols as those of a tensor; None: there is none."""
    axes = _axes(value)[start:end]
    if not axes or any(isinstance(axis, int) or axis.value is None for axis in axes):
        return None
    return next((cache for cache in caches if _axes(cache)[start:end] == axes), None)


def _axes(value: ir.Value) -> list[int | ir.SymbolicDim]:
    return [] if value.shape is None else list(value.shape)
