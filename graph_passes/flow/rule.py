"""The interface of rules: which indices an operator needs, multiplies, carries and mixes, and how to rewrite it."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe, Shape
from graph_passes.flow.indices import Need, all_indices, same_index
from graph_passes.flow.refusal import RefusalCode


@dataclasses.dataclass(frozen=True, eq=False)
class Gain:
    """The factors that gates multiply the indices of a tensor by.

    Attributes:
        axes: for each axis the factor of each index, `[size]`; None: the axis is not gated.
        sites: names of the sites whose gates contribute to the factors.
    """

    axes: tuple[np.ndarray | None, ...]
    sites: frozenset[str]


@dataclasses.dataclass(frozen=True, eq=False)
class SummedGain:
    """A gain along an axis that a node sums over.

    Attributes:
        factors: factor of each index of the axis, `[size]`.
        sites: names of the sites whose gates contribute to the factors.
        axes: for each input of the node, its axis that is summed over; None where the input lacks that axis.
    """

    factors: np.ndarray
    sites: frozenset[str]
    axes: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Demand:
    """The needs and the outputs of a node when only some indices of its outputs are needed.

    Attributes:
        inputs: the indices that each input must hold; None: the node reads no data from it.
        outputs: the indices that each output then holds, which may be more than needed.
    """

    inputs: tuple[Need | None, ...]
    outputs: tuple[Need, ...]


class NoRuleError(Exception):
    """A rule cannot pass heads through a node.

    Args:
        why: the reason, as a clause whose subject is the operator.
    """

    def __init__(self, code: RefusalCode, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


class RuleContext:
    """The information about a graph that rules read.

    Attributes:
        sums: node -> label that it sums over -> gain along that label; written by `Rule.gain`, read by `Rule.demand`.
        unread: outputs of which nothing is needed, whatever `Rule.demand` receives for them.
    """

    counts_positions = False
    """Whether the number of needed indices is the size of an axis that depends on the graph's inputs: true for
    positions, false for heads, which may share such an axis with the batch."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.sums: dict[ir.Node, dict[Hashable, SummedGain]] = {}
        self.unread: Collection[ir.Value] = frozenset()

    def shape(self, value: ir.Value | None) -> Shape:
        """Shape of a tensor under the first assignment of sizes.

        Raises:
            NoRuleError: the shape is unknown.
        """
        shape = self.probe.shape(value)
        if shape is None:
            name = value.name if value is not None else "an absent input"
            raise NoRuleError(RefusalCode.UNKNOWN_SHAPE, f"has a tensor of unknown shape ({name})")
        return shape

    def is_broadcast(self, value: ir.Value | None, axis: int, output: ir.Value | None, output_axis: int) -> bool:
        """Whether an axis of an operand is repeated along an axis of the output, at some sizes of the graph's inputs.

        Raises:
            NoRuleError: a shape is unknown.
        """
        self.shape(value)
        self.shape(output)
        pairs = zip(self.probe.shapes(value), self.probe.shapes(output), strict=True)
        return any(a is not None and b is not None and a[axis] != b[output_axis] for a, b in pairs)


class Rule:
    """How one operator passes indices on. All needs are in positions of the unpruned graph.

    Every method gets the node and the shapes of its graph, and raises `NoRuleError` where the rule does not cover the
    node. `position` is that of an input, and `axis` an axis of this input.
    """

    is_norm: bool = False
    """Whether the node is a norm or a part of one: a statistic of all units, by which each unit is divided. Dropped
    units that it mixes stay computed before it and are cut after it; other operators that mix units are refused."""

    def continued(self, node: ir.Node) -> Iterable[tuple[int, int]]:
        """Outputs that hold an input with further positions after its own, as pairs of (input, output)."""
        return ()

    def selected_axes(self, node: ir.Node, context: RuleContext) -> Collection[int]:
        """Axes of the first input of which `rewrite` accepts more than needed; others are cut before the node."""
        return ()

    @abc.abstractmethod
    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        """The indices that the inputs must hold so that the outputs hold at least `outputs`."""

    @abc.abstractmethod
    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        """Gains of the outputs, from those of the inputs: the outputs are the ungated ones times these factors."""

    def carries(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> Iterator[tuple[int, int]]:
        """Output axes that carry the indices of one axis of one input, as pairs of (output, axis).

        An output axis carries an input axis if needing fewer indices of the output axis means needing fewer indices of
        the input axis, while all other axes are needed entirely. Two outputs that share an input axis do not carry it,
        because each of them needs all of it. That is what `demand` answers where nothing is needed of an output axis;
        rules override this where it is not the same for single indices.

        Raises:
            NoRuleError: the shape of an output that is read is unknown.
        """

        def shape(value: ir.Value) -> Shape:
            is_read = bool(value.uses()) or value.is_graph_output()
            return context.shape(value) if is_read else context.probe.shape(value) or ()

        whole = [all_indices(len(shape(value))) for value in node.outputs]
        unpruned = self.demand(node, whole, context).inputs[position]
        for output, need in enumerate(whole if unpruned is not None else ()):
            for output_axis in range(len(need)):
                nothing = (*need[:output_axis], np.zeros(0, np.int64), *need[output_axis + 1 :])
                with contextlib.suppress(NoRuleError):
                    source = self.demand(node, [*whole[:output], nothing, *whole[output + 1 :]], context).inputs[
                        position
                    ]
                    if source is not None and unpruned is not None and not same_index(source[axis], unpruned[axis]):
                        yield output, output_axis

    def mixes(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> bool:
        """Whether output indices depend on all indices of one axis of one input, and are not their sum."""
        return False

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        """Change attributes and shape inputs so that the node computes `demand.outputs`.

        Args:
            demand: what `demand` returned for the node.
            held: what each input holds now: on `selected_axes` at least what the node demands, on others exactly that.
            context: the shapes of the unpruned graph.
        """
