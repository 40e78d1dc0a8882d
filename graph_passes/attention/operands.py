"""Find what an attention multiplies: from its scores back to queries and keys, and on to the values."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe


class NoMatchError(Exception):
    """The operator in the way, its name, and what about it."""

    def __init__(self, node: ir.Node | None, why: str, op: str = "") -> None:
        super().__init__(why)
        self.op, self.name, self.why = (node.op_type if node else op), (node.name or "") if node else "", why


class Operands(NamedTuple):
    """Queries, keys and values, what scales their scores and what else is added to these, and what comes out."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    scale: float
    addends: list[ir.Value]
    output: ir.Value


def of_operator(node: ir.Node, probe: Probe) -> Operands:
    """Case 2 of `passes.LowerBlockSparse`, one operator."""
    if node.attributes.get_float("softcap", 0.0) or node.attributes.get_int("is_causal", 0):
        raise NoMatchError(node, "caps scores or hides later keys by itself")
    if len(node.inputs) > 4 or len(node.outputs) > 1:
        raise NoMatchError(node, "keeps keys from earlier calls")
    query, key, value = node.inputs[:3]
    shape = probe.shape(query)
    assert query is not None
    assert key is not None
    assert value is not None
    if shape is None:
        raise NoMatchError(node, "has operands of unknown shape")
    scale = node.attributes.get_float("scale", shape[-1] ** -0.5)
    return Operands(query, key, value, scale, [], node.outputs[0])


def decomposed(add: ir.Node, position: int, probe: Probe) -> Operands:
    """Case 1 of `passes.LowerBlockSparse`, what stands around the addition of the mask, its input at `position`."""
    product, scale, addends = _to_product(add.inputs[1 - position], probe)
    at = add.outputs[0]
    while (node := _reader(at)).op_type != "Softmax":
        if node.op_type == "Add":
            addends.append(next(value for value in node.inputs if value is not at and value is not None))
        elif node.op_type not in ("Cast", "Identity"):
            raise NoMatchError(node, "stands between the masked scores and their Softmax")
        at = node.outputs[0]
    rank = len(probe.shape(at) or ())
    if node.attributes.get_int("axis", -1) not in (-1, rank - 1):
        raise NoMatchError(node, "sums over another axis than the keys")
    at = node.outputs[0]
    while (node := _reader(at)).op_type != "MatMul":
        if node.op_type not in ("Cast", "Identity"):
            raise NoMatchError(node, "stands between the probabilities and the values")
        at = node.outputs[0]
    value, (query, key) = node.inputs[1], product.inputs
    if value is None or query is None or key is None or value is at:
        raise NoMatchError(node, "multiplies probabilities from the right")
    query, before = _unscaled(query, probe)
    key, after = _unscaled(key, probe)
    swapped = _unswapped(key, probe)
    if swapped is None:
        raise NoMatchError(product, "has keys that no Transpose brings into place")
    swapped, again = _unscaled(swapped, probe)
    return Operands(query, swapped, value, scale * before * after * again, addends, node.outputs[0])


def _reader(value: ir.Value) -> ir.Node:
    """The one node that reads a value."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        raise NoMatchError(value.producer(), "gives scores or probabilities to others too")
    return uses[0][0]


def _to_product(value: ir.Value | None, probe: Probe) -> tuple[ir.Node, float, list[ir.Value]]:
    """The product of queries and keys behind scores, its scale, and what is added to it."""
    node = value.producer() if value is not None else None
    if node is None:
        raise NoMatchError(node, "the scores are no product", "graph input")
    if node.op_type == "MatMul":
        return node, 1.0, []
    if node.op_type in ("Mul", "Div"):
        inner, factor = _factor(node, probe)
        product, scale, addends = _to_product(inner, probe)
        if addends and factor != 1.0:
            raise NoMatchError(node, "scales what is added to the scores")
        return product, scale * factor, addends
    if node.op_type == "Add":
        for scores, other in (node.inputs, reversed(node.inputs)):
            try:
                product, scale, addends = _to_product(scores, probe)
            except NoMatchError:
                continue
            assert other is not None
            return product, scale, [*addends, other]
    raise NoMatchError(node, "stands between the product of queries and keys and its mask")


def is_scores(value: ir.Value | None, probe: Probe) -> bool:
    """Whether a tensor is a product of queries and keys, and not something to be added to one."""
    try:
        product, _, _ = _to_product(value, probe)
    except NoMatchError:
        return False
    return not any(operand is None or operand.is_initializer() for operand in product.inputs)


def _factor(node: ir.Node, probe: Probe) -> tuple[ir.Value, float]:
    """The tensor that a node scales, and by how much."""
    for place in (1, 0) if node.op_type == "Mul" else (1,):
        content = probe.constant(node.inputs[place])
        inner = node.inputs[1 - place]
        if content is not None and content.size == 1 and inner is not None:
            factor = float(content.reshape(()))
            return inner, factor if node.op_type == "Mul" else 1.0 / factor
    raise NoMatchError(node, "scales scores by no constant")


def _unscaled(value: ir.Value, probe: Probe) -> tuple[ir.Value, float]:
    """An operand before it is scaled, and the scale."""
    scale = 1.0
    while (node := value.producer()) is not None and node.op_type in ("Mul", "Div", "Identity"):
        if node.op_type == "Identity":
            inner, factor = node.inputs[0], 1.0
            assert inner is not None
        else:
            try:
                inner, factor = _factor(node, probe)
            except NoMatchError:
                break
        value, scale = inner, scale * factor
    return value, scale


def _unswapped(value: ir.Value, probe: Probe) -> ir.Value | None:
    """Keys `[batch, head, key, dim]`, of which `value` is `[batch, head, dim, key]`."""
    node = value.producer()
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    rank = len(probe.shape(value) or ())
    if node.op_type == "Transpose":
        return node.inputs[0] if node.attributes.get_ints("perm", ()) == (0, 1, 3, 2) else None
    if node.op_type != "Reshape" or rank != 4:
        return None
    # torch's decomposition joins batch and heads, transposes, and takes them apart again.
    inner = node.inputs[0].producer()
    first = inner.inputs[0].producer() if inner is not None and inner.inputs[0] is not None else None
    if inner is None or first is None or inner.op_type != "Transpose" or first.op_type != "Reshape":
        return None
    source, shape = first.inputs[0], probe.shape(value)
    before, middle = probe.shape(first.inputs[0]), probe.shape(first.outputs[0])
    if source is None or before is None or shape is None or len(before) != 4:
        return None
    same = before == (shape[0], shape[1], shape[3], shape[2]) and middle == (shape[0] * shape[1], *before[2:])
    return source if same and inner.attributes.get_ints("perm", ()) == (0, 2, 1) else None
