"""Facts about a graph that do not depend on a runtime: its hash, its attentions, whether it is quantized."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx_ir as ir

from graph_passes import GraphSite, data_files, find_attention, load
from graph_passes.block_sparse.function import is_block_sparse
from graph_passes.passes import Normalize

_QUANTIZATION = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))
_CHUNK = 1 << 20


def fusible_attentions(model: ir.Model) -> list[GraphSite]:
    """The attentions of a graph except block-sparse ones, which no runtime fuses. The graph is normalized in place."""
    Normalize()(model)
    return [site for site in find_attention(model) if not is_block_sparse(site.output.producer())]


def is_quantized(model: ir.Model) -> bool:
    """Whether a graph has quantization nodes."""
    return any(node.op_type in _QUANTIZATION for node in model.graph)


def digest(*paths: Path) -> str:
    """Hash of the contents of files, in order."""
    sha = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                sha.update(chunk)
    return f"sha256:{sha.hexdigest()}"


def graph_digest(graph: Path) -> str:
    """Hash of a graph with its external data."""
    return digest(graph, *sorted(data_files(load(graph))))
