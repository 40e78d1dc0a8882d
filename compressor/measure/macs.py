"""Count the multiply-accumulates of one forward pass from the shapes in a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from compressor.targets.trial_inputs import axis_size, free_sizes, held_sizes
from graph_passes.block_sparse.function import NAME as BLOCK_SPARSE
from graph_passes.block_sparse.masks import BlockMask
from graph_passes.block_sparse.row_buckets import dense_heads, visible_blocks
from graph_passes.flow.concrete_shapes import Probe, Shape

_MATMULS = frozenset(
    "DynamicQuantizeMatMul FusedGemm FusedMatMul Gemm MatMul MatMulInteger MatMulIntegerToFloat MatMulNBits"
    " QLinearMatMul TransposeMatMul".split()
)
_UNCOUNTED = frozenset("ConvInteger QAttention QLinearConv".split())
"""Operators whose multiply-accumulates are not counted: a graph with one of them has no count."""


def macs(model: ir.Model, batch: int, seq: int) -> int | None:
    """Number of multiply-accumulates of one forward pass.

    - `MatMul`, `Gemm`, their fused and quantized forms `[..., m, k] x [..., k, n]`: elements of the output times `k`.
    - `Conv` with kernel `[out, in / groups, *window]`: elements of the output times `in / groups * prod(window)`.
    - `Einsum` of two operands: the product of the sizes of all its labels.
    - `Attention`, `MultiHeadAttention`, `GroupQueryAttention`: scores and weighted sums, `batch * heads * query * key *
      (key width + value width)`; for the `Attention` of `com.microsoft` also its projection of the input.
    - `BlockSparseAttention`: scores and weighted sums over the pairs of positions in kept blocks.

    Additions (biases, residuals), norms, activations and softmax do not count. A causal mask saves nothing, because the
    masked pairs are computed.

    Args:
        model: the graph, fused or not; it stays unchanged. Local functions other than `BlockSparseAttention` must have
            been inlined.
        batch: size of free first axes of its inputs.
        seq: size of every other free axis; memories have the longest length that the model takes, caches are empty,
            images and sounds have the size of the exporter's example.

    Returns:
        The count; None where that of a node is unknown.
    """
    counts = [count for _, count in _counted(model, batch, seq)]
    return None if None in counts else sum(count or 0 for count in counts)


def uncounted_node(model: ir.Model, batch: int, seq: int) -> str | None:
    """The name of the first node that `macs` cannot count, e.g. for lack of its shapes; None if it counts all."""
    return next((str(node.name or node.op_type) for node, count in _counted(model, batch, seq) if count is None), None)


def _counted(model: ir.Model, batch: int, seq: int) -> Iterator[tuple[ir.Node, int | None]]:
    """The nodes of a graph with their multiply-accumulates; None where these are unknown."""
    shapes = _shapes(model, batch, seq)
    for node in model.graph.all_nodes():
        if node.op_type in _UNCOUNTED:
            yield node, None
        else:
            count = _COUNTS.get(node.op_type)
            yield node, 0 if count is None else count(node, shapes)


_Shapes = Callable[[ir.Value | None], Shape | None]
"""Returns the shape of a value; None: unknown."""


def _shapes(model: ir.Model, batch: int, seq: int) -> _Shapes:
    """The shapes of all values of a graph for inputs of a size; the graph is restored afterwards."""
    original_shapes = [(value, value.shape) for value in model.graph.inputs]
    sizes, held = free_sizes(model, batch, seq), held_sizes(model)
    try:
        for value, shape in original_shapes:
            if shape is not None:
                value.shape = ir.Shape(axis_size(value, axis, sizes, held) for axis in range(len(shape)))
        probe = Probe(model)
    finally:
        for value, shape in original_shapes:
            value.shape = shape

    def shape_of(value: ir.Value | None) -> Shape | None:
        first, second = probe.shapes(value)
        return first if first == second else None  # what depends on the data has two made-up sizes

    return shape_of


def _matmul(node: ir.Node, shapes: _Shapes) -> int | None:
    first, out = shapes(node.inputs[0]), shapes(node.outputs[0])
    if first is None or out is None:
        return None
    return math.prod(out) * first[-2 if node.attributes.get_int("transA", 0) else -1]


def _conv(node: ir.Node, shapes: _Shapes) -> int | None:
    kernel, out = shapes(node.inputs[1]), shapes(node.outputs[0])
    return None if kernel is None or out is None else math.prod(out) * math.prod(kernel[1:])


def _einsum(node: ir.Node, shapes: _Shapes) -> int | None:
    operands = [shapes(value) for value in node.inputs]
    terms = node.attributes.get_string("equation", "").replace(" ", "").split("->")[0].split(",")
    if len(operands) > 2 or "..." in "".join(terms):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, operands, strict=True):
        if shape is None:
            return None
        sizes.update(zip(term, shape, strict=True))
    return math.prod(sizes.values()) if len(operands) == 2 else 0


def _attention(node: ir.Node, shapes: _Shapes) -> int | None:
    out, first = shapes(node.outputs[0]), shapes(node.inputs[0])
    second = shapes(node.inputs[1]) if len(node.inputs) > 1 else None
    if out is None or first is None:
        return None
    if node.op_type == "Attention" and node.domain == "com.microsoft":
        if second is None:
            return None
        rows, width, value_width = math.prod(first[:2]), second[1], out[2]
        # The projection computes queries, keys and values; queries and keys are equally wide.
        return rows * first[2] * width + rows * first[1] * ((width - value_width) // 2 + value_width)
    if len(first) == 5:  # queries, keys and values in one tensor: [batch, length, heads, 3, width]
        return 2 * first[0] * first[1] ** 2 * first[2] * first[4]
    keys = second
    if keys is None:  # queries, keys and values concatenated: [batch, length, (heads + 2 * kv_heads) * width]
        return 2 * out[0] * out[1] ** 2 * out[2]
    if len(first) == 4:
        return first[0] * first[1] * first[2] * keys[2] * (first[3] + out[3])
    length = keys[2] if len(keys) == 4 else keys[1]
    return first[0] * first[1] * length * (first[2] + out[2])


def _block_sparse(node: ir.Node, shapes: _Shapes) -> int | None:
    query, key, value = (shapes(tensor) for tensor in node.inputs[:3])
    mask = None if node.inputs[3] is None else node.inputs[3].const_value
    if query is None or key is None or value is None or mask is None:
        return None
    block, memory, causal, persistent = (
        node.attributes.get_int(name, 0) for name in ("block", "memory", "causal", "persistent")
    )
    blocks = BlockMask(mask.numpy().astype(np.bool_), block, memory)
    # A head that keeps every block is computed as dense attention, future positions included.
    kept = visible_blocks(blocks, causal=bool(causal)) | dense_heads(blocks, causal=bool(causal))[:, None, None]
    keys = key[1] - persistent
    # The mask covers the longest memory; a shorter one lacks the first positions.
    absent = memory - (keys - query[1]) if memory else 0
    rows, columns = (
        np.clip(size - np.arange(count) * block, 0, block)
        for size, count in zip((query[1], keys + absent), kept.shape[1:], strict=True)
    )
    columns = columns - np.clip(absent - np.arange(len(columns)) * block, 0, columns)
    pairs = int(np.einsum("hrc,r,c->", kept.astype(np.int64), rows, columns)) + query[2] * query[1] * persistent
    return query[0] * pairs * (query[3] + value[3])


_COUNTS: dict[str, Callable[[ir.Node, _Shapes], int | None]] = {
    **dict.fromkeys(_MATMULS, _matmul),
    "Conv": _conv,
    "FusedConv": _conv,
    "Einsum": _einsum,
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention"), _attention),
    BLOCK_SPARSE: _block_sparse,
}
