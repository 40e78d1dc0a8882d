"""Attention over a cache becomes one operator, which computes the same after any number of earlier positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.flow.caches import Cache, record_caches
from graph_passes.flow.refusal import RefusalCode
from graph_passes.passes import FuseCachedAttention
from tests.graph_passes.graphs import error, graph, operators, run
from tests.graph_passes.passes.checks import assert_untouched, rewritten

WIDTH = 4
CALLS = (
    {"B": 2, "S": 5, "P": 0, "T": 5, "C": 6},
    {"B": 2, "S": 1, "P": 6, "T": 7, "C": 6},
    {"B": 3, "S": 3, "P": 4, "T": 7, "C": 5},
    {"B": 1, "S": 2, "P": 3, "T": 5, "C": 7},
)
"""The first tokens, one after others, and several after others."""
SPLIT = """
    {to}1 = MatMul({x}, W{to})
    {to}2 = Reshape({to}1, split_{heads})
    {to} = Transpose <perm = [0, 2, 1, 3]> ({to}2)
"""
CACHE = "k_all{n} = Concat <axis = 2> (k_past{n}, k{n})  v_all{n} = Concat <axis = 2> (v_past{n}, v{n})"
SCORES = """
    kt{n} = Transpose <perm = [0, 1, 3, 2]> ({k})
    s{n} = MatMul(q{n}, kt{n})
    c{n} = Mul(s{n}, scale)
"""
OUTPUT = """
    p{n} = Softmax <axis = -1> ({a})
    o{n} = MatMul(p{n}, {v})
    ot{n} = Transpose <perm = [0, 2, 1, 3]> (o{n})
    om{n} = Reshape(ot{n}, merge)
    {y} = MatMul(om{n}, Wo)
"""
REPEATED = """
    {x}u = Unsqueeze({x}, second)
    {x}e = Expand({x}u, times)
    {x}_each = Reshape({x}e, join)
"""
BIAS = "float[B, 1, S, T] bias"


def decoder(
    heads: int = 4,
    kv_heads: int = 4,
    *,
    body: str = "",
    select: str = "",
    keys: tuple[str, str] = ("k_all", "v_all"),
    add: str = "a = Add(c, bias)",
    extra: str = BIAS,
    outputs: str = "",
    constants: str = "",
) -> ir.Model:
    """A layer whose keys and values are the concatenation of a cache and of new ones.

    Args:
        heads: number of query heads.
        kv_heads: number of key/value heads.
        body: all nodes; empty: those of an attention, from the arguments below.
        select: nodes that select or repeat the heads of the cache.
        keys: names of the keys and values that the products read.
        add: nodes that compute `a`, which the softmax reads, from the scaled scores `c`.
        extra: declarations of further inputs.
        outputs: declarations of further outputs, each after a comma.
        constants: declarations of further initializers, each after a comma.
    """
    past = f"float[B, {kv_heads}, P, {WIDTH}]"
    present = f"float[B, {kv_heads}, N, {WIDTH}]"
    inputs = ["float[B, S, 8] x", f"{past} k_past", f"{past} v_past", extra]
    projections = "".join(SPLIT.format(to=to, x="x", heads="q" if to == "q" else "k") for to in ("q", "k", "v"))
    nodes = body or projections + CACHE.format(n="") + select + SCORES.format(n="", k=keys[0]) + add
    nodes += OUTPUT.format(n="", a="a", v=keys[1], y="y")
    repeats = heads // kv_heads if heads % kv_heads == 0 else 1
    model = graph(
        nodes,
        f"float[8, {heads * WIDTH}] Wq, float[8, {kv_heads * WIDTH}] Wk, float[8, {kv_heads * WIDTH}] Wv",
        f"float[{heads * WIDTH}, 8] Wo, float scale = {{0.3}}",
        f"int64[4] split_q = {{0, 0, {heads}, {WIDTH}}}, int64[4] split_k = {{0, 0, {kv_heads}, {WIDTH}}}",
        f"int64[3] merge = {{0, 0, {heads * WIDTH}}}, int64[1] second = {{2}}",
        f"int64[5] times = {{1, 1, {repeats}, 1, 1}}, int64[4] join = {{0, {heads}, -1, {WIDTH}}}{constants}",
        inputs=", ".join(filter(None, inputs)),
        outputs=f"float[B, S, 8] y, {present} k_all, {present} v_all{outputs}",
    )
    record_caches(model, [("k_past", "k_all"), ("v_past", "v_all")])
    return model


def shared(heads: int, kv_heads: int, **changes: str) -> ir.Model:
    """A layer whose query heads share key/value heads."""
    select = REPEATED.format(x="k_all") + REPEATED.format(x="v_all")
    return decoder(heads, kv_heads, select=select, keys=("k_all_each", "v_all_each"), **changes)


def fused_nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "MultiHeadAttention"]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
def test_keys_and_values_of_a_cache_are_concatenated_by_the_operator(heads: int, kv_heads: int) -> None:
    model = decoder(heads, kv_heads) if heads == kv_heads else shared(heads, kv_heads)
    result = rewritten(FuseCachedAttention(), model, sizes=CALLS)
    (node,) = fused_nodes(result.model)
    assert node.attributes.get_int("num_heads") == kv_heads
    assert [value.name for value in node.outputs[1:]] == ["k_all", "v_all"]
    assert "Softmax" not in operators(result.model)
    assert (len(result.report.extending), result.report.reading, result.report.refused) == (1, (), ())
    for values in ("inputs", "outputs"):
        before, after = ([value.name for value in getattr(each.graph, values)] for each in (model, result.model))
        assert before == after


@pytest.mark.parametrize(
    ("add", "extra"),
    [
        pytest.param("a = Identity(c)", "", id="nothing"),
        pytest.param("a = Add(c, bias)", "float[1, 4, S, T] bias", id="a bias for each head"),
        pytest.param("a = Add(c, bias)", "float[B, 4, S, T] bias", id="a bias for each row and head"),
        pytest.param("a = Add(bias, c)", "float[S, T] bias", id="no axes of batch and heads"),
        pytest.param("a = Add(c, bias)", "float[B, 1, 1, T] bias", id="one row for all queries"),
        pytest.param(
            "b = Add(c, bias)  a = Add(b, mask)", "float[1, 4, S, T] bias, float[B, 1, 1, T] mask", id="two addends"
        ),
    ],
)
def test_what_is_added_to_the_scores_stays(add: str, extra: str) -> None:
    result = rewritten(FuseCachedAttention(), decoder(add=add, extra=extra), sizes=CALLS)
    assert len(result.report.extending) == 1


@pytest.mark.parametrize("extra", ["float[B, 1, S, T] bias", "float[B, 1, 1, T] bias", "float[S, T] bias"])
def test_masks_are_those_of_every_query_head_that_shares_keys(extra: str) -> None:
    result = rewritten(FuseCachedAttention(), shared(6, 2, extra=extra), sizes=CALLS)
    assert len(result.report.extending) == 1


def test_heads_with_biases_of_their_own_read_repeated_keys() -> None:
    result = rewritten(FuseCachedAttention(), shared(4, 2, extra="float[1, 4, S, T] bias"), sizes=CALLS)
    (node,) = fused_nodes(result.model)
    assert node.attributes.get_int("num_heads") == 4
    assert (result.report.extending, len(result.report.reading)) == ((), 1)


def test_keys_are_repeated_for_a_runtime_that_folds_no_queries() -> None:
    result = rewritten(FuseCachedAttention(folds_queries=False), shared(4, 2), sizes=CALLS)
    (node,) = fused_nodes(result.model)
    assert node.attributes.get_int("num_heads") == 4
    assert (result.report.extending, len(result.report.reading)) == ((), 1)


def test_heads_that_share_keys_unevenly_read_those_that_are_selected() -> None:
    select = "k_each = Gather <axis = 1> (k_all, heads)  v_each = Gather <axis = 1> (v_all, heads)"
    model = decoder(4, 2, select=select, keys=("k_each", "v_each"), constants=", int64[4] heads = {0, 0, 0, 1}")
    result = rewritten(FuseCachedAttention(), model, sizes=CALLS)
    assert (result.report.extending, len(result.report.reading)) == ((), 1)


def test_keys_of_one_head_that_are_broadcast_are_read_once() -> None:
    result = rewritten(FuseCachedAttention(), decoder(4, 1), sizes=CALLS)
    (node,) = fused_nodes(result.model)
    assert node.attributes.get_int("num_heads") == 1
    assert len(result.report.extending) == 1


def test_a_mask_that_needs_the_size_of_the_cache_is_computed_before_it() -> None:
    sizes = "n0 = Shape <start = 2, end = 3> (k_all)  n1 = Concat <axis = 0> (one, n0)  zeros = Expand(zero, n1)"
    add = f"{sizes}  b = Sub(zeros, ramp)  a = Add(c, b)"
    model = decoder(
        add=add, extra="", constants=", float[1, 1, 1, 1] ramp = {0.5}, int64[1] one = {1}, float zero = {0.0}"
    )
    result = rewritten(FuseCachedAttention(), model, sizes=CALLS)
    assert len(result.report.reading) == 1


def cross(add: str = "a = Identity(c)", kv_heads: int = 4, mask: str = "") -> ir.Model:
    """A layer whose keys and values another graph computes once."""
    caches = f"float[B, {kv_heads}, C, {WIDTH}] k, float[B, {kv_heads}, C, {WIDTH}] v"
    model = graph(
        SPLIT.format(to="q", x="x", heads="q")
        + SCORES.format(n="", k="k")
        + add
        + OUTPUT.format(n="", a="a", v="v", y="y"),
        "float[8, 16] Wq, float[16, 8] Wo, float scale = {0.3}, float[1] zero = {0.0}",
        f"int64[4] split_q = {{0, 0, 4, {WIDTH}}}, int64[3] merge = {{0, 0, 16}}, int64[4] ones = {{1, 4, 1, 1}}",
        inputs=", ".join(filter(None, ("float[B, S, 8] x", caches, mask))),
    )
    record_caches(model, [("k", "elsewhere.k"), ("v", "elsewhere.v")])
    return model


@pytest.mark.parametrize(
    ("add", "mask"),
    [
        ("a = Identity(c)", ""),
        ("a = Add(c, mask)", "float[B, 1, S, C] mask"),
        ("a = Add(c, mask)", "float[B, 1, 1, C] mask"),
        ("z = Expand(zero, ones)  b = Add(c, z)  a = Add(b, mask)", "float[B, 1, 1, C] mask"),
    ],
)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_keys_of_another_graph_are_read_as_they_are_cached(add: str, mask: str, kv_heads: int) -> None:
    result = rewritten(FuseCachedAttention(), cross(add, kv_heads, mask), sizes=CALLS)
    (node,) = fused_nodes(result.model)
    assert [value.name for value in node.inputs[1:3] if value is not None] == ["k", "v"]
    assert len(result.report.reading) == 1
    assert result.report.refused == ()


@pytest.mark.parametrize(
    ("add", "code"),
    [
        pytest.param("t = Tanh(c)  a = Add(t, bias)", RefusalCode.UNMATCHED_ATTENTION, id="capped scores"),
        pytest.param("t = Mul(c, bias)  a = Identity(t)", RefusalCode.UNMATCHED_ATTENTION, id="scaled by a tensor"),
    ],
)
def test_attention_that_computes_something_else_stays_and_is_refused(add: str, code: RefusalCode) -> None:
    report = assert_untouched(FuseCachedAttention(), decoder(add=add))
    assert [refusal.code for refusal in report.refused] == [code]


def test_a_cache_that_no_attention_reads_is_refused_by_name() -> None:
    model = graph(
        "y = Concat <axis = 1> (past, x)", inputs="float[B, S, 8] x, float[B, P, 8] past", outputs="float[B, T, 8] y"
    )
    record_caches(model, [("past", "y")])
    (refusal,) = assert_untouched(FuseCachedAttention(), model).refused
    assert refusal.node == "past"


@pytest.mark.parametrize("caches", [(), None])
def test_graphs_without_recorded_caches_stay(caches: Sequence[Cache] | None) -> None:
    model = decoder()
    record_caches(model, caches or ())
    assert assert_untouched(FuseCachedAttention(), model).refused == ()


def test_layers_share_the_mask_that_is_repeated_for_their_queries() -> None:
    layer = "".join(SPLIT.format(to=f"{to}{{n}}", x="{x}", heads="q" if to == "q" else "k") for to in ("q", "k", "v"))
    layer += CACHE + REPEATED.format(x="k_all{n}") + REPEATED.format(x="v_all{n}")
    layer += SCORES.replace("{k}", "k_all{n}_each") + "a{n} = Add(c{n}, bias)"
    layer += OUTPUT.replace("{a}", "a{n}").replace("{v}", "v_all{n}_each")
    cache = f"float[B, 2, P, {WIDTH}]"
    model = graph(
        layer.format(n="A", x="x", y="h") + layer.format(n="B", x="h", y="y"),
        "float[8, 16] WqA, float[8, 8] WkA, float[8, 8] WvA, float[8, 16] WqB, float[8, 8] WkB, float[8, 8] WvB",
        "float[16, 8] Wo, float scale = {0.3}, int64[4] split_q = {0, 0, 4, 4}, int64[4] split_k = {0, 0, 2, 4}",
        "int64[3] merge = {0, 0, 16}, int64[1] second = {2}, int64[5] times = {1, 1, 2, 1, 1},"
        " int64[4] join = {0, 4, -1, 4}",
        inputs=f"float[B, S, 8] x, {BIAS}, " + ", ".join(f"{cache} {to}_past{n}" for to in "kv" for n in "AB"),
        outputs="float[B, S, 8] y, " + ", ".join(f"float[B, 2, N, {WIDTH}] {to}_all{n}" for to in "kv" for n in "AB"),
    )
    record_caches(model, [(f"{to}_past{n}", f"{to}_all{n}") for to in "kv" for n in "AB"])
    result = rewritten(FuseCachedAttention(), model, sizes=CALLS)
    biases = {node.inputs[5] for node in fused_nodes(result.model)}
    assert len(biases) == 1


def test_padding_on_the_left_is_hidden_in_every_call() -> None:
    """The mask is computed from ids that are padded on the left; the cache grows call by call."""
    positions = """
        m0 = Cast <to = 9> (mask)  m1 = Unsqueeze(m0, rows)
        n = Shape <start = 2, end = 3> (k_past)  new = Shape <start = 1, end = 2> (x)
        n0 = Squeeze(n)  new0 = Squeeze(new)  end = Add(n0, new0)
        keys = Range(zero, end, one)  later = Range(zero, new0, one)  later0 = Add(later, n0)
        queries = Unsqueeze(later0, last)
        causal = LessOrEqual(keys, queries)  allowed = And(m1, causal)  bias = Where(allowed, nothing, lowest)
        a = Add(c, bias)
    """
    constants = (
        ", int64[2] rows = {1, 2}, int64[1] last = {1}, int64 zero = {0}, int64 one = {1}"
        ", float nothing = {0.0}, float lowest = {-3.4028234663852886e38}"
    )
    select = REPEATED.format(x="k_all") + REPEATED.format(x="v_all")
    model = decoder(
        6,
        2,
        select=select,
        keys=("k_all_each", "v_all_each"),
        add=positions,
        extra="int64[B, T] mask",
        constants=constants,
    )
    fused = FuseCachedAttention()(model.clone())
    assert len(fused.report.extending) == 1
    rng = np.random.default_rng(0)
    caches: list[np.ndarray] = [np.zeros((3, 2, 0, WIDTH), np.float32)] * 2
    mask = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]])
    for new in (4, 1, 1, 3, 1):
        if caches[0].shape[2]:
            mask = np.concatenate([mask, np.ones((3, new), mask.dtype)], 1)
        feeds: dict[str, np.ndarray] = {
            "x": rng.standard_normal((3, new, 8), np.float32),
            "mask": mask.astype(np.int64),
            "k_past": caches[0],
            "v_past": caches[1],
        }
        expected, outputs = run(model, feeds), run(fused.model, feeds)
        assert error(outputs, expected) < 1e-5
        caches = outputs[1:]
