"""Weights and arithmetic in fp16 or bf16; inputs and outputs keep their types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graph_passes import BlockMask
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model
from graph_passes.block_sparse.spec import AttentionSpec
from graph_passes.passes import LowerOpset, NarrowIntegers, Normalize, ReducePrecision
from tests.graph_passes.graphs import draw, error, graph, operators, run
from tests.graph_passes.layers import LAYERS, SOME_LAYERS
from tests.graph_passes.passes.checks import assert_untouched

FP16, BF16 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
SIZES = {"B": 2, "S": 5}


def normal_layer(name: str) -> ir.Model:
    model = LAYERS[name].graph()
    Normalize()(model)
    return model


@pytest.mark.parametrize("name", SOME_LAYERS)
def test_fp16_is_close(name: str) -> None:
    model = normal_layer(name)
    result = ReducePrecision()(model.clone())
    assert result.modified
    weights = [key for key, value in model.graph.initializers.items() if value.dtype == ir.DataType.FLOAT]
    assert set(weights) <= set(result.report)
    assert [value.dtype for value in (*result.model.graph.inputs, *result.model.graph.outputs)] == [
        value.dtype for value in (*model.graph.inputs, *model.graph.outputs)
    ]
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    feeds = draw(model, SIZES)
    assert error(run(result.model, feeds), run(model, feeds)) <= 2e-2
    assert_untouched(ReducePrecision(), result.model)


@pytest.mark.parametrize("name", SOME_LAYERS)
def test_a_layer_in_bf16_is_a_valid_graph_without_fp16(name: str) -> None:
    result = ReducePrecision(BF16)(normal_layer(name))
    values = [output for node in result.model.graph for output in node.outputs]
    dtypes = {value.dtype for value in (*values, *result.model.graph.initializers.values())}
    assert BF16 in dtypes
    assert FP16 not in dtypes
    # TensorRT computes `Cos`, `Sin` and `Einsum` in bf16, the ONNX standard does not.
    full_check = not {"Cos", "Einsum"} & set(operators(result.model))
    onnx.checker.check_model(ir.to_proto(result.model), full_check=full_check)
    assert_untouched(ReducePrecision(BF16), result.model)


def test_bf16_rounds_the_original_weights() -> None:
    weight = np.array([[1e-9, 1e5], [1.001, -3.0]], np.float32)
    body = "h = MatMul(x, w)  y = Add(h, h)"
    model = graph(body, "float[2, 2] w", inputs="float[B, 2] x", outputs="float[B, 2] y")
    model.graph.initializers["w"].const_value = ir.tensor(weight, name="w")
    reduced = ReducePrecision(BF16)(model).model
    content = reduced.graph.initializers["w"].const_value
    assert content is not None
    np.testing.assert_array_equal(content.numpy(), weight.astype(ml_dtypes.bfloat16))
    assert operators(reduced) == ["Cast", "MatMul", "Add", "Cast"]


def test_numbers_beyond_fp16_are_clipped() -> None:
    model = graph("y = Add(x, low)", "float low = {-3.4e38}")
    reduced = ReducePrecision()(model).model
    low = reduced.graph.initializers["low"].const_value
    assert low is not None
    assert float(low.numpy()) == -65504.0
    np.testing.assert_allclose(run(reduced, {"x": np.ones((1, 1, 8), np.float32)})[0], -65504.0, rtol=1e-3)


def test_bodies_of_block_sparse_attention_are_in_fp16() -> None:
    mask = BlockMask(np.random.default_rng(0).random((2, 3, 3)) < 0.6, 8)
    model = standalone_model(block_sparse_attention(AttentionSpec(mask, 4, 6, 0.5, full_heads=2), row=True))
    shapes = {"query": (1, 20, 2, 4), "key": (1, 20, 2, 4), "value": (1, 20, 2, 6), "row": (1, 1, 1, 20)}
    shapes["full"] = (1, 2, 20, 20)
    for value in model.graph.inputs:
        value.shape = ir.Shape(shapes.get(str(value.name), mask.kept.shape))
    model.graph.outputs[0].shape = ir.Shape((1, 20, 2, 6))
    kept = ir.Value(name="kept", const_value=ir.tensor(mask.kept, name="kept"))
    model.graph.register_initializer(kept)
    model.graph[0].replace_input_with(3, kept)
    model.graph.inputs.pop(3)
    rng = np.random.default_rng(1)
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    expected = run(model, feeds)
    reduced = ReducePrecision()(model.clone()).model
    (function,) = reduced.functions.values()
    constants = [node.attributes["value"].as_tensor() for node in function if node.op_type == "Constant"]
    assert {tensor.dtype for tensor in constants} == {ir.DataType.INT64, FP16}
    outputs = run(reduced, feeds)
    assert np.isfinite(outputs[0]).all()
    assert error(outputs, expected) <= 2e-2


def test_bf16_needs_inlined_functions() -> None:
    model = standalone_model(
        block_sparse_attention(AttentionSpec(BlockMask(np.ones((1, 2, 2), np.bool_), 8), 4, 6, 0.5))
    )
    with pytest.raises(ir.passes.PreconditionError, match="local functions"):
        ReducePrecision(BF16)(model)


def test_another_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="FLOAT16 or BFLOAT16"):
        ReducePrecision(ir.DataType.FLOAT)


def test_passes_of_a_target_run_in_sequence() -> None:
    body = "rows = Gather(table, ids)  y = ReduceMean <keepdims = 1> (rows, last)"
    model = graph(body, "float[9, 4] table, int64[1] last = {-1}", inputs="int64[B, S] ids", outputs="float[B, S, 1] y")
    ids = np.array([[0, 8, 3]])
    expected = run(model, {"ids": ids})
    reduced = NarrowIntegers()(ReducePrecision()(LowerOpset()(model))).model
    assert reduced.opset_imports[""] == 17
    assert error(run(reduced, {"ids": ids.astype(np.int32)}), expected) <= 2e-2
