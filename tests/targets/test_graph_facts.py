"""Facts about graphs: hashes of their files, attentions that can be fused, and quantization."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compressor.targets.graph_facts import digest, fusible_attentions, graph_digest, is_quantized
from graph_passes import data_files, load
from tests.targets.graphs import masked, parsed, pruned


def test_the_hash_of_a_graph_covers_its_external_data(tmp_path: Path) -> None:
    source, graph = pruned("bert").shrunk, tmp_path / "graph.onnx"
    shutil.copy(source, graph)
    (data,) = data_files(load(source))
    copy = Path(shutil.copy(data, tmp_path / data.name))
    assert graph_digest(graph) == graph_digest(source) == digest(graph, copy)
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    assert graph_digest(graph) != graph_digest(source)


def test_block_sparse_attentions_cannot_be_fused() -> None:
    graphs = masked()
    block_sparse, attentions = len(graphs.plan.masks), len(graphs.plan.sites)
    assert 0 < block_sparse < attentions
    assert len(fusible_attentions(load(graphs.shrunk))) == attentions - block_sparse
    assert len(fusible_attentions(load(graphs.reference))) == attentions


@pytest.mark.parametrize(("operator", "quantized"), [("DequantizeLinear", True), ("Mul", False)])
def test_quantization_nodes_make_a_graph_quantized(operator: str, quantized: bool) -> None:
    tensor = "uint8[B] x" if quantized else "float[B] x"
    model = parsed(f"y = {operator}(x, s)", tensor, "float[B] y", "float s = {0.5}")
    assert is_quantized(model) is quantized
