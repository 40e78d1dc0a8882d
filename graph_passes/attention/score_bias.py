"""The bias of the scores of ONNX Runtime's fused attention."""

from __future__ import annotations

import onnx_ir as ir

SCORE_BIAS = 5
"""Input of `Attention` and of `MultiHeadAttention` that is added to the scores."""


def has_score_bias(node: ir.Node) -> bool:
    """Whether a node is ONNX Runtime's fused attention and adds something to its scores."""
    # ONNX has an operator of the same name, with other inputs.
    is_fused = node.op_type == "Attention" and node.domain == "com.microsoft"
    return is_fused and len(node.inputs) > SCORE_BIAS and node.inputs[SCORE_BIAS] is not None
