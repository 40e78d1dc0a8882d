"""Lower the operator set: rewrite a graph of operator set 18 in set 17, for runtimes that do not read newer ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.errors import GraphError, GraphErrorCode
from graph_passes.passes.base import GraphPass, ReportedResult
from graph_passes.tape import input_of

OPSET = 17
"""The operator set that the pass writes."""
_RESIZE_DEFAULTS: Mapping[str, object] = {"antialias": 0, "keep_aspect_ratio_policy": "stretch"}
"""Attributes that `Resize` gained in operator set 18, and their defaults."""


class LowerOpset(GraphPass[int]):
    """Write a graph of operator set 18 in operator set 17.

    Cases:
        1. Axes of a reduction are an input in set 18: a constant becomes the attribute `axes` of set 17.
        2. `Split` has a count of outputs in set 18: it is removed where the parts are of equal size, as set 17 assumes.
        3. Attributes that set 17 lacks are removed where they hold their default.
        4. A graph of operator set 17 or older stays as it is.

    The report is the operator set before the pass.

    Raises (from `call`):
        GraphError: the graph is of a set after 18 (`UNSUPPORTED_OPSET`), or an operator has no form in set 17
            (`UNSUPPORTED_OPERATOR`).
    """

    def call(self, model: ir.Model) -> ReportedResult[int]:
        before = model.opset_imports.get("", 0)
        if before <= OPSET:
            return ReportedResult(model, False, before)
        if before > OPSET + 1:
            raise GraphError(
                f"operator set {before} cannot be written as {OPSET}, only operator set {OPSET + 1} can; export the"
                f" graph with --opset {OPSET + 1}",
                code=GraphErrorCode.UNSUPPORTED_OPSET,
                opset=before,
                maximum=OPSET + 1,
            )
        common.ShapeInferencePass()(model)
        for node in model.graph.all_nodes():
            if not node.domain and not (_lower(node) and _is_valid(node)):
                raise GraphError(
                    f"{node.op_type} ({node.name}) has a form that only operator set {OPSET + 1} allows; export the "
                    f"graph without it, or build for a runtime that reads newer operator sets",
                    code=GraphErrorCode.UNSUPPORTED_OPERATOR,
                    op=node.op_type,
                    node=node.name,
                )
        common.RemoveUnusedNodesPass()(model)
        model.opset_imports[""] = OPSET
        return ReportedResult(model, True, before)

    def ensures(self, model: ir.Model) -> None:
        if model.opset_imports.get("", 0) > OPSET:
            raise ir.passes.PostconditionError(f"the graph is of operator set {model.opset_imports['']}")


def _lower(node: ir.Node) -> bool:
    """Rewrite one node; returns whether operator set 17 can express it."""
    if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum":
        return _lower_reduction(node)
    if node.op_type == "Split":
        return _lower_split(node)
    for name, default in _RESIZE_DEFAULTS.items():
        if name in node.attributes and node.attributes[name].value == default:
            node.attributes.pop(name)
    # `ScatterElements` and `ScatterND` gained two reductions in operator set 18.
    return node.attributes.get_string("reduction", "none") not in ("max", "min")


def _lower_reduction(node: ir.Node) -> bool:
    """Case 1."""
    axes_input = input_of(node, 1)
    constant = ir.convenience.get_const_tensor(axes_input) if axes_input is not None else None
    axes = [] if constant is None else np.atleast_1d(constant.numpy()).tolist()
    keeps_without_axes = node.attributes.pop("noop_with_empty_axes", None)
    if axes_input is not None and constant is None:
        return False
    if not axes and keeps_without_axes is not None and keeps_without_axes.as_int():
        return False
    if axes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    node.resize_inputs(1)
    return True


def _lower_split(node: ir.Node) -> bool:
    """Case 2."""
    count, source = node.attributes.pop("num_outputs", None), node.inputs[0]
    if count is None or source is None:
        return True
    size = source.shape[node.attributes.get_int("axis", 0)] if source.shape is not None else None
    return isinstance(size, int) and size % count.as_int() == 0


def _is_valid(node: ir.Node) -> bool:
    """Whether operator set 17 has the operator, with its attributes and at least as many inputs."""
    try:
        schema = onnx.defs.get_schema(node.op_type, OPSET, "")
    except onnx.defs.SchemaError:
        return False
    return len(node.inputs) <= schema.max_input and set(node.attributes) <= set(schema.attributes)
