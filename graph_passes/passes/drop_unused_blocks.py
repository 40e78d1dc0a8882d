"""Drop unused blocks: keys and values that no query of any head looks at are not projected."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.block_sparse.function import DOMAIN, NAME, rebuild_function
from graph_passes.block_sparse.masks import MASK, BlockMask
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.edit import ints

_SHARE = 0.25
"""Least share of the key blocks that must be unused: gathering the others has to be paid for."""


class DropUnusedBlocks(ir.passes.InPlacePass):
    """Gather the positions that block-sparse attention uses before its key and value projections.

    Cases:
        1. Keys and values are projected position by position (a product with a weight, a bias, heads taken apart),
           nobody else reads them, and the mask of keys, if any, is a row: they are projected at the positions used.
        2. Causality, a memory, persistent vectors or a mask of pairs ties keys to positions: the site is left alone. Of
           a causal mask a block hides a triangle where its column is its row, which columns taken out would shift; and
           every position looks at its own block as a rule, so that few are unused.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}
        """Key blocks that are not projected any more, by site."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        calls = [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, NAME)]
        probe = Probe(model) if calls else None
        for node in calls:
            assert probe is not None
            unused = _drop(model, node, probe)
            if unused:
                self.dropped[node.overload] = unused
        common.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, bool(self.dropped))


def _drop(model: ir.Model, node: ir.Node, probe: Probe) -> int:
    """Rewrite one site; returns how many key blocks went."""
    query, key, value, blocks = node.inputs[:4]
    row = len(node.inputs) == 5 and model.functions[node.op_identifier()].inputs[4].name == "row"
    if any(node.attributes.get_int(name) for name in ("causal", "memory", "persistent")) or len(node.inputs) > 4 + row:
        return 0
    if blocks is None or blocks.const_value is None:
        return 0
    kept, block = blocks.const_value.numpy(), node.attributes.get_int("block")
    used = np.asarray(kept.any((0, 1)))
    used[0] = True  # no length may leave none
    unused = int(len(used) - used.sum())
    firsts, shapes = [_projection(one, probe) for one in (key, value)], [probe.shape(one) for one in (query, value)]
    if unused < max(1, _SHARE * len(used)) or None in firsts or None in shapes:
        return 0
    taken: dict[ir.Value, ir.Value] = {}
    position = None
    for first in sorted((first for first in firsts if first is not None), key=list(model.graph).index):
        source = first.inputs[0]
        assert source is not None
        if position is None:
            position = _positions(source, used, block, first)
        if source not in taken:
            gather = ir.node("Gather", [source, position], {"axis": 1})
            model.graph.insert_before(first, gather)
            taken[source] = gather.outputs[0]
        first.replace_input_with(0, taken[source])
        _forget_length(first.outputs[0])
    if row:
        assert position is not None
        gather = ir.node("Gather", [node.inputs[4], position], {"axis": 3})
        model.graph.insert_before(node, gather)
        node.replace_input_with(4, gather.outputs[0])
    dims = (shapes[0][3], shapes[1][3])  # type: ignore[index]
    function = rebuild_function(
        model.functions[node.op_identifier()],
        BlockMask(kept[:, :, used], block),
        dims,
        dtype=query.dtype if query is not None else None,
    )
    model.functions[function.identifier()] = function
    # A mask of its own: a module that is called several times has one for all calls.
    name = f"{node.overload}.used_{MASK}"
    own = ir.Value(name=name, const_value=ir.tensor(kept[:, :, used], name=name))
    model.graph.register_initializer(own)
    node.replace_input_with(3, own)
    return unused


def _forget_length(value: ir.Value) -> None:
    """Leave open the length along a projection, which was that of the queries: a runtime lets tensors of the same named
    sizes share memory."""
    while True:
        if value.shape is not None:
            value.shape = ir.Shape([size if axis != 1 else None for axis, size in enumerate(value.shape)])
        ((reader, _),) = value.uses()
        if (reader.domain, reader.op_type) == (DOMAIN, NAME):
            return
        value = reader.outputs[0]


def _projection(value: ir.Value | None, probe: Probe) -> ir.Node | None:
    """The product that heads `[batch, position, head, dim]` begin with, of `[batch, position, hidden]`; None where
    something else is on the way, or reads what is."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Reshape" or len(node.outputs[0].uses()) != 1:
        return None
    shape = probe.constant(node.inputs[1])
    if shape is None or len(shape) != 4 or shape[0] != 0 or shape[1] not in (0, -1):
        return None
    while node.op_type != "MatMul":
        data = [one for one in node.inputs if one is not None and one.producer() is not None]
        source = data[0].producer() if data else None
        if source is None or source.op_type not in ("Add", "MatMul") or len(source.outputs[0].uses()) != 1:
            return None
        if source.op_type == "Add" and len([one for one in source.inputs if one is not None and one.producer()]) != 1:
            return None
        node = source
    return node if len(probe.shape(node.inputs[0]) or ()) == 3 else None


def _positions(hidden: ir.Value, used: np.ndarray, block: int, before: ir.Node) -> ir.Value:
    """The positions in blocks that are used, `[position]`, of those that there are."""
    starts = np.flatnonzero(used) * block
    known = ints((starts[:, None] + np.arange(block)).ravel())
    first, zero, most = ints(starts), ints([0]), ints([block])
    size = ir.node("Shape", [hidden], {"start": 1, "end": 2})
    # Counted block by block: few enough numbers that `Probe` follows them, and so knows how many keys are left.
    behind = ir.node("Sub", [size.outputs[0], first.outputs[0]])
    some = ir.node("Max", [behind.outputs[0], zero.outputs[0]])
    here = ir.node("Min", [some.outputs[0], most.outputs[0]])
    count = ir.node("ReduceSum", here.outputs, {"keepdims": 1})
    cut = ir.node("Slice", [known.outputs[0], zero.outputs[0], count.outputs[0]])
    assert before.graph is not None
    before.graph.insert_before(before, [known, first, zero, most, size, behind, some, here, count, cut])
    return cut.outputs[0]
