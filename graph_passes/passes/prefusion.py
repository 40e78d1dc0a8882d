"""Bring a graph into the forms that onnxscript's fusions match. Each rewrite computes what it replaces.

1. `Reshape([rows, k]) -> Gemm -> Reshape([..., n])`, torch's linear layer over flattened positions, becomes `MatMul ->
   Add` on the positions as they are. (onnxscript has this rule too, but decides by symbols whether the reshapes cancel,
   and leaves a `Gemm` of rank 3 behind where two of them share a shape.)
2. `Softmax(scores + bias + mask)`, as T5 adds them up, becomes `Softmax(scores + (bias + mask))`: an attention has room
   for one addend, and one sum serves all layers.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from graph_passes.flow.concrete_shapes import Probe


def prepare(model: ir.Model) -> None:
    """Rewrite a graph in place."""
    probe = Probe(model)
    for node in list(model.graph):
        if node.op_type == "Gemm" and not node.domain:
            _unflatten(node, probe)
        elif node.op_type == "Softmax":
            _gather_addends(node)
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)


def drop_idle_expands(model: ir.Model) -> None:
    """Remove every `Expand` to the size that its input has at any size of the graph's inputs.

    The fusions write one before each attention's mask, which then copies whole maps of scores.
    """
    probe = Probe(model)
    for node in list(model.graph):
        if node.op_type == "Expand" and not node.domain and None not in probe.shapes(node.inputs[0]):
            before, after = node.inputs[0], node.outputs[0]
            if before is not None and probe.shapes(before) == probe.shapes(after) and not after.is_graph_output():
                after.replace_all_uses_with(before)
                model.graph.remove(node, safe=True)
    RemoveUnusedNodesPass()(model)


def _unflatten(gemm: ir.Node, probe: Probe) -> None:
    """Case 1."""
    flatten = gemm.inputs[0].producer() if gemm.inputs[0] is not None else None
    flat, uses = gemm.outputs[0], list(gemm.outputs[0].uses())
    plain = all(gemm.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if not plain or any(gemm.attributes.get_int(name, 0) for name in ("transA", "transB")):
        return
    if flatten is None or flatten.op_type != "Reshape" or len(uses) != 1 or flat.is_graph_output():
        return
    restore = uses[0].node
    rows, whole = flatten.inputs[0], restore.outputs[0]
    if restore.op_type != "Reshape" or restore.inputs[0] is not flat or whole.is_graph_output():
        return
    for before, after in zip(probe.shapes(rows), probe.shapes(whole), strict=True):
        if before is None or after is None or before[:-1] != after[:-1]:
            return
    nodes = [_node("MatMul", rows, gemm.inputs[1], like=whole)]
    if len(gemm.inputs) > 2 and gemm.inputs[2] is not None:
        nodes.append(_node("Add", nodes[0].outputs[0], gemm.inputs[2], like=whole))
    assert gemm.graph is not None
    gemm.graph.insert_before(restore, nodes)
    whole.replace_all_uses_with(nodes[-1].outputs[0])
    gemm.graph.remove([restore, gemm], safe=True)


def _gather_addends(softmax: ir.Node) -> None:
    """Case 2."""
    outer = _add(softmax.inputs[0])
    inner = _add(outer.inputs[0]) if outer is not None else None
    if outer is None or inner is None or len(inner.outputs[0].uses()) != 1:
        return
    scores, bias = inner.inputs
    if not _is_product(scores) or _is_product(bias):
        return
    addend = ir.node("Add", [bias, outer.inputs[1]])
    total = _node("Add", scores, addend.outputs[0], like=outer.outputs[0])
    assert outer.graph is not None
    outer.graph.insert_before(outer, [addend, total])
    outer.outputs[0].replace_all_uses_with(total.outputs[0])
    outer.graph.remove([outer, inner], safe=True)


def _node(op_type: str, *inputs: ir.Value | None, like: ir.Value) -> ir.Node:
    """A node whose output has the type and shape of another: the fusions go by what is written at the values."""
    node = ir.node(op_type, inputs)
    node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
    return node


def _add(value: ir.Value | None) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == "Add" else None


def _is_product(value: ir.Value | None) -> bool:
    """Whether a tensor is a product, scaled or not."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type in ("Mul", "Div"):
        return _is_product(node.inputs[0])
    return node is not None and node.op_type == "MatMul"
