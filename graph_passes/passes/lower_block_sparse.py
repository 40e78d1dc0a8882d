"""Lower masked attention to block-sparse attention: compute the blocks that a mask keeps, and no others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention.match_masked_attention import MaskedAttentionMatch, match
from graph_passes.attention.native_mask import FamilyMasks
from graph_passes.attention.operands import NoMatchError
from graph_passes.block_sparse.function import OPSET, block_sparse_attention, call
from graph_passes.block_sparse.masks import SUFFIX, BlockMask
from graph_passes.flow.axis_flow import Refusal
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.edit import opset

_SWAP = (0, 2, 1, 3)


class LowerBlockSparse(ir.passes.InPlacePass):
    """Replace each masked attention by a call of `compressor::BlockSparseAttention`.

    Cases, by how the mask of blocks, `<site>.block_mask`, meets the scores:
        1. It is added to them before a Softmax between two products; scales and other addends may stand beside it.
        2. It is the mask of an `Attention` operator of the standard.

    The family's own mask becomes a row of keys, a flag for causality, or stays a mask of every pair: see `FamilyMasks`.
    What marks queries without a key is taken out, for the function gives zero there itself. A site that fits neither
    case is left as it is, dense and masked, and listed in `refused`.

    Args:
        masks: the masks of the graph's sites, whose heads the graph may have fewer of by now.
        sites: which to lower; None: all of them.
    """

    def __init__(self, masks: Mapping[str, BlockMask], sites: Collection[str] | None = None) -> None:
        self.masks, self.sites = masks, sites
        self.lowered: list[str] = []
        self.refused: list[Refusal] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = {
            name.removesuffix(SUFFIX): value
            for name, value in model.graph.initializers.items()
            if name.endswith(SUFFIX) and any(node.domain == "" for node, _ in value.uses())
        }
        wanted = [site for site in self.masks if site in found and (self.sites is None or site in self.sites)]
        if not wanted:
            return ir.passes.PassResult(model, False)
        probe = Probe(model)
        families = FamilyMasks(model, max(max(mask.queries, mask.keys) for mask in self.masks.values()), probe)
        for site in wanted:
            try:
                cores = match(found[site], self.masks[site], probe)
            except NoMatchError as error:
                self.refused.append(Refusal(frozenset((site,)), error.op, error.name, error.why))
                continue
            for number, core in enumerate(cores):
                _lower(model, f"{site}.{number}" if number else site, core, families)
            self.lowered.append(site)
        common.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, bool(self.lowered))


def _lower(model: ir.Model, site: str, core: MaskedAttentionMatch, families: FamilyMasks) -> None:
    graph, found = model.graph, core.operands
    before = found.output.producer()
    assert before is not None
    family = families.read(found.addends, before, causal_too=not core.mask.memory and not core.persistent)
    function = block_sparse_attention(
        core.mask,
        *core.dims,
        scale=found.scale,
        causal=family.causal,
        row=family.row is not None,
        full=family.heads,
        persistent=core.persistent,
        site=site,
        opset=max(opset(before), OPSET),
        dtype=found.query.dtype or ir.DataType.FLOAT,
    )
    operands = [_tokens(value, before) for value in (found.query, found.key, found.value)]
    extra = [value for value in (family.row, family.full) if value is not None]
    node = call(function, [*operands, core.blocks, *extra])
    node.name = f"{site}.attention"
    back = ir.node("Transpose", node.outputs, {"perm": _SWAP})
    graph.insert_before(before, [node, back])
    for value in (node.outputs[0], back.outputs[0]):
        value.type = found.output.type
    found.output.replace_all_uses_with(back.outputs[0])
    for guard, position in core.guards:
        kept = guard.inputs[position]
        assert kept is not None
        guard.outputs[0].replace_all_uses_with(kept)
    for reshape in core.idle:
        source = reshape.inputs[0]
        assert source is not None
        reshape.outputs[0].replace_all_uses_with(source)
    for reader, _ in list(back.outputs[0].uses()):
        if reader.op_type == "Transpose" and reader.attributes.get_ints("perm", ()) == _SWAP:
            reader.outputs[0].replace_all_uses_with(node.outputs[0])
    model.functions[function.identifier()] = function
    graph.opset_imports[function.domain] = 1


def _tokens(value: ir.Value, before: ir.Node) -> ir.Value:
    """`[batch, head, position, dim]` as `[batch, position, head, dim]`."""
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and node.attributes.get_ints("perm", ()) == _SWAP:
        source = node.inputs[0]
        assert source is not None
        return source
    made = ir.node("Transpose", [value], {"perm": _SWAP})
    assert before.graph is not None
    before.graph.insert_before(before, made)
    made.outputs[0].type = value.type
    return made.outputs[0]
