"""Write the shape inputs of `Reshape`, `Expand` and `ConstantOfShape` as constants where the graph allows it.

Exporters compute them with dozens of nodes, although nearly all of these only copy sizes of the input.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe, Shapes
from graph_passes.flow.edit import ints
from graph_passes.flow.indices import Index, Need, all_indices, is_partial, same_index
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import NoRuleError
from graph_passes.flow.sizes import is_selection


def plain_shape(
    node: ir.Node, source: ir.Value | None, need: Need, probe: Probe, *, held: Need = (), count: bool = False
) -> list[int | None] | None:
    """The shape input that gives a node's output the sizes of `need`: a number for each axis, None for a computed size.

    In a `Reshape`, 0 copies the input's size of the same axis and -1 is inferred; in an `Expand`, 1 keeps the input's
    size. An axis of the input that holds less than before is not copied: it has another size now, and only its position
    or its former size in common with the output's axis.

    Args:
        node: the node that reads the shape input.
        source: the tensor that the node reshapes or expands, or None.
        need: what the output will hold.
        probe: the graph's shapes.
        held: what the source will hold; empty: everything.
        count: whether the number of needed indices is the size of an axis that depends on the graph's inputs.

    Returns:
        The numbers, or None where the output's shape is unknown or has an axis without elements: a `Reshape` cannot
        state it, and it may have elements at other sizes of the inputs than those of the probe.
    """
    first, second = probe.shapes(node.outputs[0])
    if first is None or second is None or 0 in first:
        return None
    before = probe.shapes(source) if source is not None else (None, None)
    added = len(first) - len(held)
    numbers: list[int | None] = []
    for axis, size in enumerate(first):
        index = need[axis]
        if size == second[axis] or (count and index is not None):
            numbers.append(size if index is None else len(index))
        elif node.op_type == "Expand" and _same_size_from_last(before, (first, second), axis):
            numbers.append(1 if same_index(_held(held, axis - added), index) else None)
        elif index is not None:
            numbers.append(-1)  # heads share this axis with the batch, so its size is inferred
        elif node.op_type == "Reshape" and same_size(before, (first, second), axis) and _held(held, axis) is None:
            numbers.append(0)
        else:
            numbers.append(None)
    if node.op_type == "Reshape" and numbers.count(None) == 1 and -1 not in numbers:
        numbers[numbers.index(None)] = -1
    if -1 in numbers and any(n == 0 and is_selection(*pair) for n, *pair in zip(numbers, first, second, strict=True)):
        return None  # beside an axis without elements, which a selection may be, no size can be inferred
    return numbers


def _held(held: Need, axis: int) -> Index:
    """What an axis of the source will hold."""
    return held[axis] if 0 <= axis < len(held) else None


def same_size(before: Shapes, after: Shapes, axis: int) -> bool:
    """Whether the input has the output's size on the same axis, counted from the first one."""
    pairs = zip(before, after, strict=True)
    return all(b is not None and a is not None and axis < len(b) and b[axis] == a[axis] for b, a in pairs)


def _same_size_from_last(before: Shapes, after: Shapes, axis: int) -> bool:
    """Whether the input has the output's size on the same axis, counted from the last one."""
    return all(
        b is not None and a is not None and axis - len(a) >= -len(b) and b[axis - len(a)] == a[axis]
        for b, a in zip(before, after, strict=True)
    )


def _copied_sizes(
    node: ir.Node, source: ir.Value | None, numbers: list[int | None], probe: Probe, held: Need
) -> dict[int, int | None]:
    """Axes whose computed size cannot be taken from the present shape input.

    That is so where it leaves the size to be inferred, and the size of another axis has to be inferred now; and where
    it copies the size of an axis of the source that holds less than before.

    Returns:
        Axis -> an axis of the source that has its size and holds everything; None: there is none.
    """
    if source is None or None not in numbers:
        return {}
    contents = probe.contents(node.inputs[1])[0]
    if contents is None:
        return {}
    before, after = probe.shapes(source), probe.shapes(node.outputs[0])
    whole = [axis for axis in range(len(before[0] or ())) if _held(held, axis) is None]
    axes: dict[int, int | None] = {}
    for axis, number in enumerate(numbers):
        if number is None and _is_unstated(node, contents, axis, numbers):
            axes[axis] = next((index for index in whole if _has_size_of(before, index, after, axis)), None)
    return axes


def _is_unstated(node: ir.Node, contents: np.ndarray, axis: int, numbers: list[int | None]) -> bool:
    """Whether the present shape input refers to the source for a size that it has to state."""
    if node.op_type == "Expand":  # it may leave out the first axes, and 1 keeps the size of the source
        number = contents[axis - len(numbers)] if axis - len(numbers) >= -len(contents) else 1
        return bool(number == 1)
    return bool(contents[axis] == 0 or (contents[axis] == -1 and -1 in numbers))


def _has_size_of(before: Shapes, index: int, after: Shapes, axis: int) -> bool:
    return all(b is not None and a is not None and b[index] == a[axis] for b, a in zip(before, after, strict=True))


def _proportional_sizes(node: ir.Node, need: Need, numbers: list[int | None], probe: Probe) -> dict[int, Fraction]:
    """Axes that heads share with the batch, whose present size in the shape input shrinks as the heads do.

    A `Reshape` infers such a size instead.

    Returns:
        Axis -> the share of its indices that remains.
    """
    position = 0 if node.op_type == "ConstantOfShape" else 1
    walks = list(zip(probe.contents(node.inputs[position]), probe.shapes(node.outputs[0]), strict=True))
    shares: dict[int, Fraction] = {}
    for axis, (number, index) in enumerate(zip(numbers, need, strict=True)):
        if node.op_type == "Reshape" or number != -1 or index is None:
            continue
        # The shape input of an `Expand` may leave out the first axes.
        pairs = [(sizes, after) for sizes, after in walks if sizes is not None and after is not None]
        stated = [after[axis] for sizes, after in pairs if len(sizes) == len(after) and sizes[axis] == after[axis]]
        share = Fraction(len(index), stated[0]) if len(stated) == len(walks) else None
        if share is not None and all((share * size).denominator == 1 for size in stated):
            shares[axis] = share
    return shares


def _is_writable(
    node: ir.Node, numbers: list[int | None], copied: Mapping[int, int | None], shares: Mapping[int, Fraction]
) -> bool:
    inferred = numbers.count(-1) - len(shares)
    return inferred <= (1 if node.op_type == "Reshape" else 0) and None not in copied.values()


def check_shape_input(
    node: ir.Node, source: ir.Value | None, need: Need, probe: Probe, *, held: Need = (), count: bool = False
) -> None:
    """Check that `set_shape_input` can state what a node's output will hold.

    Args:
        node: the node that reads the shape input.
        source: the tensor that the node reshapes or expands, or None.
        need: what the output will hold.
        probe: the graph's shapes.
        held: see `plain_shape`.
        count: see `plain_shape`.

    Raises:
        NoRuleError: no shape input can state it.
    """
    numbers = plain_shape(node, source, need, probe, held=held, count=count)
    is_written = numbers is not None and _is_writable(
        node,
        numbers,
        _copied_sizes(node, source, numbers, probe, held),
        _proportional_sizes(node, need, numbers, probe),
    )
    if (is_partial(need) or is_partial(held)) and not is_written:
        raise NoRuleError(RefusalCode.UNKNOWN_SHAPE, "has a shape input that cannot be stated for fewer heads")


def set_shape_input(
    node: ir.Node, source: ir.Value | None, need: Need | None, probe: Probe, *, held: Need = (), count: bool = False
) -> bool:
    """Give a node the shape input that makes its output hold `need`.

    Args:
        node: the node that reads the shape input.
        source: the tensor that the node reshapes or expands, or None.
        need: what the output will hold; None: everything. Then the shape input changes only if it becomes a constant.
        probe: the graph's shapes.
        held: see `plain_shape`.
        count: see `plain_shape`.

    Returns:
        Whether the graph changed.
    """
    if need is None:
        need = all_indices(len(probe.shape(node.outputs[0]) or ()))
    is_cut = is_partial(need) or is_partial(held)
    numbers = plain_shape(node, source, need, probe, held=held, count=count)
    if numbers is None:
        return False
    copied = _copied_sizes(node, source, numbers, probe, held)
    shares = _proportional_sizes(node, need, numbers, probe)
    if not _is_writable(node, numbers, copied, shares) or (None in numbers and not is_cut):
        return False
    numbers = [None if axis in shares else number for axis, number in enumerate(numbers)]
    if 0 in numbers or "allowzero" in node.attributes:
        node.attributes.pop("allowzero", None)
    position = 0 if node.op_type == "ConstantOfShape" else 1
    shape_input = node.inputs[position]
    constant = shape_input.const_value if shape_input is not None else None
    if None not in numbers and constant is not None and np.array_equal(constant.numpy(), np.array(numbers, np.int64)):
        return False
    sizes = {axis: (source, index) for axis, index in copied.items() if index is not None}
    left_out = len(numbers) - (probe.shape(shape_input) or (len(numbers),))[0]  # the first axes of an `Expand`
    nodes = _shape_nodes(shape_input, left_out, numbers, sizes, shares)
    assert node.graph is not None
    node.graph.insert_before(node, nodes)
    node.replace_input_with(position, nodes[-1].outputs[0])
    return True


def _shape_nodes(
    shape_input: ir.Value | None,
    left_out: int,
    numbers: list[int | None],
    sizes: Mapping[int, tuple[ir.Value | None, int]],
    shares: Mapping[int, Fraction],
) -> list[ir.Node]:
    """Nodes that compute a shape, which the last one returns.

    Args:
        shape_input: the present shape input, from which computed sizes are taken.
        left_out: number of first axes that the present shape input does not state.
        numbers: the sizes; None: computed.
        sizes: axes that have the size of an axis of a tensor.
        shares: axes that have this share of the size in the present shape input.
    """
    if None not in numbers:
        return [ints(np.array(numbers, np.int64))]
    parts: list[list[ir.Node]] = []
    for axis, number in enumerate(numbers):
        if axis in sizes:
            parts.append(_size_nodes(*sizes[axis]))
        elif number is None:
            parts.append(_element_nodes(shape_input, axis - left_out, shares.get(axis)))
        else:
            parts.append([ir.node("Constant", [], {"value_ints": [number]})])
    joined = ir.node("Concat", [nodes[-1].outputs[0] for nodes in parts], {"axis": 0})
    return [*itertools.chain(*parts), joined]


def _size_nodes(tensor: ir.Value | None, axis: int) -> list[ir.Node]:
    """Nodes that compute the size of an axis of a tensor."""
    shape, index = ir.node("Shape", [tensor]), ints([axis])
    return [shape, index, ir.node("Gather", [shape.outputs[0], index.outputs[0]], {"axis": 0})]


def _element_nodes(shape_input: ir.Value | None, axis: int, share: Fraction | None) -> list[ir.Node]:
    """Nodes that compute an element of a shape, or a share of it, which is a whole number."""
    index = ir.node("Constant", [], {"value_ints": [axis]})
    nodes = [index, ir.node("Gather", [shape_input, index.outputs[0]], {"axis": 0})]
    if share is not None:
        for op_type, factor in (("Mul", share.numerator), ("Div", share.denominator)):
            constant = ints([factor])
            nodes += [constant, ir.node(op_type, [nodes[-1].outputs[0], constant.outputs[0]])]
    return nodes
