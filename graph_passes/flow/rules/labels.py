"""One rule for every operator that treats whole axes alike: elementwise, transposing, reducing, multiplying matrices.

Such an operator is described, like an `einsum`, by a label for each axis of each input and output. An index that an
output needs on a labelled axis is the index that the inputs need on theirs. Labels that stand only in inputs are
summed over (indices at which one factor is zero are not needed) or mixed (all of them are needed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.axis_flow import Demand, Flow, Gain, Index, Need, NoRuleError, SummedGain, simplify, union, whole

AxisLabels = tuple[Hashable | None, ...]


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of one node.

    Attributes:
        inputs: labels of each input; None for an input whose content is not data of that kind (a shape, an axis list)
            or that is absent. A label of None marks an axis that is broadcast.
        outputs: labels of each output.
        linear: inputs by which the outputs are multiplied: if one of their indices is zero, so is the output's.
        summed: labels over which products are summed.
        mixed: labels along which every output depends on every input index.
    """

    inputs: tuple[AxisLabels | None, ...]
    outputs: tuple[AxisLabels, ...]
    linear: frozenset[int] = frozenset()
    summed: frozenset[Hashable] = frozenset()
    mixed: frozenset[Hashable] = frozenset()


@dataclasses.dataclass(frozen=True)
class LabelRule:
    """The rule of an operator whose axes `describe` can label."""

    describe: Callable[[ir.Node, Flow], Labels]
    selective: bool = False

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        labels = self.describe(node, flow)
        asked: dict[Hashable, Index] = {}
        for axes, need in zip(labels.outputs, outputs, strict=False):
            # An optional output that nobody reads has no shape.
            for label, index in zip(axes, need or whole(len(axes)), strict=True):
                if label is not None:
                    asked[label] = union(asked[label], index) if label in asked else index
        for label, gain in flow.sums.get(node, {}).items():
            if not gain.factors.all():
                asked[label] = simplify(np.flatnonzero(gain.factors), len(gain.factors))
        for label in labels.mixed:
            if asked.get(label) is not None:
                raise NoRuleError("mixes the heads' axis")
        inputs = tuple(
            None if axes is None else tuple(asked.get(label) if label is not None else None for label in axes)
            for axes in labels.inputs
        )
        held = tuple(tuple(asked.get(label) for label in axes) for axes in labels.outputs)
        return Demand(inputs, held)

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        labels = self.describe(node, flow)
        factors: dict[Hashable, np.ndarray] = {}
        sites: frozenset[str] = frozenset()
        for position, gain in enumerate(gains):
            axes = labels.inputs[position] if position < len(labels.inputs) else None
            if gain is None or axes is None:
                continue
            sites |= gain.sites
            if position not in labels.linear:
                raise NoRuleError("is not a product with the gated tensor")
            for label, array in zip(axes, gain.axes, strict=True):
                if array is None:
                    continue
                if label is None or label in labels.mixed:
                    raise NoRuleError("mixes the heads' axis")
                factors[label] = factors[label] * array if label in factors else array
        for label in labels.summed & factors.keys():
            summed_axes = tuple(
                axes.index(label) if axes is not None and label in axes else None for axes in labels.inputs
            )
            flow.sums.setdefault(node, {})[label] = SummedGain(factors[label], sites, summed_axes)
        results: list[Gain | None] = []
        for axes in labels.outputs:
            arrays = tuple(factors.get(label) if label not in labels.summed else None for label in axes)
            results.append(Gain(arrays, sites) if any(array is not None for array in arrays) else None)
        return results

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        labels = self.describe(node, flow)
        axes = labels.inputs[index]
        return axes is not None and axes[axis] in labels.mixed

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        pass


def broadcast(node: ir.Node, flow: Flow, inputs: Sequence[int]) -> tuple[list[AxisLabels | None], AxisLabels]:
    """Labels of operands that are broadcast against each other: axes are counted from the last (-1, -2, ...)."""
    out = flow.shape(node.outputs[0])
    described: list[AxisLabels | None] = []
    for position, value in enumerate(node.inputs):
        if value is None or position not in inputs:
            described.append(None)
            continue
        shape = flow.shape(value)
        described.append(
            tuple(axis - len(shape) if size == out[axis - len(shape)] else None for axis, size in enumerate(shape))
        )
    return described, tuple(range(-len(out), 0))
