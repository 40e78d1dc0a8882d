"""Every operator of the table against ONNX Runtime, and its gradients against finite differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor

from compressor.errors import ErrorCode, InputError
from compressor.graph.operators import OPERATORS, executor, supported
from tests.graph.operator_cases import CASES, Case, case, floats, ints, scalar

Key = tuple[str, str]
TOLERANCE = 1e-5
"""Largest difference of two tensors, relative to the largest value."""

SEQUENCES = {("", name) for name in ("SplitToSequence", "SequenceConstruct", "SequenceAt", "ConcatFromSequence")}
"""Operators whose values are no tensors: `test_sequences`."""
CONSTANT: set[Key] = {
    *[("", name) for name in ("And", "ArgMax", "ArgMin", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor")],
    *[("", name) for name in ("Constant", "ConstantOfShape", "Equal", "EyeLike", "Greater", "GreaterOrEqual", "IsInf")],
    *[("", name) for name in ("IsNaN", "Less", "LessOrEqual", "NonZero", "Not", "Or", "QuantizeLinear", "Range")],
    *[("", name) for name in ("Shape", "Size", "Xor")],
    ("com.microsoft", "QuantizeLinear"),
}
"""Operators without gradients."""


def node_of(key: Key, inputs: Sequence[Any], attributes: dict[str, Any], outputs: Sequence[bool]) -> ir.Node:
    """A node whose outputs are those of a graph, except omitted ones."""
    values = [None if x is None else ir.val(f"x{i}") for i, x in enumerate(inputs)]
    results = [ir.val(f"y{i}" if present else "") for i, present in enumerate(outputs)]
    node = ir.Node(key[0], key[1], values, ir.convenience.convert_attributes(attributes), outputs=results, name="node")
    ir.Graph([x for x in values if x is not None], [y for y in results if y.name], nodes=[node], name="graph")
    return node


def tensors(inputs: Sequence[np.ndarray | None], dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """Inputs as tensors, floats of another type where that is requested."""
    values = [None if x is None else torch.from_numpy(np.array(x)) for x in inputs]
    return [x.to(dtype) if x is not None and x.dtype == torch.float32 else x for x in values]


def executed(key: Key, example: Case) -> list[np.ndarray]:
    """The present outputs of a case in PyTorch."""
    run = executor(node_of(key, example.inputs, example.attributes, example.outputs), example.opset)
    outputs = run(tensors(example.inputs))
    assert len(outputs) == len(example.outputs)
    return [y.numpy() for y, present in zip(outputs, example.outputs, strict=True) if y is not None and present]


def in_onnxruntime(key: Key, example: Case) -> list[np.ndarray]:
    """The present outputs of a case in ONNX Runtime."""
    node = node_of(key, example.inputs, example.attributes, example.outputs)
    graph = node.graph
    assert graph is not None
    arrays = [x for x in example.inputs if x is not None]
    for value, array in zip(graph.inputs, arrays, strict=True):
        value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
    graph.opset_imports.update({"": example.opset, "com.microsoft": 1})
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    feeds = {value.name: array for value, array in zip(graph.inputs, arrays, strict=True)}
    return session.run(None, feeds)


def assert_equal(actual: list[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(actual) == len(expected)
    for y, reference in zip(actual, expected, strict=True):
        assert y.shape == reference.shape
        assert y.dtype == reference.dtype
        scale = np.abs(reference[np.isfinite(reference)]).max(initial=1e-6) if y.dtype.kind == "f" else 0
        np.testing.assert_allclose(y, reference, rtol=0, atol=TOLERANCE * float(scale))


def examples(key: Key, seeds: Sequence[int]) -> Iterator[Case]:
    for seed in seeds:
        yield from CASES[key](np.random.default_rng(seed))


KEYS = sorted(OPERATORS.keys() - SEQUENCES)
BY_KEY = pytest.mark.parametrize("key", KEYS, ids=lambda key: ".".join(filter(None, key)))


def test_every_operator_has_cases() -> None:
    assert CASES.keys() == OPERATORS.keys() - SEQUENCES


@BY_KEY
def test_outputs_equal_those_of_onnxruntime(key: Key) -> None:
    for example in examples(key, [0]):
        expected = example.expected or in_onnxruntime(key, example)
        assert_equal(executed(key, example), expected)


@pytest.mark.zoo
@BY_KEY
def test_outputs_equal_those_of_onnxruntime_for_many_seeds(key: Key) -> None:
    for example in examples(key, range(1, 30)):
        expected = example.expected or in_onnxruntime(key, example)
        assert_equal(executed(key, example), expected)


@pytest.mark.parametrize("key", sorted(set(KEYS) - CONSTANT), ids=lambda key: ".".join(filter(None, key)))
def test_gradients_equal_finite_differences(key: Key) -> None:
    checked = 0
    for example in examples(key, [0]):
        run = executor(node_of(key, example.inputs, example.attributes, example.outputs), example.opset)
        inputs = tensors(example.inputs, torch.float64)
        constants = {*OPERATORS[key].host, *example.constants}
        floating = [x for i, x in enumerate(inputs) if i not in constants and x is not None]
        variables = [x for x in floating if x.is_floating_point() and x.numel()]
        for x in variables:
            x.requires_grad_()

        def function(*_: Tensor, run: Any = run, inputs: Any = inputs) -> list[Tensor]:
            return [y for y in run(inputs) if y is not None and y.dtype == torch.float64 and y.requires_grad]

        if variables and function():
            checked += torch.autograd.gradcheck(function, variables, fast_mode=True)
    assert checked


@BY_KEY
def test_runs_in_bfloat16_under_autocast(key: Key) -> None:
    for example in examples(key, [0]):
        run = executor(node_of(key, example.inputs, example.attributes, example.outputs), example.opset)
        expected = executed(key, example)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = run(tensors(example.inputs))
        actual = [y for y, present in zip(outputs, example.outputs, strict=True) if y is not None and present]
        for y, reference in zip(actual, expected, strict=True):
            assert y.shape == reference.shape
            if reference.dtype == np.float32:
                assert np.abs(y.float().numpy() - reference).max(initial=0) <= 0.1 * np.abs(reference).max(initial=1)


def refused(key: Key, *inputs: Any, outputs: int = 1, opset: int = 22, **attributes: Any) -> InputError:
    node = node_of(key, inputs, attributes, [True] * outputs)
    with pytest.raises(InputError) as error:
        executor(node, opset)
    assert error.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert error.value.details == {"op_type": key[1], "node": "node"}
    return error.value


@pytest.mark.parametrize("name", ["If", "Loop", "Scan", "Bernoulli", "LSTM", "Unknown", "MatMulInteger"])
def test_refuses_operators_without_an_entry(name: str) -> None:
    refused(("", name), 1)
    assert name not in supported()


def test_refuses_what_an_operator_does_not_take() -> None:
    refused(("", "Relu"), 1, alpha=0.5)
    refused(("", "Relu"), 1, 1)
    refused(("", "MaxPool"), 1, outputs=2, kernel_shape=[2])
    refused(("", "MaxPool"), 1)
    refused(("", "Cast"), 1, to=ir.DataType.STRING.value)
    refused(("", "BatchNormalization"), 1, 1, 1, 1, 1, training_mode=1)
    refused(
        ("com.microsoft", "GroupQueryAttention"), 1, 1, 1, 1, 1, 1, 1, num_heads=1, kv_num_heads=1, smooth_softmax=1
    )


def test_sequences() -> None:
    def run(name: str, *inputs: Any, **attributes: Any) -> Any:
        return executor(node_of(("", name), inputs, attributes, [True]), 18)(inputs)[0]

    x = torch.arange(12.0).reshape(2, 6)
    parts = run("SplitToSequence", x, torch.tensor([1, 2, 3]), axis=1)
    assert [part.shape[1] for part in parts] == [1, 2, 3]
    assert [part.shape for part in run("SplitToSequence", x, torch.tensor(4), axis=1)] == [(2, 4), (2, 2)]
    assert [part.shape for part in run("SplitToSequence", x, axis=0, keepdims=0)] == [(6,), (6,)]
    assert run("SequenceAt", parts, torch.tensor(-1)).equal(x[:, 3:])
    assert run("ConcatFromSequence", parts, axis=1).equal(x)
    assert run("ConcatFromSequence", run("SequenceConstruct", x, x), axis=0, new_axis=1).shape == (2, 2, 6)


def test_sizes_stay_on_the_cpu_and_constants_follow_the_accelerator() -> None:
    meta = torch.device("meta")
    run = executor(node_of(("", "Shape"), [0], {}, [True]), 18)
    assert run([torch.empty(2, 3, device=meta)])[0].tolist() == [2, 3]  # type: ignore[union-attr]
    for key, example in (
        (("", "Add"), case(floats(np.random.default_rng(), 2, 3), floats(np.random.default_rng(), 3))),
        (("", "Gather"), case(floats(np.random.default_rng(), 2, 3), ints(0, 1))),
        (("", "Reshape"), case(floats(np.random.default_rng(), 2, 3), ints(3, 2))),
        (("", "Pow"), case(floats(np.random.default_rng(), 2, 3), scalar(2, np.float32))),
    ):
        inputs = tensors(example.inputs)
        assert inputs[0] is not None
        inputs[0] = inputs[0].to(meta)
        (output,) = executor(node_of(key, example.inputs, {}, [True]), 18)(inputs)
        assert output is not None
        assert output.device == meta
