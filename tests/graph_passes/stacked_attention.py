"""Stacks of attention layers below the module paths that torch's exporter records, without gates."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes import SitePlan
from tests.graph_passes.graphs import graph, site

SCOPES = "pkg.torch.onnx.name_scopes"


def stack(*scopes: str | None, shared: bool = False) -> ir.Model:
    """Attention layers of 4 heads of 3, each on the output of the layer before.

    Args:
        scopes: module path of each layer's attention; None leaves it nameless.
        shared: whether all layers read the same weights, as a module that is called several times does.
    """
    layers, weights = "", ["int64[4] split = {0, 0, 4, 3}", "int64[3] merge = {0, 0, 12}"]
    for number in range(len(scopes)):
        weight = 0 if shared else number
        source, target = f"x{number}" if number else "x", "y" if number == len(scopes) - 1 else f"x{number + 1}"
        for operand in "qkv":
            layers += f"""
                {operand}p{number} = MatMul ({source}, W{operand}{weight})
                {operand}s{number} = Reshape ({operand}p{number}, split)
            """
        layers += f"""
            q{number} = Transpose <perm = [0, 2, 1, 3]> (qs{number})
            kt{number} = Transpose <perm = [0, 2, 3, 1]> (ks{number})
            v{number} = Transpose <perm = [0, 2, 1, 3]> (vs{number})
            scores{number} = MatMul (q{number}, kt{number})
            p{number} = Softmax <axis = -1> (scores{number})
            heads{number} = MatMul (p{number}, v{number})
            back{number} = Transpose <perm = [0, 2, 1, 3]> (heads{number})
            merged{number} = Reshape (back{number}, merge)
            {target} = MatMul (merged{number}, Wo{weight})
        """
        if weight == number:
            weights += [f"float[8, 12] W{operand}{weight}" for operand in "qkv"] + [f"float[12, 8] Wo{weight}"]
    model = graph(layers, *weights)
    softmaxes = [node for node in model.graph if node.op_type == "Softmax"]
    for node, scope in zip(softmaxes, scopes, strict=True):
        if scope is not None:
            node.metadata_props[SCOPES] = repr(["", scope, "softmax"])
    return model


def keeping(*kept: int, name: str = "a") -> SitePlan:
    """The plan of one site of a stack, with a different scale for each kept head."""
    return site(kept, name=name, scale=[0.5 + head for head in kept])
