"""Rewrite a graph into the forms that onnxscript's fusion rules match."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import graph_of, input_of, producer_of, source_before


class PrepareForFusion(GraphPass[Names]):
    """Rewrite linear layers and attention scores so that onnxscript's fusion rules match them.

    Cases:
        1. `Reshape([rows, k]) -> Gemm -> Reshape([..., n])`, torch's linear layer over flattened positions, becomes
           `MatMul -> Add` on the positions. onnxscript has this rule too, but it compares symbols to decide whether
           the reshapes cancel, and leaves a `Gemm` of rank 3 behind where two of them share a shape.
        2. `Softmax(scores + bias + mask)`, as T5 computes it, becomes `Softmax(scores + (bias + mask))`: a fused
           attention has one additive input, and one sum serves all layers.
        3. Any other `Gemm` or `Softmax` stays as it is.

    The report has the names of the `Gemm` nodes that became `MatMul`, and of the `Softmax` nodes whose addends are
    summed first.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        probe, names = Probe(model), list[str | None]()
        for node in list(model.graph):
            is_linear = node.op_type == "Gemm" and not node.domain and _unflatten(node, probe)
            if is_linear or (node.op_type == "Softmax" and _sum_addends(node)):
                names.append(node.name)
        merged = common.CommonSubexpressionEliminationPass()(model).modified
        removed = common.RemoveUnusedNodesPass()(model).modified
        return changed(model, names, is_other=merged or removed)


def _unflatten(gemm: ir.Node, probe: Probe) -> bool:
    """Case 1; returns whether it applies."""
    flatten = producer_of(gemm.inputs[0])
    flat_output = gemm.outputs[0]
    uses = list(flat_output.uses())
    unscaled = all(gemm.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if not unscaled or any(gemm.attributes.get_int(name, 0) for name in ("transA", "transB")):
        return False
    if flatten is None or flatten.op_type != "Reshape" or len(uses) != 1 or flat_output.is_graph_output():
        return False
    restore = uses[0].node
    source, restored = flatten.inputs[0], restore.outputs[0]
    if restore.op_type != "Reshape" or restore.inputs[0] is not flat_output or restored.is_graph_output():
        return False
    for before, flat, after in zip(*map(probe.shapes, (source, flatten.outputs[0], restored)), strict=True):
        if before is None or flat is None or after is None:
            return False
        if (*before[:-1], flat[-1]) != (*after[:-1], before[-1]):
            return False
    nodes = [_node("MatMul", source, gemm.inputs[1], like=restored)]
    if (bias := input_of(gemm, 2)) is not None:
        nodes.append(_node("Add", nodes[0].outputs[0], bias, like=restored))
    graph_of(gemm).insert_before(restore, nodes)
    restored.replace_all_uses_with(nodes[-1].outputs[0])
    graph_of(gemm).remove([restore, gemm], safe=True)
    return True


def _sum_addends(softmax: ir.Node) -> bool:
    """Case 2; returns whether it applies."""
    outer = _add(softmax.inputs[0])
    inner = _add(outer.inputs[0]) if outer is not None else None
    if outer is None or inner is None or len(inner.outputs[0].uses()) != 1:
        return False
    if any(node.outputs[0].is_graph_output() for node in (outer, inner)):
        return False
    scores, bias = inner.inputs
    if not _is_product(scores) or _is_product(bias):
        return False
    addend = ir.node("Add", [bias, outer.inputs[1]])
    total = _node("Add", scores, addend.outputs[0], like=outer.outputs[0])
    graph_of(outer).insert_before(outer, [addend, total])
    outer.outputs[0].replace_all_uses_with(total.outputs[0])
    graph_of(outer).remove([outer, inner], safe=True)
    return True


def _node(op_type: str, *inputs: ir.Value | None, like: ir.Value) -> ir.Node:
    """A node whose output records the type and shape of `like`: the fusion rules read recorded shapes."""
    node = ir.node(op_type, inputs)
    node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
    return node


def _add(value: ir.Value | None) -> ir.Node | None:
    """The `Add` that computes a tensor, if one does."""
    node = producer_of(value)
    return node if node is not None and node.op_type == "Add" else None


def _is_product(value: ir.Value | None) -> bool:
    """Whether a tensor is the output of a `MatMul`, scaled or not."""
    node = producer_of(source_before(value, ("Mul", "Div")))
    return node is not None and node.op_type == "MatMul"
