"""Separate biases: give each matmul a bias of its own, where an exporter stores equal ones once."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.attention.linears import find_linears
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import add_initializer, remove_unread


class SeparateBiases(GraphPass[Names]):
    """Copy a bias that matmuls with several weights add, such as the zeros of an untrained model.

    A refit changes the bias of one matmul. Copies get names that are no paths of modules, since the stored name may
    belong to one of the matmuls.

    The report has the names of the biases that were copied.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        readers: dict[ir.Value, dict[ir.Value, list[ir.Node]]] = {}
        for linear, (reader, *_) in list(find_linears(model.graph)):
            if linear.bias is not None:
                readers.setdefault(linear.bias, {}).setdefault(linear.weight, []).append(reader)
        separated = []
        for bias, linears in readers.items():
            if bias.const_value is None or any(len(list(bias.uses())) == len(nodes) for nodes in linears.values()):
                continue
            separated.append(bias.name)
            for number, nodes in enumerate(linears.values()):
                copy = add_initializer(model.graph, f"{bias.name}.{number}", bias.const_value.numpy())
                for node in nodes:
                    node.replace_input_with(list(node.inputs).index(bias), copy)
        remove_unread(model.graph, separated)
        return changed(model, separated)
