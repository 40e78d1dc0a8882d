"""`compressor::BlockSparseAttention`: attention over the blocks that a mask keeps, as a function of plain ONNX.

    output = softmax(scale * query key^T + mask) value, over the keys of kept blocks alone

Query blocks are the rows of the mask. The body (`body`) runs wherever plain ONNX does; a runtime with a kernel of this
name runs the kernel instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graph_passes.block_sparse.body import build_body
from graph_passes.block_sparse.masks import BlockMask
from graph_passes.block_sparse.spec import AttentionInputs, AttentionSpec, GraphBuilder

DOMAIN = "compressor"
NAME = "BlockSparseAttention"
OPSET = 18
"""Oldest version of the ONNX standard that has every operator of the body."""


def block_sparse_attention(
    spec: AttentionSpec, *, row: bool = False, site: str = "", opset: int = OPSET
) -> ir.Function:
    """The function of one site; its overload is the site's name.

    Inputs of the function, in order:
        - `query` `[batch, query, head, head_dim]`, `key` `[batch, key, head, head_dim]`, `value`
          `[batch, key, head, value_dim]`;
        - `block_mask`, bool `[head, query block, key block]`, which kernels read; the body contains it as indices;
        - `row` `[batch or 1, 1, 1, key]`, if the function has it, added to the scores;
        - `full` `[batch or 1, 1 or head, query, key]`, if the function has it, added to the scores.

        An element of `row` or `full` below an eighth of the type's lowest number hides the key.
    Output: `[batch, query, head, value_dim]`, zero for queries that may attend to no key.

    Batch and lengths are free up to the positions that the mask covers; ONNX Runtime refuses longer inputs at a
    `Gather`. Query i is at position i and key j at position j - m. The memory m is `keys - queries` if the mask has a
    memory, else 0.

    Args:
        spec: what the function computes.
        row: whether the function has the input `row`.
        site: name of the site.
        opset: version of the ONNX standard of the graph that calls the function.
    """
    names = ["query", "key", "value", "block_mask", *(["row"] if row else []), *(["full"] if spec.full_heads else [])]
    inputs = {name: ir.Value(name=name) for name in names}
    tape = GraphBuilder(spec.dtype)
    operands = {name: value for name, value in inputs.items() if name != "block_mask"}
    output = build_body(tape, spec, AttentionInputs(**operands))
    output.name = "output"
    graph = ir.Graph(list(inputs.values()), [output], nodes=tape.nodes, opset_imports={"": opset}, name=NAME)
    attributes = [
        ir.AttrInt64("block", spec.block),
        ir.AttrFloat32("scale", spec.scale),
        ir.AttrInt64("causal", int(spec.causal)),
        ir.AttrInt64("memory", spec.mask.memory),
        ir.AttrInt64("persistent", spec.persistent),
    ]
    return ir.Function(DOMAIN, NAME, site, graph=graph, attributes=attributes)


def rebuild_function(
    function: ir.Function, mask: BlockMask, dims: tuple[int, int], full: int = 0, dtype: ir.DataType | None = None
) -> ir.Function:
    """The function of the same site for another mask or another type.

    Args:
        dims: widths of a key and of a value.
        full: heads of the input `full`, if the function has it.
        dtype: type of queries, keys and values; None: fp32.
    """
    names = [value.name for value in function.inputs]
    attributes = {name: attribute.value for name, attribute in function.attributes.items()}
    spec = AttentionSpec(
        mask,
        *dims,
        scale=attributes["scale"],
        causal=bool(attributes["causal"]),
        persistent=attributes["persistent"],
        full_heads=full if "full" in names else 0,
        dtype=dtype or ir.DataType.FLOAT,
    )
    imports = function.opset_imports
    return block_sparse_attention(spec, row="row" in names, site=function.overload, opset=imports[""])


def is_block_sparse(node: ir.Node | None) -> bool:
    """Whether a node is a call of block-sparse attention."""
    return node is not None and (node.domain, node.op_type) == (DOMAIN, NAME)


def call(function: ir.Function, inputs: Sequence[ir.Value]) -> ir.Node:
    """A node that calls the function; its attributes hold what a kernel needs besides the inputs."""
    attributes = {name: attribute.value for name, attribute in function.attributes.items()}
    return ir.node(NAME, inputs, attributes, domain=DOMAIN, overload=function.overload)


def standalone_model(function: ir.Function) -> ir.Model:
    """A model of one call in fp32, with the function's inputs under the same names and the output `output`."""
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
