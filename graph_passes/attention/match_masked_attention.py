"""Find the masked attentions of a graph: what scores are made of, what is added to them, what stands for the mask.

Forward from the initializer `<site>.block_mask` to the scores that it is added to; `operands` tells what these are made
of. `passes.LowerBlockSparse` lists the cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from graph_passes.attention.operands import NoMatchError, Operands, decomposed, is_scores, of_operator
from graph_passes.block_sparse.masks import BlockMask
from graph_passes.flow.concrete_shapes import Probe

# What makes the mask of scores out of the blocks, and the mark of queries that have a key out of that.
_MASK_OPS = frozenset(
    "And Cast CastLike Equal Expand Gather Greater Identity Less Not Pad ReduceMax ReduceSum Reshape Squeeze Transpose "
    "Unsqueeze".split()
)
_LAYOUT = frozenset(("Identity", "Reshape", "Transpose"))


@dataclasses.dataclass(eq=False)
class MaskedAttentionMatch:
    """One attention: its operands, with all that is added to its scores, and what stands for the mask around it."""

    mask: BlockMask
    blocks: ir.Value
    operands: Operands
    dims: tuple[int, int]
    persistent: int
    guards: list[tuple[ir.Node, int]]
    """Nodes that zero queries without a key, and which input the attention's output comes by."""
    idle: list[ir.Node]
    """Reshapes that change nothing."""


def match(blocks: ir.Value, planned: BlockMask, probe: Probe) -> list[MaskedAttentionMatch]:
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
        operands = of_operator(node, probe) if node.op_type == "Attention" else decomposed(node, position, probe)
        shapes = [probe.shape(one) for one in (operands.query, operands.key, operands.value)]
        if any(shape is None or len(shape) != 4 for shape in shapes):
            raise NoMatchError(node, "has operands of other axes than batch, head, position, dim")
        heads = {shape[1] for shape in shapes if shape is not None}
        if heads != {len(mask.kept)}:
            raise NoMatchError(node, f"has {max(heads)} heads, the mask {len(mask.kept)}")
        own = [
            one
            for part in (addend, *operands.addends)
            for one in ([part] if part not in derived else _own(part, derived, probe))
        ]
        dims = shapes[0][3], shapes[2][3]  # type: ignore[index]
        cores.append(MaskedAttentionMatch(mask, blocks, operands._replace(addends=own), dims, persistent, [], []))
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
        elif node.op_type == "Attention" or (node.op_type == "Add" and is_scores(node.inputs[1 - position], probe)):
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


def _guarded(
    value: ir.Value | None, cores: list[MaskedAttentionMatch], probe: Probe, guard: ir.Node
) -> tuple[MaskedAttentionMatch, list[ir.Node]]:
    """The attention whose output a guard zeroes, by way of layout and gates, and the reshapes there that do nothing."""
    idle: list[ir.Node] = []
    while value is not None:
        for core in cores:
            if value is core.operands.output:
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
