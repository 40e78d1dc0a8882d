"""Find the masked attentions of a graph: what scores are made of, what is added to them, what stands for the mask.

Forward from the initializer `<site>.block_mask` to the scores that it is added to, and from there back to queries and
keys and on to the values. `passes.LowerBlockSparse` lists the cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from graph_passes.masks import BlockMask
from graph_passes.probe import Probe

# What makes the mask of scores out of the blocks, and the mark of queries that have a key out of that.
_MASK_OPS = frozenset(
    "And Cast CastLike Equal Expand Gather Greater Identity Less Not Pad ReduceMax ReduceSum Reshape Squeeze Transpose "
    "Unsqueeze".split()
)
_LAYOUT = frozenset(("Identity", "Reshape", "Transpose"))


class NoMatchError(Exception):
    """The operator in the way, its name, and what about it."""

    def __init__(self, node: ir.Node | None, why: str, op: str = "") -> None:
        super().__init__(why)
        self.op, self.name, self.why = (node.op_type if node else op), (node.name or "") if node else "", why


@dataclasses.dataclass(eq=False)
class Core:
    """One attention: its operands, what is added to its scores, and what stands for the mask around it."""

    mask: BlockMask
    blocks: ir.Value
    query: ir.Value
    key: ir.Value
    value: ir.Value
    scale: float
    addends: list[ir.Value]
    output: ir.Value
    dims: tuple[int, int]
    persistent: int
    guards: list[tuple[ir.Node, int]]
    """Nodes that zero queries without a key, and which input the attention's output comes by."""
    idle: list[ir.Node]
    """Reshapes that change nothing."""


def match(blocks: ir.Value, planned: BlockMask, probe: Probe) -> list[Core]:
    """The attentions of one site, one for each call of its module.

    Args:
        blocks: its initializer, whose heads may be fewer by now.
        planned: the mask as the plan has it.
        probe: the graph's shapes.

    Raises:
        NoMatchError: there is an operator in the way.
    """
    tensor = blocks.const_value
    if planned.block == 1:
        raise NoMatchError(None, "masks single entries, not blocks", "mask")
    if tensor is None or tensor.dtype != ir.DataType.BOOL:
        raise NoMatchError(None, "has no content that can be read", "mask")
    mask = BlockMask(tensor.numpy(), planned.block, planned.memory)
    if mask.kept.shape[1:] != planned.kept.shape[1:]:
        raise NoMatchError(None, "has other blocks than the plan's mask", "mask")
    derived, guards, ends, persistent = _follow(blocks, probe)
    if not ends:
        raise NoMatchError(None, "meets no scores", "mask")
    cores = []
    for node, position in ends:
        addend = node.inputs[position]
        assert addend is not None
        core = _operator(node, probe) if node.op_type == "Attention" else _decomposed(node, position, probe)
        query, key, value, scale, addends, output = core
        shapes = [probe.shape(one) for one in (query, key, value)]
        if any(shape is None or len(shape) != 4 for shape in shapes):
            raise NoMatchError(node, "has operands of other axes than batch, head, position, dim")
        heads = {shape[1] for shape in shapes if shape is not None}
        if heads != {len(mask.kept)}:
            raise NoMatchError(node, f"has {max(heads)} heads, the mask {len(mask.kept)}")
        own = [
            one
            for part in (addend, *addends)
            for one in ([part] if part not in derived else _own(part, derived, probe))
        ]
        dims = shapes[0][3], shapes[2][3]  # type: ignore[index]
        cores.append(Core(mask, blocks, query, key, value, scale, own, output, dims, persistent, [], []))
    for guard, position in guards:
        core_, idle = _guarded(guard.inputs[position], cores, probe, guard)
        core_.guards.append((guard, position))
        core_.idle += idle
    return cores


def _follow(
    blocks: ir.Value, probe: Probe
) -> tuple[set[ir.Value], list[tuple[ir.Node, int]], list[tuple[ir.Node, int]], int]:
    """Everything made of the mask: those values, the nodes that zero queries, those that take the mask of scores,
    and how many keys it lets every query see."""
    derived, guards, ends, persistent = {blocks}, [], [], 0
    stack = list(blocks.uses())
    while stack:
        node, position = stack.pop()
        if node.op_type == "Where" and position == 0 and not _lowest(node.inputs[2], probe):
            guards.append((node, 2))
        elif node.op_type == "Mul":
            guards.append((node, 1 - position))
        elif node.op_type == "Attention" or (node.op_type == "Add" and _scores(node.inputs[1 - position], probe)):
            ends.append((node, position))
        elif node.op_type in _MASK_OPS | {"Add", "Where"} and node.domain == "":
            if node.op_type == "Pad":
                pads = probe.constant(node.inputs[1])
                if pads is None:
                    raise NoMatchError(node, "pads the mask by sizes that are computed")
                persistent = int(pads[-1])
            if node.outputs[0] not in derived:
                derived.add(node.outputs[0])
                stack += list(node.outputs[0].uses())
        else:
            raise NoMatchError(node, "reads the mask")
    if any(value.is_graph_output() for value in derived):
        raise NoMatchError(None, "gives the mask out", "graph output")
    return derived, guards, ends, persistent


def _lowest(value: ir.Value | None, probe: Probe) -> bool:
    """Whether a tensor holds a type's lowest number alone, or so."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Expand":
        value = node.inputs[0]
    content = probe.constant(value)
    return content is not None and content.size == 1 and float(content.reshape(())) < -1e4


def _own(mask: ir.Value, derived: set[ir.Value], probe: Probe) -> Iterator[ir.Value]:
    """The family's mask within `Where(blocks and its mask, its mask or zero, lowest)`."""
    where = mask.producer()
    if where is not None and where.op_type == "Add":
        for part in where.inputs:
            assert part is not None
            yield from _own(part, derived, probe) if part in derived else (part,)
        return
    if where is None or where.op_type != "Where" or where.inputs[1] in derived:
        raise NoMatchError(where, "makes no mask of scores")
    added, both = where.inputs[1], where.inputs[0]
    assert added is not None
    zero = probe.constant(added)
    if zero is None or zero.any():
        yield added
        return
    while both is not None and (node := both.producer()) is not None and node.op_type == "And":
        given = [value for value in node.inputs if value is not None and value not in derived]
        if len(given) > 1:
            raise NoMatchError(node, "joins masks that are not of blocks")
        yield from given
        both = next((value for value in node.inputs if value in derived), None)


_Operands = tuple[ir.Value, ir.Value, ir.Value, float, list[ir.Value], ir.Value]


def _operator(node: ir.Node, probe: Probe) -> _Operands:
    """Case 2: query, key, value, scale, other addends, output."""
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
    return query, key, value, node.attributes.get_float("scale", shape[-1] ** -0.5), [], node.outputs[0]


def _decomposed(add: ir.Node, position: int, probe: Probe) -> _Operands:
    """Case 1."""
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
    return query, swapped, value, scale * before * after * again, addends, node.outputs[0]


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


def _scores(value: ir.Value | None, probe: Probe) -> bool:
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


def _guarded(value: ir.Value | None, cores: list[Core], probe: Probe, guard: ir.Node) -> tuple[Core, list[ir.Node]]:
    """The attention whose output a guard zeroes, by way of layout and gates, and the reshapes there that do nothing."""
    idle: list[ir.Node] = []
    while value is not None:
        for core in cores:
            if value is core.output:
                return core, idle
        node = value.producer()
        if node is None:
            break
        if (
            node.op_type == "Reshape"
            and node.inputs[0] is not None
            and probe.shapes(node.inputs[0]) == probe.shapes(value)
        ):
            idle.append(node)
        if node.op_type in _LAYOUT:
            value = node.inputs[0]
        elif node.op_type == "Mul":
            # A gate, or another guard.
            data = [one for one in node.inputs if one is not None and not one.is_initializer()]
            value = data[0] if data else None
        elif node.op_type == "Where":
            value = node.inputs[2]
        else:
            break
    raise NoMatchError(guard, "marks queries of something else than the attention")
