"""Lower masked attention to block-sparse attention, which computes only the blocks that a mask keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention.match_masked_attention import (
    MaskedAttentionMatch,
    NativeMaskReader,
    match_masked_attentions,
)
from graph_passes.attention.operands import SWAP, NoMatchError, before_swap, swaps
from graph_passes.block_sparse.function import OPSET, block_sparse_attention, call
from graph_passes.block_sparse.masks import SUFFIX, BlockMask
from graph_passes.block_sparse.spec import AttentionSpec
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.edit import opset
from graph_passes.flow.refusal import Refusal
from graph_passes.passes.base import GraphPass, ReportedResult
from graph_passes.tape import Tape


@dataclasses.dataclass(frozen=True)
class LoweredBlockSparse:
    """What `LowerBlockSparse` changed.

    Attributes:
        lowered: sites that are block-sparse now.
        refused: sites that stay dense and masked, with the operator that prevents lowering.
    """

    lowered: tuple[str, ...]
    refused: tuple[Refusal, ...]


class LowerBlockSparse(GraphPass[LoweredBlockSparse]):
    """Replace each masked attention by a call of `compressor::BlockSparseAttention`.

    Cases, by how the block mask `<site>.block_mask` reaches the scores:
        1. It is added to them before a Softmax between two products; the scores may be scaled and have other addends.
        2. It is the mask of an `Attention` operator of the ONNX standard.
        3. Neither: the site stays dense and masked, and is refused.

    The model's native mask becomes a row of keys or a flag for causality, or stays a mask of every pair, see
    `NativeMaskReader`. Nodes that zero the queries without a key are removed: the function returns zero for them.

    Args:
        masks: site -> block mask, for the heads of the unpruned model.
        sites: names of the sites to lower; None: all of them.
    """

    inlined = True

    def __init__(self, masks: Mapping[str, BlockMask], sites: Collection[str] | None = None) -> None:
        self.masks, self.sites = masks, sites

    def call(self, model: ir.Model) -> ReportedResult[LoweredBlockSparse]:
        initializers = {
            name.removesuffix(SUFFIX): value
            for name, value in model.graph.initializers.items()
            if name.endswith(SUFFIX) and any(node.domain == "" for node, _ in value.uses())
        }
        sites = [site for site in self.masks if site in initializers and (self.sites is None or site in self.sites)]
        if not sites:
            return ReportedResult(model, False, LoweredBlockSparse((), ()))
        probe = Probe(model)
        longest = max(max(mask.queries, mask.keys) for mask in self.masks.values())
        native_masks = NativeMaskReader(model, longest, probe)
        lowered, refused = [], []
        for site in sites:
            try:
                matches = match_masked_attentions(initializers[site], self.masks[site], probe)
            except NoMatchError as error:
                refused.append(error.refusal(site))
                continue
            for number, masked in enumerate(matches):
                _lower(model, f"{site}.{number}" if number else site, masked, native_masks)
            lowered.append(site)
        if lowered:
            common.RemoveUnusedNodesPass()(model)
        return ReportedResult(model, bool(lowered), LoweredBlockSparse(tuple(lowered), tuple(refused)))


def _lower(model: ir.Model, name: str, masked: MaskedAttentionMatch, native_masks: NativeMaskReader) -> None:
    """Replace one attention by a call of a function with this name."""
    operands = masked.operands
    product = operands.output.producer()
    assert product is not None
    native = native_masks.read(operands.addends, product, allow_causal=not masked.mask.memory and not masked.persistent)
    spec = AttentionSpec(
        masked.mask,
        *masked.dims,
        scale=operands.scale,
        causal=native.causal,
        persistent=masked.persistent,
        full_heads=native.heads,
        dtype=operands.query.dtype or ir.DataType.FLOAT,
    )
    function = block_sparse_attention(spec, row=native.row is not None, site=name, opset=max(opset(product), OPSET))
    inputs = [_by_position(value, product) for value in (operands.query, operands.key, operands.value)]
    masks = [value for value in (native.row, native.full) if value is not None]
    node = call(function, [*inputs, masked.blocks, *masks])
    node.name = f"{name}.attention"
    by_head = ir.node("Transpose", node.outputs, {"perm": SWAP})
    model.graph.insert_before(product, [node, by_head])
    for value in (node.outputs[0], by_head.outputs[0]):
        value.type = operands.output.type
    operands.output.replace_all_uses_with(by_head.outputs[0])
    _remove_guards(masked)
    for reader, _ in list(by_head.outputs[0].uses()):
        if swaps(reader):
            reader.outputs[0].replace_all_uses_with(node.outputs[0])
    model.functions[function.identifier()] = function
    model.graph.opset_imports[function.domain] = 1


def _remove_guards(masked: MaskedAttentionMatch) -> None:
    """Bypass the nodes that set queries without a key to zero, and the idle reshapes around them."""
    for node, position in (*masked.guards, *((reshape, 0) for reshape in masked.idle)):
        source = node.inputs[position]
        assert source is not None
        node.outputs[0].replace_all_uses_with(source)


def _by_position(value: ir.Value, before: ir.Node) -> ir.Value:
    """The tensor `[batch, head, position, dim]` as `[batch, position, head, dim]`."""
    if (source := before_swap(value)) is not None:
        return source
    op = Tape()
    transposed = op("Transpose", value, perm=SWAP)
    op.insert_before(before)
    transposed.type = value.type
    return transposed
