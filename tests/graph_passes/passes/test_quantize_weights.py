"""Matmuls multiply by weights of few bits, and compute what a float matmul by the rounded weights does."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.passes import QuantizeWeights, ReturnToFloats
from graph_passes.quantizers.weight_blocks import BITS, BLOCKS, block_of, floats_of_blocks, round_blocks
from tests.graph_passes.graphs import graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched

ROUNDED_ACTIVATIONS = 2e-2
"""Largest relative error of a product by activations of 8 bits."""
WIDTHS = [(1, 1), (8, 5), (32, 3), (33, 7), (40, 64), (3 * 64, 70), (576, 5), (3 * 128 + 5, 70)]


def matmul(inputs: int, outputs: int, body: str = "y = MatMul(x, w)", *weights: str) -> ir.Model:
    """A graph with random weights `w`, whose nodes have the names of their outputs."""
    shape = f"{outputs}, {inputs}" if "transB = 1" in body else f"{inputs}, {outputs}"
    rows = "B" if "Gemm" in body else "B, S"
    ends = f"float[{rows}, {inputs}] x", f"float[{rows}, {outputs}] y"
    model = graph(body, f"float[{shape}] w", *weights, inputs=ends[0], outputs=ends[1])
    for node in model.graph:
        node.name = node.outputs[0].name
    return model


def bits_of(model: ir.Model) -> dict[str | None, int]:
    return {node.name: node.attributes.get_int("bits") for node in model.graph if node.op_type == "MatMulNBits"}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_rounded_weights_are_close_to_the_weights(bits: int, widths: tuple[int, int]) -> None:
    weights = np.random.default_rng(0).standard_normal(widths).astype(np.float32)
    packed, scales = round_blocks(weights, bits)
    block = block_of(widths[0])
    assert packed.dtype == np.uint8
    assert packed.shape == (widths[1], -(-widths[0] // block), block * bits // 8)
    rounded = floats_of_blocks(packed, scales, bits, widths[0])
    steps = np.repeat(np.abs(scales), block, axis=1)[:, : widths[0]].T
    clipped = 2.5 if bits == 4 else 1  # the largest level is a step less than the lowest; a smaller scale clips more
    assert (np.abs(rounded - weights) <= clipped * 1.01 * steps).all()
    if widths[0] * widths[1] > block:
        assert np.linalg.norm(rounded - weights) < (0.11 if bits == 4 else 0.007) * np.linalg.norm(weights)


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_outliers_of_other_blocks_do_not_matter(bits: int) -> None:
    block = BLOCKS[0]
    weights = np.random.default_rng(0).standard_normal((2 * block, 3)).astype(np.float32)
    alone = floats_of_blocks(*round_blocks(weights, bits), bits, 2 * block)
    weights[:block] = 0
    weights[0, 0] = 1e4
    rounded = floats_of_blocks(*round_blocks(weights, bits), bits, 2 * block)
    assert np.array_equal(rounded[block:], alone[block:])
    assert not rounded[:block, 1:].any()


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_blocks_are_as_large_as_few_added_zeros_allow(inputs: int) -> None:
    block = block_of(inputs)
    added = {size: -(-inputs // size) * size - inputs for size in BLOCKS}
    assert block == max((size for size in BLOCKS if 8 * added[size] <= inputs), default=min(BLOCKS))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_the_operator_computes_the_product_by_the_rounded_weights(bits: int, widths: tuple[int, int]) -> None:
    model = matmul(*widths)
    result = QuantizeWeights(bits)(model.clone())
    assert (dict(result.report.bits), bits_of(result.model)) == ({"w": bits}, {"y": bits})
    assert "w" not in result.model.graph.initializers
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 9, widths[0])).astype(np.float32)}
    weights = model.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    expected = feeds["x"] @ floats_of_blocks(*round_blocks(weights, bits), bits, widths[0])
    (output,) = run(result.model, feeds)
    assert np.abs(output - expected).max() <= ROUNDED_ACTIVATIONS * np.abs(expected).max()
    floats = ReturnToFloats(("y",))(result.model.clone())
    assert (operators(floats.model), floats.report) == (["MatMul"], ("y",))
    assert run(floats.model, feeds)[0] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        "y = Gemm <transB = 1> (x, w, b)",
        "y = Gemm <alpha = 0.5, beta = 2.0> (x, w, b)",
        "y = Gemm (x, w)",
        "t = Transpose <perm = [1, 0]> (w)  y = MatMul(x, t)",
    ],
)
def test_weights_are_read_in_any_layout(body: str) -> None:
    model = matmul(40, 40, body, "float[40] b" if "b)" in body else "")
    result = QuantizeWeights(8)(model.clone())
    assert list(result.report.bits.values()) == [8]
    shape = (4, 40) if "Gemm" in body else (2, 3, 40)
    feeds = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    (expected,), (output,) = (run(each, feeds) for each in (model, result.model))
    assert np.abs(output - expected).max() <= ROUNDED_ACTIVATIONS * np.abs(expected).max()


def test_each_matrix_has_bits_of_its_own_and_is_stored_once() -> None:
    body = "a = MatMul(x, v)  b = MatMul(a, w)  c = MatMul(b, u)  y = MatMul(c, w)"
    model = matmul(33, 33, body, "float[33, 33] v", "float[33, 33] u")
    result = QuantizeWeights(4, {"v": 8, "u": None})(model)
    assert bits_of(result.model) == {"a": 8, "b": 4, "y": 4}
    assert len(result.model.graph.initializers) == 5
    assert_untouched(QuantizeWeights(4, {"u": None}), result.model)


@pytest.mark.parametrize(
    ("body", "weights"),
    [("y = Gemm <transA = 1> (x, w)", "float[4, 5] w"), ("y = MatMul(x, w)", "float[1, 4, 5] w")],
)
def test_other_products_are_refused_by_name(body: str, weights: str) -> None:
    sizes = "float[4, B] x" if "Gemm" in body else "float[B, S, 4] x"
    model = graph(body, weights, inputs=sizes, outputs="float[B, 5] y" if "Gemm" in body else "float[B, S, 5] y")
    for node in model.graph:
        node.name = "product"
    (refusal,) = assert_untouched(QuantizeWeights(4), model).refused
    assert refusal.node == "product"


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits"):
        QuantizeWeights(4, {"y": 3})
