"""Convolutions: sums over the channels, or over the pixels of each channel apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from graph_passes.flow.indices import Need
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, NoRuleError, Rule, RuleContext
from graph_passes.flow.rules.labels import LabelRule, Labels


def _convolution(node: ir.Node, context: RuleContext) -> Labels:
    """Conv of an image `[row, channel, ...]` with a weight `[channel of the output, channel of a group, ...]`."""
    image, weight = context.shape(node.inputs[0]), context.shape(node.inputs[1])
    groups = _groups(node)
    if groups not in (1, image[1]) or groups not in (1, weight[0]):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "sums over the channels of each of its groups")
    channel = "in" if groups == 1 else "out"
    axes, unmixed = range(2, len(image)), _unmixed_axes(node, weight)
    kernel = ("out", "in" if groups == 1 else None, *(None for _ in axes))
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    return Labels(
        inputs=(("row", channel, *(("pixels", axis) for axis in axes)), kernel, ("out",))[: len(node.inputs)],
        outputs=(("row", "out", *(("pixels", axis) if axis in unmixed else None for axis in axes)),),
        linear=frozenset((0, 1)),
        summed=frozenset(("in",)) if groups == 1 else frozenset(),
        mixed=frozenset(("pixels", axis) for axis in axes if axis not in unmixed),
        added=frozenset((2,)) if has_bias else frozenset(),
    )


def _unmixed_axes(node: ir.Node, weight: Sequence[int]) -> set[int]:
    """The axes of the image along which every index of the output depends on the same index of the input alone."""
    sizes = weight[2:]
    strides = node.attributes.get_ints("strides", [1] * len(sizes))
    pads = node.attributes.get_ints("pads", [0] * 2 * len(sizes))
    ends = zip(pads[: len(sizes)], pads[len(sizes) :], strict=True)
    forms = zip(sizes, strides, ends, strict=True)
    return {axis for axis, form in enumerate(forms, start=2) if form == (1, 1, (0, 0))}


def _groups(node: ir.Node) -> int:
    return node.attributes.get_int("group", 1)


@dataclasses.dataclass(frozen=True)
class _ConvolutionRule(LabelRule):
    """A label rule whose operator also states the number of groups, which is that of the channels, or one."""

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        channels = demand.outputs[0][1]
        if _groups(node) > 1 and channels is not None:
            node.attributes["group"] = ir.AttrInt64("group", len(channels))


RULES: dict[tuple[str, str], Rule] = {("", "Conv"): _ConvolutionRule(_convolution)}
