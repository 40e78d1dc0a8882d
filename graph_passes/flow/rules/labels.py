"""One rule for every operator that treats whole axes alike: elementwise, transposing, reducing, multiplying matrices.

Such an operator is described, like an `einsum`, by a label for each axis of each input and output. An index that an
output needs on a labelled axis is the index that the inputs need on the axes of that label. Labels that only inputs
have are summed over (indices at which one factor is zero are not needed) or mixed (all of them are needed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.indices import Index, Need, simplify, union
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, Gain, NoRuleError, Rule, RuleContext, SummedGain

AxisLabels = tuple[Hashable | None, ...]
"""The label of each axis of a tensor; None: the axis is broadcast, or new."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of one node.

    Attributes:
        inputs: labels of each input; None for an absent input, and for an input without data (a shape, a list of axes).
        outputs: labels of each output.
        linear: positions of the inputs that are factors of the outputs: the output is zero at every index at which such
            an input is zero.
        summed: labels over which products are summed.
        mixed: labels along which every output index depends on every input index.
        added: positions of the inputs that are added to the products, and that a gain of a factor does not multiply.
    """

    inputs: tuple[AxisLabels | None, ...]
    outputs: tuple[AxisLabels, ...]
    linear: frozenset[int] = frozenset()
    summed: frozenset[Hashable] = frozenset()
    mixed: frozenset[Hashable] = frozenset()
    added: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class LabelRule(Rule):
    """The rule of an operator whose axes `describe` labels."""

    describe: Callable[[ir.Node, RuleContext], Labels]
    is_norm: bool = False

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        labels = self.describe(node, context)
        needed: dict[Hashable, Index] = {}
        for value, axes, need in zip(node.outputs, labels.outputs, outputs, strict=False):
            if not value.uses() and not value.is_graph_output():
                continue
            for label, index in zip(axes, need, strict=True):
                if label is not None:
                    needed[label] = union(needed[label], index) if label in needed else index
        for label, gain in context.sums.get(node, {}).items():
            if not gain.factors.all():
                needed[label] = simplify(np.flatnonzero(gain.factors), len(gain.factors))
        if any(needed.get(label) is not None for label in labels.mixed):
            raise _mixes_heads()
        inputs = tuple(
            None if axes is None else tuple(needed.get(label) if label is not None else None for label in axes)
            for axes in labels.inputs
        )
        held = tuple(tuple(needed.get(label) for label in axes) for axes in labels.outputs)
        return Demand(inputs, held)

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        labels = self.describe(node, context)
        factors: dict[Hashable, np.ndarray] = {}
        sites: frozenset[str] = frozenset()
        for position, gain in enumerate(gains):
            axes = labels.inputs[position] if position < len(labels.inputs) else None
            if gain is None or axes is None:
                continue
            sites |= gain.sites
            if position not in labels.linear:
                raise NoRuleError(RefusalCode.NOT_LINEAR, "is not a product with the gated tensor")
            for label, array in zip(axes, gain.axes, strict=True):
                if array is None:
                    continue
                if label is None or label in labels.mixed:
                    raise _mixes_heads()
                factors[label] = factors[label] * array if label in factors else array
        for label in labels.summed & factors.keys():
            summed_axes = tuple(axes.index(label) if axes and label in axes else None for axes in labels.inputs)
            context.sums.setdefault(node, {})[label] = SummedGain(factors[label], sites, summed_axes)
        results: list[Gain | None] = []
        for axes in labels.outputs:
            arrays = tuple(factors.get(label) if label not in labels.summed else None for label in axes)
            results.append(Gain(arrays, sites) if any(array is not None for array in arrays) else None)
        if labels.added and any(results):
            raise NoRuleError(RefusalCode.NOT_LINEAR, "adds a bias to the gated tensor")
        return results

    def mixes(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> bool:
        labels = self.describe(node, context)
        axes = labels.inputs[position]
        return axes is not None and axes[axis] in labels.mixed


def _mixes_heads() -> NoRuleError:
    return NoRuleError(RefusalCode.MIXES_HEADS, "computes each output from all of the units")


def broadcast(
    node: ir.Node, context: RuleContext, positions: Sequence[int]
) -> tuple[list[AxisLabels | None], AxisLabels]:
    """Labels of operands that are broadcast against each other.

    Axes are labelled by their position from the last one: -1, -2, ...

    Args:
        node: the node; its first output has the broadcast shape.
        positions: the inputs that are operands.

    Returns:
        The labels of each input (None for an input that is absent or not an operand), and those of the output.
    """
    output = node.outputs[0]
    inputs: list[AxisLabels | None] = []
    for position, value in enumerate(node.inputs):
        if value is None or position not in positions:
            inputs.append(None)
            continue
        from_last = range(-len(context.shape(value)), 0)
        inputs.append(
            tuple(None if context.is_broadcast(value, label, output, label) else label for label in from_last)
        )
    return inputs, tuple(range(-len(context.shape(output)), 0))
