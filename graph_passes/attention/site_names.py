"""Name the site of an attention after its gate, or else after the module path that the exporter recorded."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

import onnx_ir as ir

from graph_passes.attention.gate_initializers import gated_group
from graph_passes.attention.tracing import LAYOUT

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Key of a node's metadata: the module paths that PyTorch's exporter records, from the model down to the node."""


def site_name(node: ir.Node, output: ir.Value) -> str | None:
    """Name of an attention's site, or None where the graph has none.

    Args:
        node: the softmax or the fused operator, where the exporter recorded its module.
        output: the tensor of the heads' outputs, which a gate may multiply.
    """
    return next(_gates_after(output), None) or module_path(node)


def module_path(node: ir.Node) -> str | None:
    """Path of the module that a node was exported from, or None where the exporter recorded none."""
    scopes = node.metadata_props.get(_SCOPES)
    if scopes:
        try:
            paths = [scope for scope in ast.literal_eval(scopes)[:-1] if scope]
        except (ValueError, SyntaxError):
            paths = []
        if paths:
            return str(paths[-1])
    parts = (node.name or "").strip("/").split("/")[:-1]
    return ".".join(parts) or None


def block_sparse_site(node: ir.Node, overloads: Collection[str]) -> str | None:
    """Name of the site of a call of block-sparse attention.

    Of the calls of one module, the first has the site's name; a number is appended to the names of the others.

    Args:
        overloads: the overloads of all such calls in the graph.
    """
    site, _, number = node.overload.rpartition(".")
    return (site if number.isdecimal() and site in overloads else node.overload) or None


def _gates_after(value: ir.Value) -> Iterator[str]:
    """Sites whose gates multiply a tensor, directly or after a change of layout."""
    for node, _ in value.uses():
        if node.op_type == "Mul":
            for operand in node.inputs:
                site = gated_group(operand)
                if site is not None:
                    yield site
        elif node.op_type in LAYOUT | {"Where"}:
            yield from _gates_after(node.outputs[0])
