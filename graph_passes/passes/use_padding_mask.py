"""Use the padding mask: give it to a fused attention in place of the numbers that are computed from it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.attention.mask_meaning import MaskMeaning, mask_meaning
from graph_passes.attention.operands import SCORE_BIAS, has_score_bias
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape

_MASK = 3
"""Input of `Attention` for the padding mask."""
_LONGEST = 4096
"""Number of positions for which a mask must equal the padding mask, so that a sliding window is detected."""


class UsePaddingMask(GraphPass[Names]):
    """Let ONNX Runtime's `Attention` read the padding mask, where what is added to its scores means nothing else.

    onnxruntime's quantizer then keeps the attention fused: `QAttention` has an input for this mask, none for a bias.

    Cases:
        1. The bias equals a padding mask (see `mask_meaning`): the attention reads the graph's input, cast to int32.
           Nodes that only computed the bias are removed.
        2. The bias has another meaning, e.g. causality or distances: it stays.
        3. The attention has a padding mask or past keys already: it stays.

    The report has the names of the attentions that read the padding mask now.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        meanings: dict[ir.Value, MaskMeaning | None] = {}
        masks: dict[ir.Value, ir.Value] = {}
        attentions = []
        for node in list(model.graph):
            if not has_score_bias(node) or any(value is not None for value in node.inputs[_MASK:SCORE_BIAS]):
                continue
            bias = node.inputs[SCORE_BIAS]
            assert bias is not None
            if bias not in meanings:
                meanings[bias] = mask_meaning(model, bias, _LONGEST)
            meaning = meanings[bias]
            if meaning is None or meaning.causal or meaning.padding is None:
                continue
            if meaning.padding not in masks:
                masks[meaning.padding] = _cast(meaning.padding, node)
            _read(node, masks[meaning.padding])
            attentions.append(node.name)
        if attentions:
            RemoveUnusedNodesPass()(model)
        return changed(model, attentions)


def _cast(padding: ir.Value, before: ir.Node) -> ir.Value:
    """The padding mask in int32, computed before a node."""
    op = Tape()
    cast = op("Cast", padding, to=ir.DataType.INT32)
    cast.name = f"{padding.name}.int32"
    op.insert_before(before)
    return cast


def _read(node: ir.Node, mask: ir.Value) -> None:
    """Case 1."""
    node.replace_input_with(_MASK, mask)
    node.replace_input_with(SCORE_BIAS, None)
    # As exported masks have it: the default of -10,000 would keep the order of scores in a row without any key.
    node.attributes["mask_filter_value"] = ir.AttrFloat32("mask_filter_value", float(np.finfo(np.float32).min))
