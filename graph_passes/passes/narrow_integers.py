"""Narrow integers: make the 64-bit inputs and outputs of a graph 32-bit."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed


class NarrowIntegers(GraphPass[Names]):
    """Declare int64 inputs and outputs as int32 and cast inside; the graph still computes in 64 bits.

    Cases:
        1. An int64 input becomes int32. A `Cast` to int64 at the beginning of the graph takes its readers.
        2. An int64 output becomes int32 under the same name, from a `Cast` at the end of the graph.

    The report has the names of the inputs and outputs that became 32-bit.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        graph = model.graph
        inputs = [value for value in graph.inputs if value.dtype == ir.DataType.INT64 and not value.is_initializer()]
        for value in inputs:
            _narrow_input(graph, value)
        outputs = [number for number, value in enumerate(graph.outputs) if value.dtype == ir.DataType.INT64]
        for number in outputs:
            _narrow_output(graph, number)
        return changed(model, (value.name for value in (*inputs, *(graph.outputs[number] for number in outputs))))

    def ensures(self, model: ir.Model) -> None:
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.dtype == ir.DataType.INT64 and not value.is_initializer():
                raise ir.passes.PostconditionError(f"{value.name}: is still int64")


def _narrow_input(graph: ir.Graph, value: ir.Value) -> None:
    """Case 1."""
    uses = list(value.uses())
    value.dtype = ir.DataType.INT32
    cast = ir.node("Cast", [value], {"to": int(ir.DataType.INT64)})
    cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.INT64, value.shape
    for node, position in uses:
        node.replace_input_with(position, cast.outputs[0])
    graph.insert_before(graph[0], cast)


def _narrow_output(graph: ir.Graph, number: int) -> None:
    """Case 2."""
    value = graph.outputs[number]
    cast = ir.node("Cast", [value], {"to": int(ir.DataType.INT32)})
    narrow = cast.outputs[0]
    name, value.name = value.name, f"{value.name}_int64"
    narrow.name = name
    narrow.dtype, narrow.shape = ir.DataType.INT32, value.shape
    graph.append(cast)
    graph.outputs[number] = narrow
