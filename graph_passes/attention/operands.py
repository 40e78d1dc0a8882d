"""The operands of a masked attention, found from its scores back to queries and keys, and forward to the values."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.refusal import Refusal, RefusalCode
from graph_passes.tape import input_of, producer_of, source_before

SWAP = (0, 2, 1, 3)
"""The permutation between `[batch, head, position, width]` and `[batch, position, head, width]`."""


SCORE_BIAS = 5
"""Input of `Attention` and of `MultiHeadAttention` that is added to the scores."""


class NoMatchError(Exception):
    """The operators around a mask are not those of an attention that can be lowered.

    Args:
        why: what is wrong: a clause whose subject is the operator.
        node: the operator that prevents the match, if there is one.
        op: what prevents the match instead of a node, e.g. `mask`.
    """

    def __init__(self, code: RefusalCode, why: str, node: ir.Node | None = None, *, op: str = "") -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        self.op = node.op_type if node is not None else op
        self.name = (node.name or "") if node is not None else ""

    def refusal(self, site: str) -> Refusal:
        """The error as the refusal of one site."""
        return Refusal(frozenset((site,)), self.op, self.name, self.why, self.code)


class Operands(NamedTuple):
    """The tensors of one attention, `softmax(scale * query key^T + addends) value`.

    Attributes:
        query: queries, `[batch, head, query, head_dim]`.
        key: keys, `[batch, head, key, head_dim]`.
        value: values, `[batch, head, key, value_dim]`.
        scale: the factor of the scores.
        addends: numbers that are added to the scores besides the block mask, or booleans that are True where a pair is
            allowed; each broadcasts to `[batch, head, query, key]`.
        output: the attention's output, `[batch, head, query, value_dim]`.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    scale: float
    addends: list[ir.Value]
    output: ir.Value


def operands_of_operator(node: ir.Node, probe: Probe) -> Operands:
    """Operands of an `Attention` operator of the ONNX standard (case 2 of `passes.LowerBlockSparse`).

    Raises:
        NoMatchError: the operator does more than block-sparse attention does.
    """
    if node.attributes.get_float("softcap", 0.0) or node.attributes.get_int("is_causal", 0):
        raise unmatched(node, "caps scores or hides later keys by an attribute")
    if len(node.inputs) > 4 or len(node.outputs) > 1:
        raise unmatched(node, "uses keys of earlier calls")
    query, key, value = node.inputs[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    shape = probe.shape(query)
    if shape is None:
        raise NoMatchError(RefusalCode.UNKNOWN_SHAPE, "has operands of unknown shape", node)
    scale = node.attributes.get_float("scale", shape[-1] ** -0.5)
    return Operands(query, key, value, scale, [], node.outputs[0])


def operands_around_mask(add: ir.Node, position: int, probe: Probe) -> Operands:
    """Operands of an attention of plain operators (case 1 of `passes.LowerBlockSparse`).

    Args:
        add: the node that adds the mask to the scores.
        position: position of the mask among its inputs.

    Raises:
        NoMatchError: an operator between scores, softmax and values does not match.
    """
    product, scale, addends = _score_product(add.inputs[1 - position], probe)
    masked = add.outputs[0]
    while (node := _only_reader(masked)).op_type != "Softmax":
        if node.op_type == "Add":
            addends.append(next(value for value in node.inputs if value is not masked and value is not None))
        elif node.op_type not in ("Cast", "Identity"):
            raise unmatched(node, "stands between the masked scores and their Softmax")
        masked = node.outputs[0]
    return _operands(product, scale, addends, node, probe)


def operands_of_softmax(softmax: ir.Node, probe: Probe) -> Operands:
    """Operands of an attention of plain operators; its addends are all tensors added to the scaled scores.

    Raises:
        NoMatchError: an operator between queries, scores, softmax and values does not match.
    """
    scores = source_before(softmax.inputs[0], ("Cast", "Identity"))
    return _operands(*_score_product(scores, probe), softmax, probe)


def _operands(product: ir.Node, scale: float, addends: list[ir.Value], softmax: ir.Node, probe: Probe) -> Operands:
    """Operands of an attention between the product of queries and keys, and the softmax of the scores."""
    rank = len(probe.shape(softmax.inputs[0]) or ())
    if softmax.attributes.get_int("axis", -1) not in (-1, rank - 1):
        raise unmatched(softmax, "normalizes along an axis other than the keys")
    probabilities = softmax.outputs[0]
    while (node := _only_reader(probabilities)).op_type != "MatMul":
        if node.op_type not in ("Cast", "Identity"):
            raise unmatched(node, "stands between the probabilities and the values")
        probabilities = node.outputs[0]
    value, (query, key) = node.inputs[1], product.inputs
    if value is None or query is None or key is None or value is probabilities:
        raise unmatched(node, "multiplies the probabilities from the left")
    query, query_scale = _unscaled(query, probe)
    key, transposed_scale = _unscaled(key, probe)
    untransposed = _untransposed(key, probe)
    if untransposed is None:
        raise unmatched(product, "has keys that are not transposed by a Transpose")
    key, key_scale = _unscaled(untransposed, probe)
    scale = scale * query_scale * transposed_scale * key_scale
    return Operands(query, key, value, scale, addends, node.outputs[0])


def is_scores(value: ir.Value | None, probe: Probe) -> bool:
    """Whether a tensor holds scores, that is products of queries and keys, rather than an addend of scores."""
    try:
        product, _, _ = _score_product(value, probe)
    except NoMatchError:
        return False
    return not any(operand is None or operand.is_initializer() for operand in product.inputs)


def has_score_bias(node: ir.Node) -> bool:
    """Whether a node is ONNX Runtime's fused attention and adds something to its scores."""
    # ONNX has an operator of the same name, with other inputs.
    is_fused = node.op_type == "Attention" and node.domain == "com.microsoft"
    return is_fused and input_of(node, SCORE_BIAS) is not None


def swaps(node: ir.Node) -> bool:
    """Whether a node transposes `[batch, head, position, width]` to `[batch, position, head, width]`, or back."""
    return node.op_type == "Transpose" and tuple(node.attributes.get_ints("perm", ())) == SWAP


def before_swap(value: ir.Value) -> ir.Value | None:
    """The tensor `[batch, position, head, width]` that one `[batch, head, position, width]` is a transpose of."""
    node = value.producer()
    return node.inputs[0] if node is not None and swaps(node) else None


def unmatched(node: ir.Node, why: str) -> NoMatchError:
    """The error of a node that is not what an attention has at its position."""
    return NoMatchError(RefusalCode.UNMATCHED_ATTENTION, why, node)


def _only_reader(value: ir.Value) -> ir.Node:
    """The only node that reads a value; an error where there are several, or the graph returns it."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        raise NoMatchError(
            RefusalCode.UNMATCHED_ATTENTION, "computes scores or probabilities that other nodes read", value.producer()
        )
    return uses[0].node


def _score_product(value: ir.Value | None, probe: Probe) -> tuple[ir.Node, float, list[ir.Value]]:
    """The product of queries and keys that scores are computed from, its scale, and its addends."""
    node = producer_of(value)
    if node is None:
        raise NoMatchError(
            RefusalCode.UNMATCHED_ATTENTION, "holds the scores, which no matmul computes", op="graph input"
        )
    if node.op_type == "MatMul":
        return node, 1.0, []
    if node.op_type in ("Mul", "Div"):
        scaled, factor = _constant_factor(node, probe)
        product, scale, addends = _score_product(scaled, probe)
        if addends and factor != 1.0:
            raise unmatched(node, "scales what is added to the scores")
        return product, scale * factor, addends
    if node.op_type == "Add":
        for scores, addend in (node.inputs, reversed(node.inputs)):
            try:
                product, scale, addends = _score_product(scores, probe)
            except NoMatchError:
                continue
            assert addend is not None
            return product, scale, [*addends, addend]
    raise unmatched(node, "stands between the matmul of queries and keys and its mask")


def _constant_factor(node: ir.Node, probe: Probe) -> tuple[ir.Value, float]:
    """The tensor that a `Mul` or `Div` scales by a constant number, and the factor."""
    for position in (1, 0) if node.op_type == "Mul" else (1,):
        content = probe.constant(node.inputs[position])
        scaled = node.inputs[1 - position]
        if content is not None and content.size == 1 and scaled is not None:
            factor = float(content.reshape(()))
            return scaled, factor if node.op_type == "Mul" else 1.0 / factor
    raise unmatched(node, "scales scores by a number that is not constant")


def _unscaled(value: ir.Value, probe: Probe) -> tuple[ir.Value, float]:
    """An operand before it is scaled, and the scale."""
    scale = 1.0
    while (node := value.producer()) is not None and node.op_type in ("Mul", "Div", "Identity"):
        if node.op_type == "Identity":
            source, factor = node.inputs[0], 1.0
            assert source is not None
        else:
            try:
                source, factor = _constant_factor(node, probe)
            except NoMatchError:
                break
        value, scale = source, scale * factor
    return value, scale


def _untransposed(value: ir.Value, probe: Probe) -> ir.Value | None:
    """The keys `[batch, head, key, dim]` that `value`, `[batch, head, dim, key]`, is a transpose of, or None."""
    node = value.producer()
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Transpose":
        return node.inputs[0] if node.attributes.get_ints("perm", ()) == (0, 1, 3, 2) else None
    if node.op_type != "Reshape" or len(probe.shape(value) or ()) != 4:
        return None
    # PyTorch's decomposition merges batch and heads, transposes, and separates them again.
    transpose = producer_of(node.inputs[0])
    merge = producer_of(transpose.inputs[0]) if transpose is not None else None
    if transpose is None or merge is None or transpose.op_type != "Transpose" or merge.op_type != "Reshape":
        return None
    if transpose.attributes.get_ints("perm", ()) != (0, 2, 1):
        return None
    for before, merged, after in zip(*map(probe.shapes, (merge.inputs[0], merge.outputs[0], value)), strict=True):
        if before is None or after is None or len(before) != 4:
            return None
        if before != (after[0], after[1], after[3], after[2]) or merged != (after[0] * after[1], *before[2:]):
            return None
    return merge.inputs[0]
