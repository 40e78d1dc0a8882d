"""Write the shape inputs of `Reshape`, `Expand` and `ConstantOfShape` as constants where the graph allows it.

Exporters compute them with dozens of nodes, although nearly all of these only copy sizes of the input.

In a `Reshape`, 0 copies the input's size of the same axis and -1 is inferred; in an `Expand`, 1 keeps the input's size.
An axis of the input that holds less than before is not copied: it has another size now, and only its position or its
former size in common with the output's axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Shapes
from graph_passes.flow.indices import Index, Need, is_partial, same_index
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import NoRuleError, RuleContext
from graph_passes.flow.sizes import is_selection
from graph_passes.tape import Tape


class _Statement(NamedTuple):
    """The shape input that gives a node's output its sizes.

    Attributes:
        numbers: a number for each axis; None: the size is computed.
        copied: axes whose computed size is not in the present shape input -> an axis of the source that has it.
        shares: axes that heads share with the batch -> the share of the size in the present shape input that remains. A
            `Reshape` infers such a size instead.
    """

    numbers: list[int | None]
    copied: Mapping[int, int]
    shares: Mapping[int, Fraction]


class ShapeInput:
    """The shape input that makes the output of a node hold `need`.

    Args:
        node: a `Reshape` or `Expand` of its first input, the source, or a `ConstantOfShape`.
        need: what the output will hold; empty: everything. If nothing is cut, the shape input changes only if it
            becomes a constant.
        held: what the source will hold; empty: everything.
    """

    def __init__(self, node: ir.Node, need: Need, held: Need, context: RuleContext) -> None:
        self._node, self._need, self._held = node, need, held
        self._probe, self._counts = context.probe, context.counts_positions
        self._source, self._position = (None, 0) if node.op_type == "ConstantOfShape" else (node.inputs[0], 1)
        self._cuts = is_partial(need) or is_partial(held)

    def check(self) -> None:
        """Check that `write` can state what the output will hold.

        Raises:
            NoRuleError: no shape input can state it.
        """
        if self._cuts and self._statement() is None:
            raise NoRuleError(RefusalCode.UNKNOWN_SHAPE, "has a shape input that cannot be stated for fewer heads")

    def write(self) -> bool:
        """Give the node the shape input; returns whether the graph changed."""
        statement = self._statement()
        if statement is None or (None in statement.numbers and not self._cuts):
            return False
        node = self._node
        numbers = [None if axis in statement.shares else number for axis, number in enumerate(statement.numbers)]
        if 0 in numbers or "allowzero" in node.attributes:
            node.attributes.pop("allowzero", None)
        shape_input = node.inputs[self._position]
        constant = shape_input.const_value if shape_input is not None else None
        if (
            None not in numbers
            and constant is not None
            and np.array_equal(constant.numpy(), np.array(numbers, np.int64))
        ):
            return False
        op = Tape()
        if None not in numbers:
            shape = op.ints(numbers)
        else:
            left_out = (
                len(numbers) - (self._probe.shape(shape_input) or (len(numbers),))[0]
            )  # first ones of an `Expand`
            parts = []
            for axis, number in enumerate(numbers):
                if axis in statement.copied:
                    parts.append(op.size(self._source, statement.copied[axis]))
                elif number is not None:
                    parts.append(op("Constant", value_ints=[number]))
                else:
                    part = op("Gather", shape_input, op("Constant", value_ints=[axis - left_out]), axis=0)
                    if (share := statement.shares.get(axis)) is not None:  # a whole number
                        part = op("Mul", part, op.ints([share.numerator]))
                        part = op("Div", part, op.ints([share.denominator]))
                    parts.append(part)
            shape = op("Concat", *parts, axis=0)
        op.insert_before(node)
        node.replace_input_with(self._position, shape)
        return True

    def _statement(self) -> _Statement | None:
        """The sizes to state, or None where no shape input can state those of the output."""
        numbers = self._numbers()
        if numbers is None:
            return None
        copied, shares = self._copied_sizes(numbers), self._proportional_sizes(numbers)
        axes = {axis: index for axis, index in copied.items() if index is not None}
        inferred = numbers.count(-1) - len(shares)
        is_writable = inferred <= (self._node.op_type == "Reshape") and len(axes) == len(copied)
        return _Statement(numbers, axes, shares) if is_writable else None

    def _numbers(self) -> list[int | None] | None:
        """A number for each axis of a shape input, None for a computed size.

        Returns:
            The numbers, or None where the output's shape is unknown or has an axis without elements: a `Reshape` cannot
            state it, and it may have elements at other sizes of the inputs than those of the probe.
        """
        op_type, held = self._node.op_type, self._held
        first, second = self._probe.shapes(self._node.outputs[0])
        if first is None or second is None or 0 in first:
            return None
        before, after = self._probe.shapes(self._source), (first, second)
        added = len(first) - len(held)
        numbers: list[int | None] = []
        for axis, size in enumerate(first):
            index = _index(self._need, axis)
            if size == second[axis] or (self._counts and index is not None):
                numbers.append(size if index is None else len(index))
            elif op_type == "Expand" and same_size(before, after, axis, axis - len(first)):
                numbers.append(1 if same_index(_index(held, axis - added), index) else None)
            elif index is not None:
                numbers.append(-1)  # heads share this axis with the batch, so its size is inferred
            elif op_type == "Reshape" and same_size(before, after, axis, axis) and _index(held, axis) is None:
                numbers.append(0)
            else:
                numbers.append(None)
        if op_type == "Reshape" and numbers.count(None) == 1 and -1 not in numbers:
            numbers[numbers.index(None)] = -1
        if -1 in numbers and any(
            n == 0 and is_selection(*pair) for n, *pair in zip(numbers, first, second, strict=True)
        ):
            return None  # beside an axis without elements, which a selection may be, no size can be inferred
        return numbers

    def _copied_sizes(self, numbers: list[int | None]) -> dict[int, int | None]:
        """Axes whose computed size cannot be taken from the present shape input, and axes of the source that have it.

        That is so where it leaves the size to be inferred, and the size of another axis has to be inferred now; and
        where it copies the size of an axis of the source that holds less than before.
        """
        if self._source is None or None not in numbers:
            return {}
        contents = self._probe.contents(self._node.inputs[1])[0]
        if contents is None:
            return {}
        before, after = self._probe.shapes(self._source), self._probe.shapes(self._node.outputs[0])
        whole = [axis for axis in range(len(before[0] or ())) if _index(self._held, axis) is None]
        return {
            axis: next((index for index in whole if same_size(before, after, axis, index)), None)
            for axis, number in enumerate(numbers)
            if number is None and self._is_unstated(contents, axis, numbers)
        }

    def _is_unstated(self, contents: np.ndarray, axis: int, numbers: list[int | None]) -> bool:
        """Whether the present shape input refers to the source for a size that it has to state."""
        if self._node.op_type == "Expand":  # it may leave out the first axes, and 1 keeps the size of the source
            number = contents[axis - len(numbers)] if axis - len(numbers) >= -len(contents) else 1
            return bool(number == 1)
        return bool(contents[axis] == 0 or (contents[axis] == -1 and -1 in numbers))

    def _proportional_sizes(self, numbers: list[int | None]) -> dict[int, Fraction]:
        """See `_Statement.shares`."""
        contents = self._probe.contents(self._node.inputs[self._position])
        walks = list(zip(contents, self._probe.shapes(self._node.outputs[0]), strict=True))
        shares: dict[int, Fraction] = {}
        for axis, number in enumerate(numbers):
            index = _index(self._need, axis)
            if self._node.op_type == "Reshape" or number != -1 or index is None:
                continue
            # The shape input of an `Expand` may leave out the first axes.
            pairs = [(sizes, after) for sizes, after in walks if sizes is not None and after is not None]
            stated = [after[axis] for sizes, after in pairs if len(sizes) == len(after) and sizes[axis] == after[axis]]
            share = Fraction(len(index), stated[0]) if len(stated) == len(walks) else None
            if share is not None and all((share * size).denominator == 1 for size in stated):
                shares[axis] = share
        return shares


def _index(need: Need, axis: int) -> Index:
    """What a tensor will hold of an axis; everything where it lacks the axis, or nothing is cut."""
    return need[axis] if 0 <= axis < len(need) else None


def same_size(before: Shapes, after: Shapes, axis: int, source_axis: int) -> bool:
    """Whether the input has, on an axis, the output's size on another one; false where the input lacks the axis."""
    return all(
        b is not None and a is not None and -len(b) <= source_axis < len(b) and b[source_axis] == a[axis]
        for b, a in zip(before, after, strict=True)
    )
