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
    pixels = tuple(("pixels", axis) for axis in range(2, len(image)))
    apart = _is_apart(node, weight)
    kernel = ("out", "in" if groups == 1 else None, *(None,) * len(pixels))
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    return Labels(
        inputs=(("row", channel, *pixels), kernel, ("out",))[: len(node.inputs)],
        outputs=(("row", "out", *(label if alone else None for label, alone in zip(pixels, apart, strict=True))),),
        linear=frozenset((0, 1)),
        summed=frozenset(("in",)) if groups == 1 else frozenset(),
        mixed=frozenset(label for label, alone in zip(pixels, apart, strict=True) if not alone),
        added=frozenset((2,)) if has_bias else frozenset(),
    )


def _is_apart(node: ir.Node, weight: Sequence[int]) -> list[bool]:
    """For each axis of the pixels, whether the convolution computes each index of it from this index alone."""
    sizes = weight[2:]
    strides = node.attributes.get_ints("strides", [1] * len(sizes))
    pads = node.attributes.get_ints("pads", [0] * 2 * len(sizes))
    padded = [before or after for before, after in zip(pads[: len(sizes)], pads[len(sizes) :], strict=True)]
    return [size == stride == 1 and not padding for size, stride, padding in zip(sizes, strides, padded, strict=True)]


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
