"""Find the masked attentions of one site: their operands, other addends of the scores, and the guards of their outputs.

The search goes forward from the initializer `<site>.block_mask` to the scores that it is added to, and from these back
to what they are computed from, see `operands`. `passes.LowerBlockSparse` lists the cases.

Models compute their native mask `[batch, 1, query, key]` from a padding mask, positions and causality, each in its own
way. Where a row of keys and a flag for causality are equivalent (see `mask_meaning`), the mask of every pair is not
needed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from graph_passes.attention.mask_meaning import MaskMeaning, mask_meaning
from graph_passes.attention.operands import (
    NoMatchError,
    Operands,
    is_scores,
    operands_around_mask,
    operands_of_operator,
    unmatched,
)
from graph_passes.block_sparse.masks import BlockMask
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.refusal import RefusalCode
from graph_passes.tape import Tape, producer_of, source_before

# Operators that expand blocks into a mask of scores, and reduce it to a mask of the queries that have a key.
_MASK_OPS = frozenset(
    "And Cast CastLike Equal Expand Gather Greater Identity Less Not Pad ReduceMax ReduceSum Reshape Squeeze Transpose "
    "Unsqueeze".split()
)
_LAYOUT = frozenset(("Identity", "Reshape", "Transpose"))

_LOWEST = -1e4
"""Addends below this number hide a pair."""

Use = tuple[ir.Node, int]
"""A node and the position of one of its inputs."""


@dataclasses.dataclass(eq=False)
class MaskedAttentionMatch:
    """One masked attention.

    Attributes:
        mask: its block mask, for the heads that the graph still has.
        blocks: the initializer of the mask.
        operands: its operands; the addends are those of the model's native mask.
        dims: widths of a query and of a value.
        persistent: number of keys after those of the mask that every query attends to.
        guards: nodes that zero queries without a key, and the position of the input that holds the attention's output.
        idle: reshapes before the guards that change nothing.
    """

    mask: BlockMask
    blocks: ir.Value
    operands: Operands
    dims: tuple[int, int]
    persistent: int
    guards: list[Use]
    idle: list[ir.Node]


@dataclasses.dataclass(frozen=True)
class _MaskUses:
    """The uses of a mask in the graph.

    Attributes:
        derived: the tensors computed from the mask.
        guards: nodes that zero queries without a key, and the position of the input that they zero.
        ends: nodes that mask scores, and the position of the mask among their inputs.
        persistent: number of keys that the mask lets every query attend to.
    """

    derived: set[ir.Value]
    guards: list[Use]
    ends: list[Use]
    persistent: int


def match_masked_attentions(blocks: ir.Value, planned: BlockMask, probe: Probe) -> list[MaskedAttentionMatch]:
    """The attentions of one site, one for each call of its module.

    Args:
        blocks: the initializer of the site's mask, which may have fewer heads than the plan's.

    Raises:
        NoMatchError: the mask is unsupported, or an operator around it does not match.
    """
    tensor = blocks.const_value
    if planned.block == 1:
        raise _unsupported_mask("masks single entries, not blocks")
    if tensor is None or tensor.dtype != ir.DataType.BOOL:
        raise _unsupported_mask("has no constant boolean content")
    mask = BlockMask(tensor.numpy(), planned.block, planned.memory)
    if mask.kept.shape[1:] != planned.kept.shape[1:]:
        raise _unsupported_mask("has different blocks than the plan's mask")
    uses = _follow(blocks, probe)
    if not uses.ends:
        raise _unsupported_mask("reaches no scores")
    matches = []
    for node, position in uses.ends:
        is_operator = node.op_type == "Attention"
        operands = operands_of_operator(node, probe) if is_operator else operands_around_mask(node, position, probe)
        dims = _check_shapes(node, operands, len(mask.kept), probe)
        addend = node.inputs[position]
        assert addend is not None
        native = [part for value in (addend, *operands.addends) for part in _native_parts(value, uses.derived, probe)]
        operands = operands._replace(addends=native)
        matches.append(MaskedAttentionMatch(mask, blocks, operands, dims, uses.persistent, [], []))
    for guard, position in uses.guards:
        guarded, idle = _guarded(guard, position, matches, probe)
        guarded.guards.append((guard, position))
        guarded.idle += idle
    return matches


def _unsupported_mask(why: str) -> NoMatchError:
    return NoMatchError(RefusalCode.UNSUPPORTED_MASK, why, op="mask")


def _check_shapes(node: ir.Node, operands: Operands, heads: int, probe: Probe) -> tuple[int, int]:
    """Check that the operands have the mask's heads, and return the widths of a query and of a value."""
    query, key, value = (probe.shape(operand) for operand in (operands.query, operands.key, operands.value))
    if query is None or key is None or value is None or any(len(shape) != 4 for shape in (query, key, value)):
        raise unmatched(node, "has operands whose axes are not batch, head, position, dim")
    operand_heads = {query[1], key[1], value[1]}
    if operand_heads != {heads}:
        raise unmatched(node, f"has {max(operand_heads)} heads, the mask {heads}")
    return query[3], value[3]


def _follow(blocks: ir.Value, probe: Probe) -> _MaskUses:
    """The uses of a mask, followed forward from its initializer."""
    derived, guards, ends, persistent = {blocks}, [], [], 0
    stack = list(blocks.uses())
    while stack:
        node, position = stack.pop()
        if node.op_type == "Where" and position == 0 and not _is_lowest(node.inputs[2], probe):
            guards.append((node, 2))
        elif node.op_type == "Mul":
            guards.append((node, 1 - position))
        elif node.op_type == "Attention" or (node.op_type == "Add" and is_scores(node.inputs[1 - position], probe)):
            ends.append((node, position))
        elif node.op_type in _MASK_OPS | {"Add", "Where"} and node.domain == "":
            if node.op_type == "Pad":
                pads = probe.constant(node.inputs[1])
                if pads is None:
                    why = "pads the mask by sizes that are computed at run time"
                    raise NoMatchError(RefusalCode.COMPUTED_VALUE, why, node)
                persistent = int(pads[-1])
            if node.outputs[0] not in derived:
                derived.add(node.outputs[0])
                stack += list(node.outputs[0].uses())
        else:
            raise NoMatchError(RefusalCode.UNSUPPORTED_MASK, "reads the mask", node)
    if any(value.is_graph_output() for value in derived):
        raise NoMatchError(RefusalCode.GRAPH_OUTPUT, "returns the mask", op="graph output")
    return _MaskUses(derived, guards, ends, persistent)


def _is_lowest(value: ir.Value | None, probe: Probe) -> bool:
    """Whether a tensor holds a single number that hides pairs, such as a type's lowest one."""
    content = probe.constant(source_before(value, ("Expand",)))
    return content is not None and content.size == 1 and float(content.reshape(())) < _LOWEST


def _native_parts(addend: ir.Value, derived: set[ir.Value], probe: Probe) -> Iterator[ir.Value]:
    """The parts of an addend of scores that belong to the model's native mask.

    The block mask is joined with the native one as `Where(blocks and native, native or zero, lowest)`. What is
    `derived` is computed from the block mask.
    """
    if addend not in derived:
        yield addend
        return
    where = addend.producer()
    if where is not None and where.op_type == "Add":
        for part in where.inputs:
            assert part is not None
            yield from _native_parts(part, derived, probe)
        return
    if where is None or where.op_type != "Where" or where.inputs[1] in derived:
        raise NoMatchError(RefusalCode.UNSUPPORTED_MASK, "does not compute a mask of scores", where)
    native, allowed = where.inputs[1], where.inputs[0]
    assert native is not None
    content = probe.constant(native)
    if content is None or content.any():
        yield native
        return
    while (node := producer_of(allowed)) is not None and node.op_type == "And":
        underived = [value for value in node.inputs if value is not None and value not in derived]
        if len(underived) > 1:
            raise NoMatchError(RefusalCode.UNSUPPORTED_MASK, "joins masks that are not computed from the blocks", node)
        yield from underived
        allowed = next((value for value in node.inputs if value in derived), None)


def _guarded(
    guard: ir.Node, position: int, matches: list[MaskedAttentionMatch], probe: Probe
) -> tuple[MaskedAttentionMatch, list[ir.Node]]:
    """The attention whose output a guard zeroes, and the reshapes in between that change nothing.

    The guard zeroes the attention's output after changes of layout and gates.
    """
    idle: list[ir.Node] = []
    value = guard.inputs[position]
    while value is not None:
        for candidate in matches:
            if value is candidate.operands.output:
                return candidate, idle
        node = value.producer()
        if node is None:
            break
        source = node.inputs[0] if node.inputs else None
        if node.op_type == "Reshape" and source is not None and probe.shapes(source) == probe.shapes(value):
            idle.append(node)
        if node.op_type in _LAYOUT:
            value = source
        elif node.op_type == "Mul":
            # A gate, or another guard.
            data = [operand for operand in node.inputs if operand is not None and not operand.is_initializer()]
            value = data[0] if data else None
        elif node.op_type == "Where":
            value = node.inputs[2]
        else:
            break
    raise unmatched(guard, "zeroes a tensor that is not an output of the attention")


@dataclasses.dataclass(frozen=True)
class NativeMask:
    """The numbers that a site's native mask adds to the scores.

    Attributes:
        row: numbers for each key, `[batch, 1, 1, key]`.
        causal: whether keys after the query are hidden.
        full: numbers for each pair, `[batch or 1, 1 or head, query, key]`, for masks that row and flag cannot express.
        heads: number of heads of `full`; 0 where there is none.
    """

    row: ir.Value | None = None
    causal: bool = False
    full: ir.Value | None = None
    heads: int = 0


class NativeMaskReader:
    """Reads the native masks of one graph. Each tensor is evaluated once, and each row is computed once.

    Args:
        model: the graph; nodes are added where a mask is read.
        longest: number of positions for which the meaning of a mask must hold.
    """

    def __init__(self, model: ir.Model, longest: int, probe: Probe) -> None:
        self._model, self._longest, self._probe = model, longest, probe
        self._meanings: dict[ir.Value, MaskMeaning | None] = {}
        self._rows: dict[ir.Value, ir.Value] = {}

    def read(self, addends: list[ir.Value], before: ir.Node, *, allow_causal: bool) -> NativeMask:
        """The native mask of one site.

        Args:
            addends: numbers to add to the scores, or booleans that are True where a pair is allowed; each broadcasts to
                `[batch, head, query, key]`.
            before: the attention; new nodes are inserted before it.
            allow_causal: whether causality may be expressed by the flag.
        """
        padding: ir.Value | None = None
        causal, pairs = False, []
        for value in addends:
            meaning = self._meaning(value)
            if meaning is None or (meaning.causal and not allow_causal):
                pairs.append(value)
            elif meaning.padding is not None and padding not in (None, meaning.padding):
                pairs.append(value)  # only one padding mask fits into the row
            else:
                padding, causal = meaning.padding or padding, causal or meaning.causal
        full, heads = self._sum(pairs, before)
        return NativeMask(None if padding is None else self._row(padding), causal, full, heads)

    def _meaning(self, value: ir.Value) -> MaskMeaning | None:
        if value not in self._meanings:
            self._meanings[value] = mask_meaning(self._model, value, self._longest)
        return self._meanings[value]

    def _sum(self, addends: list[ir.Value], before: ir.Node) -> tuple[ir.Value | None, int]:
        """The sum of some masks, and its number of heads; None and 0 if there are none."""
        if not addends:
            return None, 0
        op = Tape()
        numbers = [_as_numbers(value, op) for value in addends]
        total = functools.reduce(lambda total, addend: op("Add", total, addend), numbers)
        op.insert_before(before)
        shapes = [self._probe.shape(value) or () for value in addends]
        return total, max(shape[1] if len(shape) == 4 else 1 for shape in shapes)

    def _row(self, padding: ir.Value) -> ir.Value:
        """Numbers for each key, zero where a padding mask keeps it, computed once from the graph's input."""
        if padding not in self._rows:
            op = Tape()
            allowed = op("Cast", padding, to=ir.DataType.BOOL)
            allowed.dtype = ir.DataType.BOOL
            self._rows[padding] = op("Unsqueeze", _as_numbers(allowed, op), op.ints([1, 2]))
            op.insert_before(self._model.graph[0])
        return self._rows[padding]


def _as_numbers(value: ir.Value, op: Tape) -> ir.Value:
    """A mask as numbers to add, converted from a boolean one."""
    if value.dtype != ir.DataType.BOOL:
        return value
    zero, lowest = (op("Constant", value=ir.tensor(np.float32(n))) for n in (0.0, np.finfo(np.float32).min))
    return op("Where", value, zero, lowest)
