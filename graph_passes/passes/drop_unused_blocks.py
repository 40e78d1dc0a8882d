"""Drop unused blocks: do not project the keys and values that no query of any head attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.block_sparse.function import is_block_sparse, rebuild_function
from graph_passes.block_sparse.masks import MASK, BlockMask
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, ReportedResult
from graph_passes.tape import Tape, add_initializer, producer_of

_LEAST_UNUSED = 0.25
"""Minimum share of unused key blocks for which gathering the used ones is faster."""


class DropUnusedBlocks(GraphPass[Mapping[str, int]]):
    """Gather the positions that block-sparse attention uses before its key and value projections.

    Cases:
        1. Keys and values are projected position by position (a product with a weight, a bias, a split into heads),
           nothing else reads them, and the mask of keys, if any, is a row: only the used positions are projected.
        2. Causality, a memory, persistent vectors or a mask of pairs ties keys to positions: the site stays as it is.
           In a causal site the diagonal blocks hide a triangle, which the removal of columns would shift. Besides,
           every position usually attends to its own block, so that few blocks are unused.
        3. Fewer than a quarter of the key blocks are unused: the site stays as it is.

    The report has the number of key blocks that are not projected any more, by name of the site.
    """

    def call(self, model: ir.Model) -> ReportedResult[Mapping[str, int]]:
        calls = [node for node in model.graph if is_block_sparse(node)]
        if not calls:
            return ReportedResult(model, False, {})
        probe = Probe(model)
        dropped = {node.overload: _drop(model, node, probe) for node in calls}
        dropped = {site: count for site, count in dropped.items() if count}
        if dropped:
            common.RemoveUnusedNodesPass()(model)
        return ReportedResult(model, bool(dropped), dropped)


def _drop(model: ir.Model, node: ir.Node, probe: Probe) -> int:
    """Rewrite one site; returns the number of key blocks dropped."""
    query, key, value, blocks = node.inputs[:4]
    has_row = len(node.inputs) == 5 and model.functions[node.op_identifier()].inputs[4].name == "row"
    tied = any(node.attributes.get_int(name) for name in ("causal", "memory", "persistent"))
    if tied or len(node.inputs) > 4 + has_row or blocks is None or blocks.const_value is None:
        return 0
    kept, block = blocks.const_value.numpy(), node.attributes.get_int("block")
    used = np.asarray(kept.any((0, 1)))
    used[0] = True  # Otherwise short inputs would have no keys at all.
    unused = int(len(used) - used.sum())
    projections = [_projection(operand, probe) for operand in (key, value)]
    products = [product for product in projections if product is not None]
    query_shape, value_shape = probe.shape(query), probe.shape(value)
    if unused < max(1, _LEAST_UNUSED * len(used)) or len(products) < 2 or query_shape is None or value_shape is None:
        return 0
    positions = _gather_sources(model.graph, products, used, block)
    if has_row:
        gather = ir.node("Gather", [node.inputs[4], positions], {"axis": 3})
        model.graph.insert_before(node, gather)
        node.replace_input_with(4, gather.outputs[0])
    function = rebuild_function(
        model.functions[node.op_identifier()],
        BlockMask(kept[:, :, used], block),
        (query_shape[3], value_shape[3]),
        dtype=query.dtype if query is not None else None,
    )
    model.functions[function.identifier()] = function
    # The call gets a mask of its own: calls of one module share the original.
    node.replace_input_with(3, add_initializer(model.graph, f"{node.overload}.used_{MASK}", kept[:, :, used]))
    return unused


def _gather_sources(graph: ir.Graph, products: Sequence[ir.Node], used: np.ndarray, block: int) -> ir.Value:
    """Let projections, which may share a source, read the positions of used blocks alone; returns these positions."""
    gathered: dict[ir.Value, ir.Value] = {}
    positions: ir.Value | None = None
    for product in sorted(products, key=list(graph).index):
        source = product.inputs[0]
        assert source is not None
        if positions is None:
            positions = _used_positions(source, used, block, product)
        if source not in gathered:
            gather = ir.node("Gather", [source, positions], {"axis": 1})
            graph.insert_before(product, gather)
            gathered[source] = gather.outputs[0]
        product.replace_input_with(0, gathered[source])
        _forget_length(product.outputs[0])
    assert positions is not None
    return positions


def _forget_length(value: ir.Value) -> None:
    """Make the recorded length free from a projection to the attention.

    It is no longer the length of the queries, and a runtime lets tensors with the same symbolic sizes share memory.
    """
    while True:
        if value.shape is not None:
            value.shape = ir.Shape([size if axis != 1 else None for axis, size in enumerate(value.shape)])
        ((reader, _),) = value.uses()
        if is_block_sparse(reader):
            return
        value = reader.outputs[0]


def _projection(value: ir.Value | None, probe: Probe) -> ir.Node | None:
    """The first product of a projection from `[batch, position, hidden]` to heads `[batch, position, head, dim]`.

    None where the projection has another operator or another reader.
    """
    node = producer_of(value)
    if node is None or node.op_type != "Reshape" or len(node.outputs[0].uses()) != 1:
        return None
    shape = probe.constant(node.inputs[1])
    if shape is None or len(shape) != 4 or shape[0] != 0 or shape[1] not in (0, -1):
        return None
    while node.op_type != "MatMul":
        computed = [operand for operand in node.inputs if operand is not None and operand.producer() is not None]
        source = computed[0].producer() if computed else None
        if source is None or source.op_type not in ("Add", "MatMul") or len(source.outputs[0].uses()) != 1:
            return None
        addends = [operand for operand in source.inputs if operand is not None and operand.producer()]
        if source.op_type == "Add" and len(addends) != 1:
            return None
        node = source
    return node if len(probe.shape(node.inputs[0]) or ()) == 3 else None


def _used_positions(hidden: ir.Value, used: np.ndarray, block: int, before: ir.Node) -> ir.Value:
    """The positions of `hidden` in used blocks, `[position]`, computed just before a node."""
    starts = np.flatnonzero(used) * block
    op = Tape()
    known = op.ints((starts[:, None] + np.arange(block)).ravel())
    first, zero, full_block = op.ints(starts), op.ints([0]), op.ints([block])
    size = op("Shape", hidden, start=1, end=2)
    # Counted block by block, so that the numbers are few enough for `Probe` to follow: it then knows the key length.
    in_block = op("Min", op("Max", op("Sub", size, first), zero), full_block)
    cut = op("Slice", known, zero, op("ReduceSum", in_block, keepdims=1))
    op.insert_before(before)
    return cut
