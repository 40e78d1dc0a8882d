"""Refusals: if an operator mixes heads, the site stays whole and the operator is named."""

from __future__ import annotations

import pytest

from graph_passes import NeuronPlan, Plan, Shrunk, shrink
from graph_passes.attention.gate_initializers import find_gates
from graph_passes.flow.refusal import RefusalCode
from tests.graph_passes.graphs import graph, plan, shape, shrink_and_compare, site
from tests.graph_passes.layer_parts import CORE, OUTPUT, PROJECT, PROJECTIONS, SPLIT, TO_HEADS
from tests.graph_passes.layers import MERGED_BATCH

WEIGHTS = f"{PROJECTIONS}, {SPLIT}, {OUTPUT}"


def assert_left_whole(shrunk: Shrunk, op: str, code: RefusalCode, value: str = "") -> None:
    """Check that site `a` is refused for `op`, keeps its gate, and keeps all of its weights."""
    refusals = [(refusal.op, refusal.code, refusal.value, refusal.sites) for refusal in shrunk.refused]
    assert refusals == [(op, code, value, {"a"})]
    assert shrunk.removed == ()
    assert shrunk.parameters[0] == shrunk.parameters[1]
    assert "a" in find_gates(shrunk.model.graph)


# Nodes that compute `norm`, the input of the heads, from the queries `q1 [batch, length, heads * width]`; the weights
# that they read; the operator that is refused, why, and the tensor that it is about.
ON_QUERIES = {
    "softmax over all heads": ("norm = Softmax (q1)", "", "Softmax", RefusalCode.MIXES_HEADS, ""),
    "running sum over all heads": (
        "norm = CumSum (q1, last)",
        "int64 last = {-1}",
        "CumSum",
        RefusalCode.MIXES_HEADS,
        "",
    ),
    "running sum along a list of one axis": (
        "norm = CumSum (q1, last)",
        "int64[1] last = {-1}",
        "CumSum",
        RefusalCode.MIXES_HEADS,
        "",
    ),
    "operator without a rule": (
        "norm, order = TopK <axis = -1> (q1, all)",
        "int64[1] all = {12}",
        "TopK",
        RefusalCode.NO_RULE,
        "",
    ),
    "lookup at run time": (
        """
        s = Shape (x) two = Slice (s, at2, at3) range = Range (i0, i12, i1) less = Sub (two, eight)
        order = Add (range, less)
        far = Mod (order, i12)
        top = ReduceMax <keepdims = 0> (x)
        zero = Mul (top, nought) shift = Cast <to = 7> (zero) where = Add (far, shift)
        norm = Gather <axis = 2> (q1, where)
        """,
        "int64[1] at2 = {2}, int64[1] at3 = {3}, int64 i0 = {0}, int64 i12 = {12}, int64 i1 = {1}, "
        "int64[1] eight = {8}, float nought = {0.0}",
        "Gather",
        RefusalCode.COMPUTED_VALUE,
        "",
    ),
}


@pytest.mark.parametrize("name", ON_QUERIES)
def test_an_operator_that_mixes_heads_refuses_its_site(name: str) -> None:
    body, weights, op, code, value = ON_QUERIES[name]
    heads = TO_HEADS.replace("Reshape (q1, split)", "Reshape (norm, split)")
    declared = f"{WEIGHTS}, {weights}".rstrip(", ")
    shrunk = shrink_and_compare(graph(PROJECT + body + heads + CORE, declared), plan([0, 2]))
    assert_left_whole(shrunk, op, code, value)


# Norms over the queries of all heads, as in OLMo 2: a dropped head has an effect on the others.
NORMS = {
    "ReduceMean": (
        "s = Mul (q1, q1) m = ReduceMean <keepdims = 1> (s, last) r = Sqrt (m) norm = Div (q1, r)",
        "int64[1] last = {-1}",
    ),
    "LayerNormalization": ("norm = LayerNormalization (q1, scale)", "float[12] scale"),
}


@pytest.mark.parametrize("op", NORMS)
def test_a_norm_over_all_queries_reads_them_all_and_the_rest_is_cut(op: str) -> None:
    body, weights = NORMS[op]
    heads = TO_HEADS.replace("Reshape (q1, split)", "Reshape (norm, split)")
    shrunk = shrink_and_compare(graph(PROJECT + body + heads + CORE, f"{WEIGHTS}, {weights}"), plan([0, 2]))
    assert shrunk.refused == ()
    assert [(refusal.op, refusal.sites) for refusal in shrunk.shared] == [(op, {"a"})]
    assert [shape(shrunk.model, name) for name in ("Wq", "Wk", "Wv")] == [(8, 12), (8, 6), (8, 6)]


@pytest.mark.parametrize("kept", [[0, 2], []])
def test_a_root_mean_square_over_gated_heads_is_cut(kept: list[int]) -> None:
    # BitNet normalizes the heads together before the output projection: dropped heads add nothing to the mean.
    norm = "s = Pow (merged, two) m = ReduceMean <keepdims = 1> (s, last) e = Add (m, eps) r = Sqrt (e)"
    core = CORE.replace("y = MatMul (merged,", f"{norm} odd = Div (merged, r) y = MatMul (odd,")
    declared = f"{WEIGHTS}, int64[1] last = {{-1}}, float two = {{2.0}}, float eps = {{0.001}}"
    shrunk = shrink_and_compare(
        graph(PROJECT + TO_HEADS + core, declared), plan(site(kept, scale=[0.5, -2][: len(kept)]))
    )
    assert (shrunk.refused, shrunk.shared) == ((), ())
    assert shrunk.removed


def test_a_product_over_all_heads_keeps_the_rows_and_loses_the_columns() -> None:
    # A second projection of the queries needs all of the first, and only the dropped heads' columns of itself.
    heads = TO_HEADS.replace("Reshape (q1, split)", "Reshape (norm, split)")
    body = PROJECT + "norm = MatMul (q1, mixer)" + heads + CORE
    shrunk = shrink_and_compare(graph(body, f"{WEIGHTS}, float[12, 12] mixer"), plan([0, 2]))
    assert shrunk.refused == ()
    assert shape(shrunk.model, "mixer") == (12, 6)
    assert shape(shrunk.model, "Wq") == (8, 12)
    assert shape(shrunk.model, "Wk") == (8, 6)


@pytest.mark.parametrize(
    "node",
    [
        "few = Slice (v2, zero, two, last)",
        "few = Gather <axis = 3> (v2, columns)",
        "few, rest = Split <axis = 3> (v2, sizes)",
    ],
)
def test_heads_that_another_product_needs_are_cut_where_another_axis_is_divided(node: str) -> None:
    # Doge computes a bias of the scores from the values of all heads: `v2` stays whole, what attention reads of it not.
    heads = TO_HEADS.replace(
        "v = Transpose <perm = [0, 2, 1, 3]> (v2)", f"{node} v = Transpose <perm = [0, 2, 1, 3]> (few)"
    )
    body = (
        PROJECT
        + heads
        + "all = MatMul (v1, mixer)"
        + CORE.replace("y = MatMul (merged, Wo)", "z = MatMul (merged, Wo) y = Add (z, all)")
    )
    constants = (
        "int64[1] zero = {0}, int64[1] two = {2}, int64[1] last = {3}, int64[2] columns = {0, 1}, "
        "int64[2] sizes = {2, 1}"
    )
    weights = WEIGHTS.replace("float[12, 8] Wo", "float[8, 8] Wo").replace("merge = {0, 0, 12}", "merge = {0, 0, 8}")
    shrunk = shrink_and_compare(graph(body, f"{weights}, float[12, 8] mixer, {constants}"), plan([0, 2]))
    assert shrunk.refused == ()
    assert [shape(shrunk.model, name) for name in ("Wq", "Wv", "Wo")] == [(8, 6), (8, 12), (4, 8)]


@pytest.mark.parametrize("end", [2**31 - 1, 2**63 - 1])
def test_a_slice_that_keeps_a_whole_axis_of_rows_and_heads_cuts_nothing(end: int) -> None:
    # `x[:, :, 1:]` and `x[:, None]` are written with a Slice of the first axis as well.
    body = MERGED_BATCH.body.replace(
        "kt = Transpose <perm = [0, 2, 1]> (k)",
        "whole = Slice (k, starts, ends, axes) kt = Transpose <perm = [0, 2, 1]> (whole)",
    )
    bounds = f"int64[2] starts = {{0, 1}}, int64[2] ends = {{{end}, {end}}}, int64[2] axes = {{0, 1}}"
    body = body.replace("v = Reshape (v3, flat)", "v4 = Reshape (v3, flat) v = Slice (v4, starts, ends, axes)")
    shrunk = shrink_and_compare(graph(body, f"{MERGED_BATCH.weights}, {bounds}"), plan([0, 2]))
    assert shrunk.refused == ()
    assert shape(shrunk.model, "Wk") == (8, 6)


def test_keys_that_are_written_into_an_empty_tensor_are_cut() -> None:
    # DeepSeek writes both parts of its keys into a new tensor: a column of each head here.
    heads = TO_HEADS.replace(
        "k = Transpose <perm = [0, 2, 1, 3]> (k2)",
        """
        few = Gather <axis = 3> (k2, column)
        filled = Transpose <perm = [3, 0, 1, 2]> (k2) updates = Transpose <perm = [3, 0, 1, 2]> (few)
        written = ScatterND (filled, where, updates) k = Transpose <perm = [1, 3, 2, 0]> (written)
        """,
    )
    weights = f"{WEIGHTS}, int64[1] column = {{1}}, int64[1, 1] where = {{2}}"
    shrunk = shrink_and_compare(graph(PROJECT + heads + CORE, weights), plan([0, 2]))
    assert shrunk.refused == ()
    assert shape(shrunk.model, "Wk") == (8, 6)


# Nodes that compute `odd`, the input of the projection, from `gated [batch, heads, length, width]`; the weights that
# they read; the operator that is refused, and why.
AFTER_THE_GATE = {
    "softmax over the heads": ("odd = Softmax <axis = 1> (gated)", "", "Softmax", RefusalCode.NOT_LINEAR),
    "an activation that is not zero at zero": ("odd = Cos (gated)", "", "Cos", RefusalCode.NOT_LINEAR),
    "a bias for each head": ("odd = Add (gated, bias)", "float[4, 1, 1] bias", "Add", RefusalCode.NOT_LINEAR),
    "an operator without a rule": ("odd = LRN <size = 3> (gated)", "", "LRN", RefusalCode.NO_RULE),
}


@pytest.mark.parametrize("name", AFTER_THE_GATE)
def test_an_operator_between_gate_and_projection_refuses_its_site(name: str) -> None:
    body, weights, op, code = AFTER_THE_GATE[name]
    core = CORE.replace('gated = Mul (heads, "a.head_gate")', 'gated = Mul (heads, "a.head_gate") ' + body)
    core = core.replace("(gated)\n    merged", "(odd)\n    merged")
    declared = f"{WEIGHTS}, {weights}".rstrip(", ")
    shrunk = shrink_and_compare(graph(PROJECT + TO_HEADS + core, declared), plan([0, 2]))
    assert_left_whole(shrunk, op, code)


def test_a_gemm_of_more_than_two_axes_is_refused() -> None:
    # Fusions can leave one behind, which no runtime accepts.
    body = 'h = MatMul (x, up) r = Relu (h) g = Mul (r, "a.neuron_gate") y = Gemm (g, down)'
    model = graph(body, "float[8, 6] up", 'float[6] "a.neuron_gate"', "float[6, 8] down")
    shrunk = shrink(model, Plan(groups=(NeuronPlan("a", 6, (0, 2)),)))
    assert_left_whole(shrunk, "Gemm", RefusalCode.UNSUPPORTED_FORM)


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("float[B, 4, S, 3] gated", RefusalCode.GRAPH_OUTPUT),
        ("float[B, 4, S, S] p", RefusalCode.EVERY_HEAD_NEEDED),
    ],
    ids=["heads", "attention maps"],
)
def test_an_output_of_the_graph_that_holds_heads_is_refused(output: str, code: RefusalCode) -> None:
    outputs = f"float[B, S, 8] y, {output}"
    shrunk = shrink_and_compare(graph(PROJECT + TO_HEADS + CORE, WEIGHTS, outputs=outputs), plan([0, 2]))
    assert_left_whole(shrunk, "graph output", code, output.split()[-1])


def test_an_input_of_the_graph_that_holds_heads_is_refused() -> None:
    body = PROJECT + (
        TO_HEADS.replace("k = Transpose", "know = Transpose").replace("v = Transpose", "vnow = Transpose")
        + "k = Concat <axis = 2> (past_k, know) v = Concat <axis = 2> (past_v, vnow)"
    )
    inputs = "float[B, S, 8] x, float[B, 4, P, 3] past_k, float[B, 4, P, 3] past_v"
    shrunk = shrink_and_compare(graph(body + CORE, WEIGHTS, inputs=inputs), plan([0, 2]))
    assert {(refusal.op, refusal.node, refusal.code) for refusal in shrunk.refused} == {
        ("graph input", "past_k", RefusalCode.GRAPH_INPUT),
        ("graph input", "past_v", RefusalCode.GRAPH_INPUT),
    }
    assert shrunk.parameters[0] == shrunk.parameters[1]


def test_a_tensor_that_a_loop_or_branch_reads_is_refused() -> None:
    body = (
        PROJECT
        + TO_HEADS.replace("q = Transpose", "q9 = Transpose")
        + (
            """
        q = If (yes) <then_branch = a () => (float[B, 4, S, 3] t) { t = Abs (q9) },
                      else_branch = b () => (float[B, 4, S, 3] e) { e = Neg (q9) }>
        """
            + CORE
        )
    )
    shrunk = shrink_and_compare(
        graph(body, f"{WEIGHTS}, float[B, 4, S, 3] q", inputs="float[B, S, 8] x, bool yes"),
        plan([0, 2]),
        [{"B": 2, "S": 5}],
    )
    assert [refusal.op for refusal in shrunk.refused] == ["If"]
    assert shrunk.parameters[0] == shrunk.parameters[1]


def test_a_refused_site_does_not_keep_others_from_shrinking() -> None:
    first = (PROJECT + TO_HEADS + CORE).replace("y = MatMul", "h = MatMul")
    second = """
        u0 = MatMul (h, Uq)
        u1 = Softmax (u0)
        u2 = Reshape (u1, split)
        u = Transpose <perm = [0, 2, 1, 3]> (u2)
        w0 = MatMul (h, Uk)
        w2 = Reshape (w0, split)
        w = Transpose <perm = [0, 2, 3, 1]> (w2)
        z0 = MatMul (h, Uv)
        z2 = Reshape (z0, split)
        z = Transpose <perm = [0, 2, 1, 3]> (z2)
        scores2 = MatMul (u, w)
        p2 = Softmax (scores2)
        heads2 = MatMul (p2, z)
        gated2 = Mul (heads2, "b.head_gate")
        back2 = Transpose <perm = [0, 2, 1, 3]> (gated2)
        merged2 = Reshape (back2, merge)
        y = MatMul (merged2, Uo)
    """
    weights = 'float[8, 12] Uq, float[8, 12] Uk, float[8, 12] Uv, float[12, 8] Uo, float[4, 1, 1] "b.head_gate"'
    shrunk = shrink_and_compare(
        graph(first + second, f"{WEIGHTS}, {weights}"), plan(site([1]), site([0, 3], name="b", scale=[2, 0.5]))
    )
    assert [(removed.group, removed.units) for removed in shrunk.removed] == [("a", (0, 2, 3))]
    assert [(refusal.op, refusal.sites) for refusal in shrunk.refused] == [("Softmax", {"b"})]
    assert shape(shrunk.model, "Wq") == (8, 3)
    assert shape(shrunk.model, "Uk") == (8, 12)
    assert list(find_gates(shrunk.model.graph)) == ["b"]


def test_messages_of_refusals_name_the_operator() -> None:
    outputs = [f"float[B, S, 8] y, float[B, 4, S, {tensor}" for tensor in ("S] p", "3] gated")]
    mixed, returned = (
        shrink_and_compare(graph(PROJECT + TO_HEADS + CORE, WEIGHTS, outputs=returned), plan([0, 2]))
        for returned in outputs
    )
    assert [refusal.why for shrunk in (mixed, returned) for refusal in shrunk.refused] == [
        "needs every unit of p, so none can be removed from it",
        "returns gated units; export the graph without this output",
    ]
    assert str(returned.refused[0]) == "graph output gated: returns gated units; export the graph without this output"
