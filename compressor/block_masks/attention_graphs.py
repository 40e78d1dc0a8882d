"""ONNX graphs of attention alone, in forms that are timed against each other.

Inputs are the projected queries `[batch, query, head * head_dim]` and keys and values `[batch, key, head * head_dim]`;
the output has the shape of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes import BlockMask
from graph_passes.block_sparse.function import block_sparse_attention, call

Shape = tuple[int | str, ...]
"""Shape of an input; names are dynamic axes."""


def dense(
    heads: int,
    dim: int,
    bias: str | None = None,
    bias_heads: int = 0,
    *,
    causal: bool = False,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Model:
    """Graph of ONNX Runtime's fused attention over all pairs of positions.

    Args:
        heads: number of heads.
        dim: width of a head.
        bias: name of an input `[1, bias_heads, query, key]` that is added to the scores; None: no such input.
        bias_heads: number of heads of that input, 1 or all.
        causal: hide keys after the query.
        dtype: type of all inputs.
    """
    biases: list[tuple[str, Shape]] = [(bias, (1, bias_heads, "length", "keys"))] if bias else []
    inputs = _inputs(heads * dim, dtype, biases)
    attributes = {"num_heads": heads, "unidirectional": int(causal)}
    # Inputs 3 and 4 are a bias of the projections and a padding mask.
    operands = [*inputs[:3], None, None, inputs[3]] if bias else inputs
    return _model(inputs, [ir.node("MultiHeadAttention", operands, attributes, domain="com.microsoft")], [])


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
    """Graph of attention over the blocks that a mask keeps, with the reshapes that split and merge the heads.

    Args:
        mask: masks of all heads.
        dim: width of a head.
        row: add an input `row` `[1, 1, 1, key]`, which is added to the scores of every query.
        full: heads, 1 or all, of an input `full` `[1, full, query, key]`, added to the scores; 0: no such input.
        persistent: number of keys at the end that every query attends to.
        causal: hide keys after the query.
        dtype: type of all inputs.
    """
    heads = len(mask.kept)
    biases: list[tuple[str, Shape]] = [("row", (1, 1, 1, "keys"))] if row else []
    biases += [("full", (1, full, "length", "keys"))] if full else []
    inputs = _inputs(heads * dim, dtype, biases)
    function = block_sparse_attention(
        mask, dim, dim, scale=dim**-0.5, causal=causal, row=row, full=full, persistent=persistent, dtype=dtype
    )
    arrays = {
        "split_shape": np.array([0, 0, heads, dim]),
        "merged_shape": np.array([0, 0, heads * dim]),
        "block_mask": mask.kept,
    }
    constants = {name: ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in arrays.items()}
    split = [ir.node("Reshape", [value, constants["split_shape"]]) for value in inputs[:3]]
    attention = call(function, [*(node.outputs[0] for node in split), constants["block_mask"], *inputs[3:]])
    merged = ir.node("Reshape", [attention.outputs[0], constants["merged_shape"]])
    model = _model(inputs, [*split, attention, merged], list(constants.values()))
    model.functions[function.identifier()] = function
    return model


def _inputs(width: int, dtype: ir.DataType, biases: Sequence[tuple[str, Shape]]) -> list[ir.Value]:
    """Queries, keys and values of a width, followed by biases with their names and shapes."""
    states = [("query", ("batch", "length", width)), *((name, ("batch", "keys", width)) for name in ("key", "value"))]
    return [ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype)) for name, shape in (*states, *biases)]


def _model(inputs: list[ir.Value], nodes: list[ir.Node], constants: list[ir.Value]) -> ir.Model:
    """A model of nodes, whose output is that of the last node."""
    output = nodes[-1].outputs[0]
    output.name, output.type, output.shape = "output", inputs[0].type, inputs[0].shape
    opsets = {"": 18, "com.microsoft": 1, "compressor": 1}
    graph = ir.Graph(inputs, [output], nodes=nodes, initializers=constants, opset_imports=opsets, name="attention")
    return ir.Model(graph, ir_version=10)
