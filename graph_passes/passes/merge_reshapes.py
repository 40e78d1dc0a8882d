"""Merge reshapes: drop the shapes between two of them, and a reshape to the shape that a tensor has."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed


class MergeReshapes(GraphPass[Names]):
    """Drop reshapes that a runtime would execute one by one for each token.

    Cases:
        1. A reshape of a reshape reads the tensor before both, if every size that it copies is one that the first
           reshape copies too.
        2. A reshape to the shape that the tensor already has is removed.

    The report has the names of the changed and removed nodes.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        probe, names = Probe(model), list[str | None]()
        for node in list(model.graph):
            target = _target(node, probe)
            if target is None:
                continue
            source = node.inputs[0]
            while source is not None and _can_skip(source.producer(), target, probe):
                source = source.producer().inputs[0]  # type: ignore[union-attr]
            if source is not node.inputs[0]:
                node.replace_input_with(0, source)
                names.append(node.name)
            if _is_shape_of(target, source, probe) and source is not None and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(source)
                names.append(node.name)
        if names:
            RemoveUnusedNodesPass()(model)
        return changed(model, dict.fromkeys(names))


def _target(node: ir.Node | None, probe: Probe) -> list[int] | None:
    """The sizes of a reshape, if they are constant and zero copies a size; None for other nodes."""
    if node is None or node.op_type != "Reshape" or node.domain or node.attributes.get_int("allowzero", 0) != 0:
        return None
    content = probe.constant(node.inputs[1])
    return None if content is None else [int(size) for size in content]


def _can_skip(before: ir.Node | None, target: list[int], probe: Probe) -> bool:
    """Whether a reshape to `target` has the same result on the input of the reshape before it."""
    sizes = _target(before, probe)
    return sizes is not None and all(
        axis < len(sizes) and sizes[axis] == 0 for axis, size in enumerate(target) if size == 0
    )


def _is_shape_of(target: list[int], value: ir.Value | None, probe: Probe) -> bool:
    """Whether a tensor has the sizes of a reshape already."""
    shape = probe.shape(value)
    if shape is None or len(shape) != len(target) or target.count(-1) > 1:
        return False
    return all(
        size in (0, -1) or (size == shape[axis] and probe.fixed(value, axis)) for axis, size in enumerate(target)
    )
