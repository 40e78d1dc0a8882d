"""A graph that is run node by node in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from torch import Tensor

from compressor.graph.operators import executor, tensor_of


def run_graph(model: ir.Model, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs of a graph without local functions."""
    values: dict[ir.Value | None, Tensor | None] = {None: None}
    for value in model.graph.inputs:
        values[value] = inputs[value.name or ""]
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        values[value] = tensor_of(value.const_value)
    for node in model.graph:
        domain = "" if node.domain == "ai.onnx" else node.domain
        run = executor(node, model.opset_imports.get(domain, 1))
        values.update(zip(node.outputs, run([values[value] for value in node.inputs]), strict=True))
    outputs = [values[value] for value in model.graph.outputs]
    return [value for value in outputs if value is not None]
