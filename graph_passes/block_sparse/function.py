"""`compressor::BlockSparseAttention`: attention over the blocks that a mask keeps, as a function of plain ONNX.

    output = softmax(scale * query key^T + mask) value, over the keys of kept blocks alone

Query blocks are the rows of the mask. The body (`block_sparse_body`) runs wherever plain ONNX does; a runtime that has
a kernel of this name runs that instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graph_passes.block_sparse.builder import Attention, GraphBuilder
from graph_passes.block_sparse.masks import BlockMask

DOMAIN = "compressor"
NAME = "BlockSparseAttention"
OPSET = 18
"""Oldest version of the standard that has every operator of the body."""


def block_sparse_attention(
    mask: BlockMask,
    head_dim: int,
    value_dim: int,
    *,
    scale: float,
    causal: bool = False,
    row: bool = False,
    full: int = 0,
    persistent: int = 0,
    site: str = "",
    opset: int = OPSET,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Function:
    """The function of one site; its overload is the site's name.

    Inputs of the function, in order:
        query `[batch, query, head, head_dim]`, key `[batch, key, head, head_dim]`, value `[batch, key, head,
        value_dim]`, as projections give them; block_mask, bool `[head, query block, key block]`, which the body holds
        as indices, for a kernel that takes over by name; then, where asked for, `row`, added to the scores, `[batch or
        1, 1, 1, key]`, and `full`, `[batch or 1, 1 or head, query, key]`. What either holds below an eighth of the
        type's lowest number is hidden.
    Output: `[batch, query, head, value_dim]`; zero for a query without a key that it may attend to.

    Batch and lengths are free up to what the mask reaches over; ONNX Runtime refuses longer inputs at a Gather. Query i
    is at position i, key j at position j - m: m, the remembered keys, is `keys - queries` if the mask has a memory,
    else 0.

    Args:
        mask: of the heads that there are.
        scale: of the scores.
        causal: hide keys after the query.
        row: whether it is given.
        full: its heads: 0 where it is not given, 1, or all.
        persistent: last keys, which every query of a head sees whatever the mask says.
        site: name of the site.
        opset: of the graph that calls it.
        dtype: of the graph's numbers.

    Raises:
        ValueError: causal attention over a memory, whose own mask has to say what is hidden.
    """
    if causal and (mask.memory or persistent):
        raise ValueError("causal block-sparse attention over a memory or persistent vectors; give the mask in full")
    names = ["query", "key", "value", "block_mask", *(["row"] if row else []), *(["full"] if full else [])]
    given = {name: ir.Value(name=name) for name in names}
    body = GraphBuilder(dtype)
    output = Attention(body, mask, (head_dim, value_dim), scale, causal, persistent, full, given).build()
    output.name = "output"
    graph = ir.Graph(list(given.values()), [output], nodes=body.nodes, opset_imports={"": opset}, name=NAME)
    attributes = [
        ir.AttrInt64("block", mask.block),
        ir.AttrFloat32("scale", scale),
        ir.AttrInt64("causal", int(causal)),
        ir.AttrInt64("memory", mask.memory),
        ir.AttrInt64("persistent", persistent),
    ]
    return ir.Function(DOMAIN, NAME, site, graph=graph, attributes=attributes)


def rebuild_function(
    function: ir.Function, mask: BlockMask, dims: tuple[int, int], full: int = 0, dtype: ir.DataType | None = None
) -> ir.Function:
    """The function for another mask, or other numbers.

    Args:
        function: as it is.
        mask: to compute.
        dims: width of a key and of a value.
        full: heads of the full mask, where the function has one.
        dtype: of the graph's numbers.
    """
    names = [value.name for value in function.inputs]
    attributes = {name: attribute.value for name, attribute in function.attributes.items()}
    return block_sparse_attention(
        mask,
        *dims,
        scale=attributes["scale"],
        causal=bool(attributes["causal"]),
        row="row" in names,
        full=full if "full" in names else 0,
        persistent=attributes["persistent"],
        site=function.overload,
        opset=function.opset_imports[""],
        dtype=dtype or ir.DataType.FLOAT,
    )


def is_block_sparse(node: ir.Node | None) -> bool:
    """Whether a node is a call of block-sparse attention."""
    return node is not None and (node.domain, node.op_type) == (DOMAIN, NAME)


def call(function: ir.Function, inputs: Sequence[ir.Value]) -> ir.Node:
    """A node that calls the function; its attributes tell a kernel all that the body holds."""
    attributes = {name: attribute.value for name, attribute in function.attributes.items()}
    return ir.node(NAME, inputs, attributes, domain=DOMAIN, overload=function.overload)


def standalone_model(function: ir.Function) -> ir.Model:
    """A model of one call in fp32: it reads what the function reads, under the same names, and gives `output`."""
    dtype = ir.DataType.FLOAT
    inputs = [
        ir.Value(name=value.name, type=ir.TensorType(ir.DataType.BOOL if value.name == "block_mask" else dtype))
        for value in function.inputs
    ]
    node = call(function, inputs)
    node.outputs[0].name, node.outputs[0].type = "output", ir.TensorType(dtype)
    imports = {"": function.opset_imports[""], DOMAIN: 1}
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports, name=NAME)
    return ir.Model(graph, ir_version=10, functions=[function])
