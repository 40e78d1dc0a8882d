"""Attention as graphs of their own, to be timed beside each other.

They read projected queries `[batch, query, head * head_dim]`, keys and values `[batch, key, head * head_dim]`; the
output has the shape of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes import BlockMask
from graph_passes.block_sparse.function import block_sparse_attention, call


def dense(
    heads: int,
    dim: int,
    bias: str | None = None,
    biased: int = 0,
    *,
    causal: bool = False,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Model:
    """ONNX Runtime's fused attention of every pair.

    Args:
        heads: number of heads.
        dim: width of a head.
        bias: name of an input `[1, biased, query, key]` that is added to the scores; None: there is none.
        biased: its heads, 1 or all.
        causal: hide keys after the query.
        dtype: of all inputs.
    """
    inputs = _inputs(heads * dim, dtype, [(bias, (1, biased, "length", "keys"))] if bias else [])
    attributes = {"num_heads": heads, "unidirectional": int(causal)}
    # Inputs 3 and 4 are a bias of the projections and a padding mask.
    given = [*inputs[:3], None, None, inputs[3]] if bias else inputs
    return _model(inputs, [ir.node("MultiHeadAttention", given, attributes, domain="com.microsoft")], [])


def sparse(
    mask: BlockMask,
    dim: int,
    *,
    row: bool = False,
    full: int = 0,
    persistent: int = 0,
    causal: bool = False,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Model:
    """Attention of the mask's blocks, with the reshapes that take heads apart and put them together.

    Args:
        mask: of all heads.
        dim: width of a head.
        row, full, persistent, causal, dtype: see `graph_passes.block_sparse.function.block_sparse_attention`.
    """
    heads = len(mask.kept)
    others: list[tuple[str, tuple[int | str, ...]]] = [("row", (1, 1, 1, "keys"))] if row else []
    others += [("full", (1, full, "length", "keys"))] if full else []
    inputs = _inputs(heads * dim, dtype, others)
    function = block_sparse_attention(
        mask, dim, dim, scale=dim**-0.5, causal=causal, row=row, full=full, persistent=persistent, dtype=dtype
    )
    constants = {
        "apart": np.array([0, 0, heads, dim]),
        "together": np.array([0, 0, heads * dim]),
        "block_mask": mask.kept,
    }
    known = {name: ir.Value(name=name, const_value=ir.tensor(held, name=name)) for name, held in constants.items()}
    apart = [ir.node("Reshape", [value, known["apart"]]) for value in inputs[:3]]
    node = call(function, [*(split.outputs[0] for split in apart), known["block_mask"], *inputs[3:]])
    together = ir.node("Reshape", [node.outputs[0], known["together"]])
    model = _model(inputs, [*apart, node, together], list(known.values()))
    model.functions[function.identifier()] = function
    return model


def _inputs(width: int, dtype: ir.DataType, others: Sequence[tuple[str, tuple[int | str, ...]]]) -> list[ir.Value]:
    states = [("query", ("batch", "length", width)), *((name, ("batch", "keys", width)) for name in ("key", "value"))]
    return [ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype)) for name, shape in (*states, *others)]


def _model(inputs: list[ir.Value], nodes: list[ir.Node], constants: list[ir.Value]) -> ir.Model:
    output = nodes[-1].outputs[0]
    output.name, output.type, output.shape = "output", inputs[0].type, inputs[0].shape
    opsets = {"": 18, "com.microsoft": 1, "compressor": 1}
    graph = ir.Graph(inputs, [output], nodes=nodes, initializers=constants, opset_imports=opsets, name="attention")
    return ir.Model(graph, ir_version=10)
