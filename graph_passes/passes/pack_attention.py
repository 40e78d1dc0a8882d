"""Pack attention: let `GroupQueryAttention` read queries, keys and values from the tensor that they are parts of."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import graph_of, producer_of

_NEW = 3
"""Number of the first inputs of `GroupQueryAttention`: new queries, keys and values."""


class PackAttention(GraphPass[Names]):
    """Drop the `Split` before a `GroupQueryAttention`.

    Cases:
        1. Its queries, keys and values are all parts of one tensor, in this order, along the last axis: it reads the
           tensor.
        2. Anything else stays.

    The report has the names of the attentions.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        packed = [node for node in model.graph if node.op_type == "GroupQueryAttention" and _pack(node)]
        return changed(model, [node.name for node in packed])


def _pack(attention: ir.Node) -> bool:
    """Let an attention read the tensor that a `Split` before it reads; returns whether there is one."""
    parts = attention.inputs[:_NEW]
    split = producer_of(parts[0])
    if split is None or split.op_type != "Split" or tuple(split.outputs) != tuple(parts):
        return False
    axis, shape = split.attributes.get_int("axis", 0), parts[0].shape if parts[0] is not None else None
    is_last = axis == -1 or (shape is not None and axis == len(shape) - 1)
    if not is_last or any(len(part.uses()) > 1 or part.is_graph_output() for part in split.outputs):
        return False
    for position, value in enumerate((split.inputs[0], None, None)):
        attention.replace_input_with(position, value)
    graph_of(split).remove(split, safe=True)
    return True
