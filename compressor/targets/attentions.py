"""The attentions of a graph that a runtime could fuse."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes import GraphSite, find_attention
from graph_passes.block_sparse.function import is_block_sparse
from graph_passes.passes import Normalize


def fusible_attentions(model: ir.Model) -> list[GraphSite]:
    """The attentions of a graph except block-sparse ones, whose MatMuls no runtime fuses; the graph is normalized."""
    Normalize()(model)
    return [site for site in find_attention(model) if not is_block_sparse(site.output.producer())]
