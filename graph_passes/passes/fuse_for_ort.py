"""Fuse for ONNX Runtime: apply onnxscript's rules for `com.microsoft`, except to block-sparse attention."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from graph_passes.flow.caches import read_caches
from graph_passes.passes.base import GraphPass, ReportedResult
from graph_passes.passes.fuse_cached_attention import FuseCachedAttention
from graph_passes.passes.fuse_rotary_embedding import FuseRotaryEmbedding
from graph_passes.passes.merge_reshapes import MergeReshapes
from graph_passes.passes.pack_attention import PackAttention
from graph_passes.passes.prefusion import PrepareForFusion
from graph_passes.passes.remove_idle_expands import RemoveIdleExpands
from graph_passes.passes.rotate_in_attention import RotateInAttention


class FuseForOrt(GraphPass[Mapping[str, int]]):
    """Replace attention, normalization and activation by ONNX Runtime's fused operators.

    Args:
        in_place: whether attentions may write into the memory of caches; see `FuseCachedAttention`.

    Cases:
        1. A graph that reads caches is rewritten by `FuseRotaryEmbedding`, `FuseCachedAttention`, `MergeReshapes`,
           `RotateInAttention` and `PackAttention`: a call that computes one token spends as much time on small
           operators as on products.
        2. The graph is rewritten by `PrepareForFusion`, onnxscript's rules, and `RemoveIdleExpands`, in that order.
        3. Bodies of local functions are set aside while those rules run: the optimizer would inline them, and would
           match the attention inside the body of block-sparse attention.

    The report says how often each fusion rule of onnxscript applied, by the rule's name; other passes log theirs.

    The caller has to compare the outputs: onnxscript does not prove its rewrites, and raises any exception on graphs
    that its rules do not expect.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    def call(self, model: ir.Model) -> ReportedResult[Mapping[str, int]]:
        from onnxscript.rewriter.ort_fusions import optimize_for_ort

        if has_caches := bool(read_caches(model)):
            CommonSubexpressionEliminationPass()(model)  # layers compute the tables of positions anew
            FuseRotaryEmbedding()(model)
        FuseCachedAttention(in_place=self._in_place)(model)
        if has_caches:
            MergeReshapes()(model)
            RotateInAttention()(model)
            PackAttention()(model)
        PrepareForFusion()(model)
        functions, imports = dict(model.functions), dict(model.opset_imports)
        model.functions.clear()
        fused, counts = optimize_for_ort(model)
        RemoveIdleExpands()(fused)
        fused.functions.update(functions)
        fused.opset_imports.update({domain: imports[domain] for domain, _, _ in functions})
        applied = {name: count for name, count in counts.items() if count}
        return ReportedResult(fused, True, applied)
