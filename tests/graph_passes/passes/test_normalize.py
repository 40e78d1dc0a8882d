"""A graph takes the form that the other passes read."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from graph_passes import BlockMask
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model
from graph_passes.block_sparse.spec import AttentionSpec
from graph_passes.passes import Normalize
from tests.graph_passes.graphs import graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched, rewritten

CALL = """
    <ir_version: 10, opset_import: ["" : 18, "local" : 1]>
    g (float[B, 4] x) => (float[B, 4] y) { a = local.twice(x)  y = Relu(a) }
    <domain: "local", opset_import: ["" : 18]> twice (a) => (b) { b = Add(a, a) }
"""


def test_local_functions_are_inlined() -> None:
    result = rewritten(Normalize(), ir.from_proto(onnx.parser.parse_model(CALL)), tolerance=0)
    assert operators(result.model) == ["Add", "Relu"]
    assert not result.model.functions
    assert result.report == 2


def test_calls_of_block_sparse_attention_stay() -> None:
    mask = BlockMask(np.array([[[True, False], [True, True]]]), 8)
    model = standalone_model(block_sparse_attention(AttentionSpec(mask, 4, 6, 0.5)))
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=(1, 11, 1, dim)).astype(np.float32) for dim in (4, 4, 6)]
    feeds = dict(zip(("query", "key", "value"), operands, strict=True)) | {"block_mask": mask.kept}
    expected = run(model, feeds)
    normal = Normalize()(model.clone()).model
    assert operators(normal) == ["BlockSparseAttention"]
    assert len(normal.functions) == 1
    np.testing.assert_array_equal(run(normal, feeds), expected)
    assert_untouched(Normalize(), normal)


def test_a_sequence_of_parts_becomes_a_split() -> None:
    body = """
        parts = SplitToSequence <axis = -1> (x, sizes)
        a = SequenceAt (parts, first)  b = SequenceAt (parts, second)  y = Sub (a, b)
    """
    weights = "int64[2] sizes = {4, 4}, int64 first = {0}, int64 second = {1}"
    result = rewritten(Normalize(), graph(body, weights, outputs="float[B, S, 4] y"), tolerance=0)
    assert operators(result.model) == ["Split", "Sub"]


def test_constants_fold_and_become_initializers() -> None:
    body = """
        one = Constant <value = int64[1] {1}> ()  two = Add (one, one)  four = Mul (two, two)
        shape = Concat <axis = 0> (zero, four, minus)  y = Reshape (x, shape)
    """
    model = graph(body, "int64[1] zero = {0}, int64[1] minus = {-1}", outputs="float[B, 4, N] y")
    result = rewritten(Normalize(), model, sizes=[{"B": 2, "S": 5}], tolerance=0)
    assert operators(result.model) == ["Reshape"]
    (shape,) = result.model.graph.initializers.values()
    assert shape.const_value is not None
    assert shape.const_value.numpy().tolist() == [0, 4, -1]


def test_weights_are_not_folded() -> None:
    model = graph("Wt = Transpose <perm = [1, 0]> (W)  y = MatMul (x, Wt)", "float[8, 8] W")
    assert_untouched(Normalize(), model)


def test_initializers_are_not_inputs() -> None:
    model = graph("y = Mul (x, w)", "float[8] w")
    model.graph.inputs.append(model.graph.initializers["w"])
    result = Normalize()(model)
    assert result.modified
    assert [value.name for value in result.model.graph.inputs] == ["x"]
    assert list(result.model.graph.initializers) == ["w"]


BRANCHES = """
    h = Relu (x) t = Shape (h) d = Gather (t, last)
    s = Shape (x) r = Gather (s, first) c = Gather (s, last)
    {conditions}
    a = If (one) <then_branch = p () => (float[B, S, 8] q) {{ n = Neg (h) q = Abs (n) }},
                  else_branch = e () => (float[B, S, 8] f) {{ f = Identity (h) }}>
    y = If (two) <then_branch = p2 () => (float[B, S, 8] q2) {{ n = Exp (a) q2 = Neg (n) }},
                  else_branch = e2 () => (float[B, S, 8] f2) {{ f2 = Identity (a) }}>
"""
SIZES = "int64 first = {0}, int64 last = {2}, int64 eight = {8}"


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ("one = Equal (c, d) two = Not (one)", ["Relu", "Neg", "Abs"]),
        ("one = Equal (c, d) two = Identity (one)", ["Relu", "Neg", "Abs", "Exp", "Neg"]),
        ("one = Less (c, eight) two = Not (one)", ["Relu", "Exp", "Neg"]),
    ],
)
def test_an_if_on_sizes_that_are_always_the_same_becomes_its_branch(conditions: str, expected: list[str]) -> None:
    result = rewritten(Normalize(), graph(BRANCHES.format(conditions=conditions), SIZES), tolerance=0)
    assert operators(result.model) == expected


def test_an_if_that_some_size_decides_stays() -> None:
    model = graph(BRANCHES.format(conditions="one = Equal (r, eight) two = Equal (r, c)"), SIZES)
    assert operators(Normalize()(model).model).count("If") == 2
