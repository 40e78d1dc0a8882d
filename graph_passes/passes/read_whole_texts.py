"""Read whole texts: a decoder with key/value caches as the graph that it is on empty caches."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.flow.caches import CACHES, read_caches
from graph_passes.flow.rules import RULES
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.passes.name_decoding_axes import IDS, MASK, POSITIONS, forget_shapes
from graph_passes.tape import Tape, shape_axes

_POSITION_AXES = (2, -2)
"""The axis of positions of a cache `[text, head, position, width]`."""


class ReadWholeTexts(GraphPass[Names]):
    """Replace the caches of a decoder by empty ones, and count the positions of tokens.

    Cases:
        1. A cache is concatenated with new keys or values: these alone are read.
        2. An attention operator extends a cache: it gets none.
        3. The sizes of a cache are read: they are those of an empty one.
        4. Anything else reads an empty tensor.
        5. `position_ids` are the number of tokens before each token that the mask does not hide.

    The report has the names of the removed inputs.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        graph, caches = model.graph, read_caches(model)
        known = {value.name: value for value in graph.inputs}
        if not caches or IDS not in known:
            return changed(model, ())
        ids, mask, op = known[IDS], known.get(MASK), Tape()
        graph.outputs[:] = [value for value in graph.outputs if value not in set(caches.values())]
        gone, batch = [*caches], op.size(ids, 0)
        for cache in caches:
            _empty(cache, batch, op)
        if (positions := known.get(POSITIONS)) is not None:
            positions.replace_all_uses_with(_counted(ids, mask, positions.dtype or ir.DataType.INT64, op))
            gone.append(positions)
        graph.insert_before(graph[0], op.nodes)
        graph.inputs[:] = [value for value in graph.inputs if value not in gone]
        RemoveUnusedNodesPass()(model)
        model.metadata_props.pop(CACHES, None)
        if mask is not None and ids.shape is not None:
            mask.shape = ir.Shape(ids.shape)
        forget_shapes(graph)
        return changed(model, [value.name for value in gone])


def _empty(cache: ir.Value, batch: ir.Value, op: Tape) -> None:
    """Cases 1 to 4: the readers of a cache read one of `batch` texts without positions."""
    assert cache.shape is not None
    sizes = [batch, *(op.ints([size if isinstance(size, int) else 0]) for size in cache.shape[1:])]
    content: ir.Value | None = None
    for node, position in list(cache.uses()):
        rule = RULES.get((node.domain, node.op_type))
        extends = rule is not None and any(position == source for source, _ in rule.continued(node))
        if extends and node.op_type != "Concat":
            node.replace_input_with(position, None)
        elif extends and node.attributes.get_int("axis", 0) in _POSITION_AXES and len(node.inputs) == 2:
            assert node.inputs[1] is not None
            node.outputs[0].replace_all_uses_with(node.inputs[1])
        elif node.op_type == "Shape" and not node.domain:
            read = [sizes[axis] for axis in shape_axes(node, len(sizes))]
            node.outputs[0].replace_all_uses_with(op("Concat", *read, axis=0))
        else:
            if content is None:
                assert cache.dtype is not None
                zero = ir.tensor(np.zeros(1, cache.dtype.numpy()), dtype=cache.dtype)
                content = op("ConstantOfShape", op("Concat", *sizes, axis=0), value=zero)
            node.replace_input_with(position, content)


def _counted(ids: ir.Value, mask: ir.Value | None, dtype: ir.DataType, op: Tape) -> ir.Value:
    """Case 5: the number of each token in its text `[text, position]`; padding on the left has the first one."""
    if mask is None:
        read = op("ConstantOfShape", op("Shape", ids), value=ir.tensor(np.ones(1, np.int64)))
    else:
        read = op("Cast", mask, to=ir.DataType.INT64)
    count = op("CumSum", read, op.constant(np.array(1, np.int64)))
    is_read = op("Cast", op("Greater", count, op.ints([0])), to=ir.DataType.INT64)
    return op("Cast", op("Sub", count, is_read), to=dtype)
