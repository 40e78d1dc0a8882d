"""64-bit inputs and outputs become 32-bit; the graph computes in 64 bits as before."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from graph_passes.passes import NarrowIntegers
from tests.graph_passes.graphs import graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched

LOOKUP = "rows = Gather(table, ids)  sum = Add(ids, one)  y = Add(rows, x)"
WEIGHTS = "float[9, 4] table, int64 one = {1}"
INPUTS = "int64[B, S] ids, float[B, S, 4] x"
OUTPUTS = "float[B, S, 4] y, int64[B, S] sum"


def test_inputs_and_outputs_become_32_bit() -> None:
    model = graph(LOOKUP, WEIGHTS, inputs=INPUTS, outputs=OUTPUTS)
    result = NarrowIntegers()(model.clone())
    assert result.modified
    assert result.report == ("ids", "sum")
    values = [*result.model.graph.inputs, *result.model.graph.outputs]
    assert {value.name: value.dtype for value in values} == {
        "ids": ir.DataType.INT32,
        "x": ir.DataType.FLOAT,
        "y": ir.DataType.FLOAT,
        "sum": ir.DataType.INT32,
    }
    assert operators(result.model) == ["Cast", *operators(model), "Cast"]
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    assert_untouched(NarrowIntegers(), result.model)


def test_the_numbers_stay() -> None:
    model = graph(LOOKUP, WEIGHTS, inputs=INPUTS, outputs=OUTPUTS)
    ids, x = np.array([[0, 8, 3]]), np.ones((1, 3, 4), np.float32)
    expected = run(model, {"ids": ids, "x": x})
    outputs = run(NarrowIntegers()(model.clone()).model, {"ids": ids.astype(np.int32), "x": x})
    assert [output.dtype for output in outputs] == [np.float32, np.int32]
    for output, reference in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output, reference)


def test_an_input_that_is_an_output_stays_one() -> None:
    model = graph("y = Identity(x)", inputs="int64[B] ids, float[B] x", outputs="float[B] y, int64[B] ids")
    result = NarrowIntegers()(model.clone())
    assert result.report == ("ids",)
    assert result.model.graph.outputs[1] is result.model.graph.inputs[0]
    assert result.model.graph.outputs[1].dtype == ir.DataType.INT32


def test_a_graph_without_64_bit_inputs_stays() -> None:
    assert_untouched(NarrowIntegers(), graph("y = Relu(x)"))
