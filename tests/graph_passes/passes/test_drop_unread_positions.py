"""Only the positions that a graph reads are computed, and the numbers stay."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graph_passes.passes import CleanUp, DropUnreadPositions, Normalize
from tests.graph_passes.fused_layers import FUSED
from tests.graph_passes.graphs import SIZES, assert_same, graph, operators
from tests.graph_passes.layers import LAYERS
from tests.graph_passes.passes.checks import assert_untouched, rewritten
from tests.quick_cases import quick

ROWS = "float[B, 8] y"
FEED_FORWARD = "a = MatMul(x, W)  b = Relu(a)  c = MatMul(b, V)  h = Add(c, x)"
FLAT = "gate on heads * width"
"""The layer whose output projection has one axis for batch and positions."""
WEIGHTS = ("float[8, 12] W", "float[12, 8] V", "int64 first = {0}")


def reads(model: ir.Model, positions: list[int] | int) -> ir.Model:
    """The graph with its output `[B, S, 8]` reduced to some positions."""
    Normalize()(model)
    (output,) = model.graph.outputs
    index = ir.node("Constant", [], {"value": ir.tensor(positions, ir.DataType.INT64)})
    read = ir.node("Gather", [output, index.outputs[0]], {"axis": 1})
    model.graph.extend([index, read])
    model.graph.outputs[0] = read.outputs[0]
    read.outputs[0].name, read.outputs[0].type = "read", output.type
    kept: list[int | str] = ["B", 8] if isinstance(positions, int) else ["B", len(positions), 8]
    read.outputs[0].shape = ir.Shape(kept)
    return model


@pytest.mark.parametrize("positions", quick([0, [0], [0, 2], [2, 1]], [0, [2, 1]]), ids=str)
@pytest.mark.parametrize("name", quick(sorted(LAYERS.keys() - {FLAT}), ("separate", "grouped heads", "relative bias")))
def test_a_layer_computes_the_positions_that_are_read(name: str, positions: list[int] | int) -> None:
    result = rewritten(DropUnreadPositions(), reads(LAYERS[name].graph(), positions))
    assert result.report


def test_positions_that_are_merged_with_the_batch_stay() -> None:
    assert_untouched(DropUnreadPositions(), reads(LAYERS[FLAT].graph(), 0))


COLLIDING = ({"B": 4, "S": 4}, {"B": 1, "S": 1}, {"B": 8, "S": 8}, {"B": 2, "S": 5}, {"B": 3, "S": 9})
"""As many rows and positions as there are heads, or as a head is wide, and sizes that differ."""


@pytest.mark.parametrize(
    "square", ["minus, length, length", "rows, length, minus", "minus, length, zero1", "rows, minus, zero1"]
)
def test_keys_have_their_number_where_queries_are_cut(square: str) -> None:
    """Queries and keys have one size, and the position of the keys is that of the queries before a reshape."""
    body = f"""
        sizes = Shape (q)
        length = Gather (sizes, two)
        batch = Gather (sizes, zero1)
        rows = Mul (batch, four)
        scores = MatMul (q, k)
        probs = Softmax <axis = -1> (scores)
        square = Concat <axis = 0> ({square})
        long = Concat <axis = 0> (minus, length, eight)
        flat = Reshape (probs, square)
        values = Reshape (v, long)
        heads = MatMul (flat, values)
        y = Gather <axis = 1> (heads, zero)
    """
    weights = (
        "int64[1] minus = {-1}, int64[1] two = {2}, int64[1] eight = {8}, int64[1] zero1 = {0}, int64 zero = {0}, "
        "int64[1] four = {4}"
    )
    model = graph(
        body,
        weights,
        inputs="float[B, 4, S, 8] q, float[B, 4, 8, S] k, float[B, 4, S, 8] v",
        outputs="float[R, 8] y",
    )
    assert rewritten(DropUnreadPositions(), model, sizes=COLLIDING).report


def test_a_shape_that_states_the_last_axes_alone_keeps_its_sizes() -> None:
    body = """
        sizes = Shape <start = 1, end = 3> (z)
        turned = Gather (sizes, swap)
        wide = Expand (x, turned)
        h = MatMul (wide, z)
        y = Gather <axis = 1> (h, first)
    """
    model = graph(
        body,
        "int64[2] swap = {1, 0}, int64 first = {0}",
        inputs="float[B, S, 1] x, float[B, T, S] z",
        outputs="float[B, S] y",
    )
    assert rewritten(DropUnreadPositions(), model, sizes=({"B": 2, "S": 5, "T": 4}, {"B": 4, "S": 4, "T": 4})).modified


def test_positions_that_are_merged_with_the_batch_stay_whatever_their_numbers() -> None:
    """Positions 0, 5 and 10 are the first ones of three rows of five."""
    body = """
        sizes = Shape (x)
        flat = Reshape (x, rows)
        a = MatMul (flat, W)
        h = Reshape (a, sizes)
        y = Gather <axis = 1> (h, read)
    """
    weights = "int64[2] rows = {-1, 8}, float[8, 8] W, int64[3] read = {0, 5, 10}"
    assert_untouched(DropUnreadPositions(), graph(body, weights, outputs="float[B, 3, 8] y"))


@pytest.mark.parametrize("name", quick(FUSED, ("Attention 4D", "Attention 3D, grouped", "MultiHeadAttention")))
def test_an_attention_operator_computes_the_queries_that_are_read(name: str) -> None:
    model = reads(FUSED[name].graph(), 0)
    result = DropUnreadPositions()(model.clone())
    assert result.modified, "the output projection computes one position in every form"
    assert_same(result.model, model, SIZES, 1e-5)
    assert_untouched(DropUnreadPositions(), result.model)
    passes_queries = name.startswith("Attention") and "is_causal" not in FUSED[name].body
    assert (len(result.report) > 1) is passes_queries


def test_a_tensor_that_is_also_read_whole_is_cut_before_the_node_that_needs_less() -> None:
    model = graph(f"{FEED_FORWARD}  y = Gather <axis = 1> (h, first)", *WEIGHTS, outputs=ROWS)
    result = rewritten(DropUnreadPositions(), model)
    assert len(result.report) == 2
    assert operators(result.model).count("Slice") == 2, "before the product and before the sum"


def test_a_slice_of_the_first_position_is_a_selection() -> None:
    bounds = "int64[1] zero = {0}, int64[1] end = {1}, int64[1] axis = {1}"
    model = graph(f"{FEED_FORWARD}  y = Slice(h, zero, end, axis)", *WEIGHTS, bounds, outputs="float[B, 1, 8] y")
    assert len(rewritten(DropUnreadPositions(), model).report) == 2


@pytest.mark.parametrize(
    ("positions", "kept"),
    [
        pytest.param([0], ["MatMul", "Gather"], id="the first part"),
        pytest.param([6, 0], ["Concat", "MatMul", "Gather"], id="the first and the last part"),
    ],
)
def test_parts_without_positions_that_are_read_are_removed(positions: list[int], kept: list[str]) -> None:
    body = "p = MatMul(x, U)  t = Concat <axis = 1> (c, p, d)  h = MatMul(t, W)  y = Gather <axis = 1> (h, read)"
    weights = f"float[8, 8] U, float[8, 8] W, int64[{len(positions)}] read = {{{', '.join(map(str, positions))}}}"
    parts = "float[B, 1, 8] c, float[B, 5, 8] x, float[B, 1, 8] d"
    model = graph(body, weights, inputs=parts, outputs=f"float[B, {len(positions)}, 8] y")
    result = rewritten(DropUnreadPositions(), model)
    CleanUp()(result.model)
    assert operators(result.model) == kept


@pytest.mark.parametrize(
    ("body", "weights", "outputs"),
    [
        pytest.param(FEED_FORWARD.replace("h =", "y ="), "", "float[B, S, 8] y", id="every position is an output"),
        pytest.param(
            f"{FEED_FORWARD}  y = Gather <axis = 1> (h, first)  z = Relu(h)",
            "",
            f"{ROWS}, float[B, S, 8] z",
            id="hidden states are an output too",
        ),
        pytest.param(
            f"{FEED_FORWARD}  y = ReduceMean <keepdims = 0> (h, axis)", "int64[1] axis = {1}", ROWS, id="mean"
        ),
        pytest.param(
            f"{FEED_FORWARD}  y = Gather <axis = 1> (h, last)", "int64 last = {-1}", ROWS, id="the last position"
        ),
        pytest.param("y = Gather <axis = 1> (x, first)", "", ROWS, id="no product"),
        pytest.param(
            "h = CumSum(x, axis)  y = Gather <axis = 1> (h, first)", "int64 axis = {1}", ROWS, id="positions are mixed"
        ),
    ],
)
def test_other_graphs_stay(body: str, weights: str, outputs: str) -> None:
    assert_untouched(DropUnreadPositions(), graph(body, *WEIGHTS, weights, outputs=outputs))


def test_causal_attention_of_an_operator_stays() -> None:
    body = """
        q = MatMul(x, Wq)  k = MatMul(x, Wk)  v = MatMul(x, Wv)
        a = Attention <is_causal = 1, q_num_heads = 2, kv_num_heads = 2> (q, k, v)
        y = Gather <axis = 1> (a, second)
    """
    weights = "float[8, 8] Wq, float[8, 8] Wk, float[8, 8] Wv, int64 second = {1}"
    assert_untouched(DropUnreadPositions(), graph(body, weights, outputs=ROWS, opset=23))


def test_shapes_of_the_file_are_those_of_the_positions() -> None:
    model = graph(
        f"{FEED_FORWARD}  y = Gather <axis = 1> (h, first)",
        *WEIGHTS,
        "float[B, S, 12] a, float[B, S, 8] h",
        outputs=ROWS,
    )
    result = rewritten(DropUnreadPositions(), model)
    CleanUp()(result.model)
    shapes = {value.name: value.shape for node in result.model.graph for value in node.outputs}
    assert shapes["a"] is not None
    assert shapes["a"][1] == 1
