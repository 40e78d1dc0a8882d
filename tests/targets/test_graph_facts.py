"""Facts about graphs: hashes of their files, attentions that can be fused, and quantization."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir
import pytest

from compressor.targets.graph_facts import (
    digest,
    float_matmuls,
    fusible_attentions,
    graph_digest,
    is_quantized,
    quantized_matmuls,
    weight_matmuls,
)
from graph_passes import data_files, load
from tests.targets.graphs import masked, parsed, pruned

ACTIVATION = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)  "
WEIGHT = "d = DequantizeLinear(i, ws)  "
SCALES = "float s = {0.1}, uint8 z = {128}, float ws = {0.1}, int8[2, 2] i = {1, 2, 3, 4}"


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


def products(body: str, weights: str = SCALES, inputs: str = "float[B, 2] x") -> tuple[list[str], list[str], list[str]]:
    """Names of the outputs of the products of a graph: with weights, quantized, in floats."""
    model = parsed(body, inputs, "float[B, N] y", weights)
    return names(weight_matmuls(model)), names(quantized_matmuls(model)), names(float_matmuls(model))


def names(nodes: Iterable[ir.Node]) -> list[str]:
    return [str(node.outputs[0].name) for node in nodes]


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(x, w)",
        "y = Gemm(x, w, b)",
        "y = Gemm <transB = 1> (x, w)",
        "y = com.microsoft.FusedMatMul <transB = 1> (x, w)",
        "y = com.microsoft.Attention <num_heads = 1> (x, w, b)",
        "t = Transpose(w)  y = MatMul(x, t)",
        "r = Reshape(w, shape)  t = Transpose(r)  y = Gemm(x, t)",
    ],
)
def test_a_product_with_constant_weights_is_a_product_in_floats(body: str) -> None:
    assert products(body, "float[2, 2] w, float[2] b, int64[2] shape = {2, 2}") == (["y"], [], ["y"])


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("y = MatMul(x, v)", "float[B, 2] x, float[2, 2] v"),
        ("t = Transpose(x)  y = MatMul(x, t)", "float[B, 2] x"),
        ("c = Relu(w)  y = MatMul(x, c)", "float[B, 2] x"),
        ("y = MatMul(x, row)", "float[B, 2] x"),
        ("y = MatMul(x, stack)", "float[B, 2] x"),
        ("y = Mul(x, w)", "float[B, 2] x"),
        ("y = Conv(x, stack)", "float[B, 2, 5] x"),
    ],
    ids=["input", "activations", "computed", "vector", "stack", "elementwise", "convolution"],
)
def test_other_operators_are_no_products_with_weights(body: str, inputs: str) -> None:
    assert products(body, "float[2, 2] w, float[2] row, float[2, 2, 2] stack", inputs) == ([], [], [])


@pytest.mark.parametrize(
    "body",
    [
        f"{ACTIVATION}{WEIGHT}y = MatMul(a, d)",
        f"{ACTIVATION}{WEIGHT}y = Gemm <transB = 1> (a, d)",
        f"{ACTIVATION}{WEIGHT}t = Transpose(d)  y = MatMul(a, t)",
        f"t = Transpose(i)  d = DequantizeLinear(t, ws)  {ACTIVATION}y = MatMul(a, d)",
        f"{ACTIVATION}{WEIGHT}r = Reshape(a, shape)  y = MatMul(r, d)",
    ],
    ids=["product", "general", "transposed", "transposed-integers", "reshaped-activation"],
)
def test_a_product_of_two_dequantized_factors_is_quantized(body: str) -> None:
    assert products(body, f"{SCALES}, int64[2] shape = {{-1, 2}}") == (["y"], ["y"], [])


@pytest.mark.parametrize(
    "body",
    [
        f"{ACTIVATION}y = MatMul(a, w)",
        f"{WEIGHT}y = MatMul(x, d)",
        f"{ACTIVATION}{WEIGHT}c = Relu(a)  y = MatMul(c, d)",
    ],
    ids=["activation", "weight", "operator-between"],
)
def test_a_product_of_one_dequantized_factor_stays_in_floats(body: str) -> None:
    assert products(body, f"{SCALES}, float[2, 2] w") == (["y"], [], ["y"])


def test_a_product_of_two_quantized_activations_has_no_weights() -> None:
    assert products(f"{ACTIVATION}t = Transpose(a)  y = MatMul(a, t)") == ([], [], [])


def test_products_are_listed_in_the_order_of_the_graph() -> None:
    body = f"""
        {ACTIVATION}{WEIGHT}first = MatMul(a, d)  second = MatMul(first, w)
        q2 = QuantizeLinear(second, s, z)  a2 = DequantizeLinear(q2, s, z)  third = Gemm(a2, d)
        scores = MatMul(third, x)  y = MatMul(scores, w)
    """
    every, quantized, floats = products(body, f"{SCALES}, float[2, 2] w", "float[2, 2] x")
    assert every == ["first", "second", "third", "y"]
    assert quantized == ["first", "third"]
    assert floats == ["second", "y"]


def test_products_of_branches_are_not_counted() -> None:
    body = """
        largest = ReduceMax <keepdims = 0> (x)  is_positive = Greater(largest, zero)
        y = If <
            then_branch = positive () => (float[B, 2] p) { p = MatMul(x, w) },
            else_branch = negative () => (float[B, 2] n) { n = Relu(x) }
        > (is_positive)
    """
    assert products(body, "float zero = {0.0}, float[2, 2] w") == ([], [], [])


def test_finding_products_changes_nothing() -> None:
    model = parsed(f"{ACTIVATION}{WEIGHT}y = MatMul(a, d)", "float[B, 2] x", "float[B, 2] y", SCALES)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert names(quantized_matmuls(model)) == ["y"]
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
