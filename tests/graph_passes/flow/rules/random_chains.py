"""Random chains of operators from a weight to a gate and on to the output projection, as exporters might write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

Draw = Callable[[int, int], int]
"""Returns a number between two bounds, both included."""

WIDTH = 5
"""Width of the graph's input and output `[B, S, WIDTH]`."""
FREE = frozenset("BST")
"""Labels whose sizes depend on the input."""


class Chain:
    """A graph that grows by one operator at a time.

    Args:
        heads: number of heads.
        width: width of one head.
        draw: the source of random numbers.

    Attributes:
        value: the last tensor.
        axes: the labels that each of its axes merges, the slowest first: B, S and T are free, H are heads, D is their
            width, 1 is an axis of one element. T are the keys of the queries S, as many as there are of these.
        sizes: number of elements of H and D.
    """

    def __init__(self, heads: int, width: int, draw: Draw) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw(0, 1000))
        self.sizes = {"H": heads, "D": width, "1": 1}
        self.input = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["B", "S", WIDTH]))
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.value = self.op("MatMul", self.input, self.weight("W", WIDTH, heads * width))
        self.axes: list[tuple[str, ...]] = [("B",), ("S",), ("H", "D")]

    def constant(self, name: str, content: np.ndarray) -> ir.Value:
        tensor = ir.Tensor(content, name=name)
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        self.initializers.append(value)
        return value

    def weight(self, name: str, *shape: int) -> ir.Value:
        return self.constant(name, self.rng.normal(size=shape).astype(np.float32))

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(f"c{len(self.initializers)}", np.array(numbers, np.int64))

    def op(self, kind: str, *inputs: ir.Value, outputs: int = 1, **attributes: object) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes, num_outputs=outputs)  # type: ignore[arg-type]
        self.nodes.append(node)
        return node.outputs[0]

    def size(self, axis: int) -> int | None:
        """Number of elements of an axis; None if it depends on the input."""
        labels = self.axes[axis]
        return None if FREE & set(labels) else math.prod(self.sizes[label] for label in labels)

    def along(self, axis: int) -> ir.Value:
        """A weight that varies only along one axis."""
        size = self.size(axis) or 1
        shape = [size if index == axis else 1 for index in range(len(self.axes))]
        lead = self.draw(0, axis)
        return self.weight(f"w{len(self.initializers)}", *shape[lead:])

    def reshape(self, axes: Sequence[tuple[str, ...]]) -> None:
        free = [axis for axis in axes if FREE & set(axis)]
        if len(free) <= 1 and self.draw(0, 1):
            numbers = [-1 if axis in free else math.prod(self.sizes[label] for label in axis) for axis in axes]
            target = self.ints(*numbers)
        else:
            shape, parts = self.op("Shape", self.input), []
            inferred = self.draw(-1, len(axes) - 1)
            copies = self.draw(0, 1)
            for position, axis in enumerate(axes):
                if position == inferred:
                    parts.append(self.ints(-1))
                    continue
                if copies and position < len(self.axes) and _sizes(axis) == _sizes(self.axes[position]):
                    parts.append(self.ints(0))
                    continue
                part = self.ints(math.prod(self.sizes[label] for label in axis if label not in FREE))
                for label in axis:
                    if label in FREE:
                        size = self.op("Gather", shape, self.ints(int(label != "B")), axis=0)
                        part = self.op("Mul", size, part)
                parts.append(part)
            target = self.op("Concat", *parts, axis=0)
        self.value, self.axes = self.op("Reshape", self.value, target), list(axes)

    def split_axis(self) -> None:
        long = [index for index, labels in enumerate(self.axes) if len(labels) > 1]
        if long:
            index = long[self.draw(0, len(long) - 1)]
            cut = self.draw(1, len(self.axes[index]) - 1)
            self.reshape([*self.axes[:index], self.axes[index][:cut], self.axes[index][cut:], *self.axes[index + 1 :]])

    def merge_axes(self) -> None:
        if len(self.axes) == 1:
            return
        index = self.draw(0, len(self.axes) - 2)
        self.reshape([*self.axes[:index], self.axes[index] + self.axes[index + 1], *self.axes[index + 2 :]])

    def transpose(self) -> None:
        axes, order = list(range(len(self.axes))), []
        while axes:
            order.append(axes.pop(self.draw(0, len(axes) - 1)))
        self.permute(order)

    def permute(self, order: Sequence[int]) -> None:
        self.value = self.op("Transpose", self.value, perm=list(order))
        self.axes = [self.axes[index] for index in order]

    def unsqueeze(self) -> None:
        index = self.draw(0, len(self.axes))
        self.value = self.op("Unsqueeze", self.value, self.ints(index))
        self.axes.insert(index, ("1",))

    def squeeze(self) -> None:
        ones = [index for index, labels in enumerate(self.axes) if labels == ("1",)]
        if ones:
            self.value = self.op("Squeeze", self.value, self.ints(ones[0]))
            del self.axes[ones[0]]

    def fixed_axis(self) -> int:
        fixed = [index for index in range(len(self.axes)) if self.size(index) is not None]
        return fixed[self.draw(0, len(fixed) - 1)] if fixed else -1

    def reorder(self) -> None:
        """Gather all indices of an axis in another order."""
        index = self.fixed_axis()
        if index >= 0:
            order = self.rng.permutation(self.size(index) or 1)
            self.value = self.op("Gather", self.value, self.ints(*order.tolist()), axis=index)

    def reverse(self) -> None:
        index = self.fixed_axis()
        if index >= 0:
            bounds = (self.ints(-1), self.ints(-(2**62)), self.ints(index), self.ints(-1))
            self.value = self.op("Slice", self.value, *bounds)

    def rotate(self) -> None:
        """Split an axis in two, negate the second part, and join the parts in reverse order."""
        index = self.fixed_axis()
        size = (self.size(index) or 1) if index >= 0 else 1
        if size > 1:
            cut = self.draw(1, size - 1)
            low = self.op("Split", self.value, self.ints(cut, size - cut), outputs=2, axis=index)
            high = self.nodes[-1].outputs[1]
            self.value = self.op("Concat", self.op("Neg", high), low, axis=index)

    def scale(self) -> None:
        index = self.fixed_axis()
        if index >= 0:
            self.value = self.op("Mul", self.value, self.along(index))

    def shift(self) -> None:
        index = self.fixed_axis()
        if index >= 0:
            self.value = self.op("Tanh", self.op("Add", self.along(index), self.value))

    def take(self) -> None:
        """Slice the heads if they have their own axis, so that some are not used."""
        separate = [index for index, labels in enumerate(self.axes) if labels == ("H",)]
        if separate and self.sizes["H"] > 2:
            start = self.draw(0, 1)
            end = self.sizes["H"] - self.draw(0, 1)
            self.value = self.op("Slice", self.value, self.ints(start), self.ints(end), self.ints(separate[0]))
            self.sizes["H"] = end - start

    LINEAR_MOVES = (split_axis, merge_axes, transpose, unsqueeze, squeeze, reorder, reverse, rotate, scale)
    """Operators that leave heads at zero if they are zero."""
    NONLINEAR_MOVES = (shift, take)

    def move(self, linear: bool) -> None:
        moves = self.LINEAR_MOVES if linear else self.LINEAR_MOVES + self.NONLINEAR_MOVES
        moves[self.draw(0, len(moves) - 1)](self)

    def unfold(self, *order: str) -> None:
        """Give every label its own axis, in an order, without axes of one element."""
        labels = [label for axis in self.axes for label in axis]
        self.reshape([(label,) for label in labels if label != "1"])
        self.permute([self.axes.index((label,)) for label in order])

    def attend(self, moves: int) -> None:
        """Attend from each position to all; the map of queries and keys goes through some moves."""
        self.unfold("B", "H", "S", "D")
        values = self.value
        scores = self.op("MatMul", values, self.op("Transpose", values, perm=[0, 1, 3, 2]))
        self.value, self.axes = self.op("Softmax", scores, axis=-1), [("B",), ("H",), ("S",), ("T",)]
        for _ in range(moves):
            self.move(linear=True)
        self.unfold("B", "H", "S", "T")
        self.value = self.op("MatMul", self.value, values)
        self.axes = [("B",), ("H",), ("S",), ("D",)]

    def read(self, positions: Sequence[int]) -> None:
        """Let the graph return some positions of its output alone."""
        self.value = self.op("Gather", self.value, self.ints(*positions), axis=1)

    def gate(self, name: str) -> None:
        """Multiply the heads by ones if they have their own axis."""
        if ("H",) not in self.axes:
            labels = [label for axis in self.axes for label in axis]
            self.reshape([(label,) for label in labels])
        index = self.axes.index(("H",))
        ones = np.ones([self.sizes["H"], *(1,) * (len(self.axes) - 1 - index)], np.float32)
        self.value = self.op("Mul", self.value, self.constant(name, ones))

    def project(self) -> None:
        """Sum over heads and width."""
        end = self.draw(0, 2)
        if end == 2:
            self.unfold("B", "S", "H", "D")
            weight = self.weight("O", self.sizes["H"], self.sizes["D"], WIDTH)
            self.value = self.op("Einsum", self.value, weight, equation="bshd,hde->bse")
            return
        order = ("H", "D") if end else ("D", "H")
        self.unfold("B", "S", *order)
        self.reshape([("B",), ("S",), order])
        self.value = self.op("MatMul", self.value, self.weight("O", self.sizes["H"] * self.sizes["D"], WIDTH))

    def model(self) -> ir.Model:
        self.value.name = "y"
        read = self.value.producer()
        positions = read.inputs[1] if read is not None and read.op_type == "Gather" else None
        length = "S" if positions is None or positions.shape is None else positions.shape[0]
        self.value.shape, self.value.type = ir.Shape(["B", length, WIDTH]), ir.TensorType(ir.DataType.FLOAT)
        graph = ir.Graph(
            [self.input],
            [self.value],
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": 18},
            name="chain",
        )
        return ir.Model(graph, ir_version=10)


def _sizes(labels: Sequence[str]) -> list[str]:
    """The labels of an axis, of which those of queries and keys have one size."""
    return sorted("S" if label == "T" else label for label in labels if label != "1")
