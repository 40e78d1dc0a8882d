"""Refusals: where heads meet an operator that mixes them, the site is left whole and the operator is named."""

from __future__ import annotations

import pytest

from graph_passes import Shrunk
from graph_passes.attention.gate_initializers import find_gates
from tests.graph_passes.graphs import graph, plan, shape, shrink_and_compare, site
from tests.graph_passes.layers import CORE, OUTPUT, PROJECT, PROJECTIONS, SPLIT, TO_HEADS

WEIGHTS = f"{PROJECTIONS}, {SPLIT}, {OUTPUT}"


def assert_left_whole(shrunk: Shrunk, op: str, why: str) -> None:
    """Site `a` is refused for `op`, its gate stands and none of its weights is smaller."""
    assert [(refusal.op, refusal.sites) for refusal in shrunk.refused] == [(op, {"a"})]
    assert why in shrunk.refused[0].why
    assert shrunk.removed == ()
    assert shrunk.parameters[0] == shrunk.parameters[1]
    assert "a" in find_gates(shrunk.model.graph)


# What makes `norm`, the queries' input to the heads, from `q1 = [batch, length, heads * width]`.
ON_QUERIES = {
    # OLMo 2 normalises queries over all heads at once: dropping one changes the others.
    "norm over all heads": (
        "s = Mul (q1, q1) m = ReduceMean <keepdims = 1> (s, last) r = Sqrt (m) norm = Div (q1, r)",
        "int64[1] last = {-1}",
        "ReduceMean",
        "needs every head of q1",
    ),
    "layer norm over all heads": (
        "norm = LayerNormalization (q1, scale)",
        "float[12] scale",
        "LayerNormalization",
        "mixes the heads' axis",
    ),
    "softmax over all heads": ("norm = Softmax (q1)", "", "Softmax", "mixes the heads' axis"),
    "running sum over all heads": ("norm = CumSum (q1, last)", "int64 last = {-1}", "CumSum", "mixes the heads' axis"),
    "operator without a rule": (
        "norm, order = TopK <axis = -1> (q1, all)",
        "int64[1] all = {12}",
        "TopK",
        "has no rule, and heads that the plan drops reach it",
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
        "looks up heads by indices computed at run time",
    ),
}


@pytest.mark.parametrize("name", ON_QUERIES)
def test_an_operator_that_mixes_heads_refuses_its_site(name: str) -> None:
    body, weights, op, why = ON_QUERIES[name]
    heads = TO_HEADS.replace("Reshape (q1, split)", "Reshape (norm, split)")
    declared = f"{WEIGHTS}, {weights}".rstrip(", ")
    shrunk = shrink_and_compare(graph(PROJECT + body + heads + CORE, declared), plan([0, 2]))
    assert_left_whole(shrunk, op, why)


def test_a_product_over_all_heads_keeps_the_rows_and_loses_the_columns() -> None:
    # A second projection of the queries needs all of the first, and only the dropped heads' columns of itself.
    heads = TO_HEADS.replace("Reshape (q1, split)", "Reshape (norm, split)")
    body = PROJECT + "norm = MatMul (q1, mixer)" + heads + CORE
    shrunk = shrink_and_compare(graph(body, f"{WEIGHTS}, float[12, 12] mixer"), plan([0, 2]))
    assert shrunk.refused == ()
    assert shape(shrunk.model, "mixer") == (12, 6)
    assert shape(shrunk.model, "Wq") == (8, 12)
    assert shape(shrunk.model, "Wk") == (8, 6)


# What makes `y` from `gated = [batch, heads, length, width]`.
AFTER_THE_GATE = {
    "softmax over the heads": ("odd = Softmax <axis = 1> (gated)", "", "Softmax", "gated heads reach it"),
    "an activation that is not zero at zero": ("odd = Cos (gated)", "", "Cos", "gated heads reach it"),
    "a bias a head": ("odd = Add (gated, bias)", "float[4, 1, 1] bias", "Add", "gated heads reach it"),
    "an operator without a rule": (
        "odd = LRN <size = 3> (gated)",
        "",
        "LRN",
        "has no rule, and gated heads reach it",
    ),
}


@pytest.mark.parametrize("name", AFTER_THE_GATE)
def test_an_operator_between_gate_and_projection_refuses_its_site(name: str) -> None:
    body, weights, op, why = AFTER_THE_GATE[name]
    core = CORE.replace('gated = Mul (heads, "a.head_gate")', 'gated = Mul (heads, "a.head_gate") ' + body)
    core = core.replace("(gated)\n    merged", "(odd)\n    merged")
    declared = f"{WEIGHTS}, {weights}".rstrip(", ")
    shrunk = shrink_and_compare(graph(PROJECT + TO_HEADS + core, declared), plan([0, 2]))
    assert_left_whole(shrunk, op, why)


def test_heads_given_out_by_the_graph_are_refused() -> None:
    body = PROJECT + TO_HEADS + CORE
    outputs = "float[B, S, 8] y, float[B, 4, S, 3] gated"
    shrunk = shrink_and_compare(graph(body, WEIGHTS, outputs=outputs), plan([0, 2]))
    assert_left_whole(shrunk, "graph output", "gives gated heads out")


def test_attention_maps_given_out_by_the_graph_are_refused() -> None:
    outputs = "float[B, S, 8] y, float[B, 4, S, S] p"
    shrunk = shrink_and_compare(graph(PROJECT + TO_HEADS + CORE, WEIGHTS, outputs=outputs), plan([0, 2]))
    assert_left_whole(shrunk, "graph output", "needs every head of p")


def test_past_keys_given_to_the_graph_are_refused() -> None:
    body = PROJECT + (
        TO_HEADS.replace("k = Transpose", "know = Transpose").replace("v = Transpose", "vnow = Transpose")
        + "k = Concat <axis = 2> (past_k, know) v = Concat <axis = 2> (past_v, vnow)"
    )
    inputs = "float[B, S, 8] x, float[B, 4, P, 3] past_k, float[B, 4, P, 3] past_v"
    shrunk = shrink_and_compare(graph(body + CORE, WEIGHTS, inputs=inputs), plan([0, 2]))
    assert {(refusal.op, refusal.node) for refusal in shrunk.refused} == {
        ("graph input", "past_k"),
        ("graph input", "past_v"),
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


def test_one_refused_site_leaves_the_others_to_shrink() -> None:
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
    assert [(one.site, one.heads) for one in shrunk.removed] == [("a", (0, 2, 3))]
    assert [(refusal.op, refusal.sites) for refusal in shrunk.refused] == [("Softmax", {"b"})]
    assert shape(shrunk.model, "Wq") == (8, 3)
    assert shape(shrunk.model, "Uk") == (8, 12)
    assert list(find_gates(shrunk.model.graph)) == ["b"]
