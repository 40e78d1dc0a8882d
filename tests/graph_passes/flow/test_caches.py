"""Attention with caches loses the same heads in the inputs and the outputs of its caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes import Plan, PlanError, RefusalCode, Shrunk, gate_groups, shrink
from graph_passes.attention.gate_initializers import set_gates
from graph_passes.flow.caches import cache_names, record_caches
from graph_passes.passes import DropIdleCaches
from graph_passes.passes.insert_gates import FINGERPRINT
from graph_passes.shrink import find_groups, shrink_parts
from graph_passes.weights import WeightRecord
from tests.graph_passes.graphs import SIZES, Feeds, draw, error, gated, graph, plan, run, site

PAIRS = (("past_k", "present_k"), ("past_v", "present_v"))
WEIGHTS = "float[8, 12] wq, float[8, 12] wk, float[8, 12] wv, float[12, 8] wo, int64[4] heads = {0, 0, 4, 3}"
MERGED = "int64[3] merged = {0, 0, 12}"


def decoder(
    present: str = "k, v", tail: str = "", *, turned: str = "", scores: str = "", weights: str = WEIGHTS
) -> ir.Model:
    """Attention of 4 heads of width 3 over earlier and new positions; `k` and `v` are those of all positions.

    Args:
        present: what is returned as keys and values.
        tail: further nodes, after `k` and `v`.
        turned: nodes that make `k4`, the new keys, from `k3`.
        scores: nodes that make `s2`, the scores, from `s`.
        weights: the weights of all nodes.
    """
    new, score = "k4" if turned else "k3", "s2" if scores else "s"
    names = dict(zip(("present_k", "present_v"), present.split(", "), strict=True))
    returned = "".join(f"{output} = Identity({name}) " for output, name in names.items())
    model = graph(
        "q1 = MatMul(x, wq) q2 = Reshape(q1, heads) q = Transpose<perm = [0, 2, 1, 3]>(q2)"
        " k1 = MatMul(x, wk) k2 = Reshape(k1, heads) k3 = Transpose<perm = [0, 2, 1, 3]>(k2)"
        " v1 = MatMul(x, wv) v2 = Reshape(v1, heads) v3 = Transpose<perm = [0, 2, 1, 3]>(v2)"
        f" {turned} k = Concat<axis = 2>(past_k, {new}) v = Concat<axis = 2>(past_v, v3) {tail} {returned}"
        f" kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) {scores} p = Softmax<axis = -1>({score})"
        " c1 = MatMul(p, v)"
        " c = Mul(c1, gate) c2 = Transpose<perm = [0, 2, 1, 3]>(c) c3 = Reshape(c2, merged)"
        " y = MatMul(c3, wo)",
        weights,
        MERGED,
        "float[4, 1, 1] gate",
        inputs="float[B, S, 8] x, float[B, 4, P, 3] past_k, float[B, 4, P, 3] past_v",
        outputs="float[B, S, 8] y, float[B, 4, T, 3] present_k, float[B, 4, T, 3] present_v",
    )
    gate = model.graph.initializers["gate"]
    gate.name = "a.head_gate"
    gate.const_value = ir.tensor(np.ones((4, 1, 1), np.float32), name=gate.name)
    record_caches(model, PAIRS)
    return model


def cut(feeds: Feeds, shrunk: Shrunk) -> Feeds:
    """Inputs of a graph whose caches hold fewer heads."""
    cut = dict(feeds)
    for name, need in shrunk.caches.items():
        for axis, index in enumerate(need):
            cut[name] = cut[name] if index is None else np.take(cut[name], index, axis)
    return cut


def assert_cut(model: ir.Model, kept: Sequence[int]) -> Shrunk:
    """Check that a graph without heads computes what it computes with gates, from caches of the heads that are kept."""
    reference = gated(model, plan(kept))
    shrunk = shrink(model.clone(), plan(kept))
    assert not shrunk.refused
    outputs = {value.name: value for value in shrunk.model.graph.outputs}
    for value in shrunk.model.graph.inputs[1:]:
        assert value.shape is not None
        assert value.shape[1] == len(kept)
        pair = outputs[cache_names(shrunk.model)[value.name or ""]]
        assert pair.shape is not None
        assert pair.shape[1] == len(kept)
    for sizes in SIZES:
        feeds = draw(reference, sizes)
        y, *caches = run(reference, feeds)
        smaller = run(shrunk.model, cut(feeds, shrunk))
        assert error(smaller[:1], [y]) <= 1e-4
        assert error(smaller[1:], [np.take(cache, kept, 1) for cache in caches]) <= 1e-4
    return shrunk


@pytest.mark.parametrize("kept", [(0, 1, 3), (2,), (1, 2), (0, 1, 2, 3)])
def test_caches_lose_the_heads_of_their_attention(kept: tuple[int, ...]) -> None:
    assert_cut(decoder(), kept)


def test_a_cache_may_be_computed_from_what_attention_reads() -> None:
    window = "kw = Slice(k, start, end, axis) vw = Slice(v, start, end, axis)"
    constants = "".join(
        f"{name} = Constant<value_ints = [{value}]>() " for name, value in (("start", -2), ("end", 9999), ("axis", 2))
    )
    assert_cut(decoder("kw, vw", tail=constants + window), (0, 3))


def test_a_cache_of_keys_whose_parts_are_turned_loses_heads() -> None:
    model = decoder(
        turned="k5 = Slice(k3, zero, end, zero) k6 = Slice(k5, zero, one, three) k4 = Add(k3, k6)",
        weights=f"{WEIGHTS}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] three = {{3}},"
        " int64[1] end = {9223372036854775807}",
    )
    assert_cut(model, (1, 2))


def test_a_cache_that_a_mask_is_computed_from_stays_whole() -> None:
    model = decoder(
        scores="m1 = Transpose<perm = [0, 2, 1, 3]>(v) m2 = Reshape(m1, merged) m3 = MatMul(m2, wm)"
        " m4 = Unsqueeze(m3, one) m5 = Transpose<perm = [0, 1, 3, 2]>(m4) s2 = Add(s, m5)",
        weights=f"{WEIGHTS}, float[12, 1] wm, int64[1] one = {{1}}",
    )
    kept = (0, 3)
    reference, shrunk = gated(model, plan(kept)), shrink(model.clone(), plan(kept))
    assert not shrunk.refused
    assert shrunk.caches.keys() == {"past_k"}
    for sizes in SIZES:
        feeds = draw(reference, sizes)
        y, keys, values = run(reference, feeds)
        assert error(run(shrunk.model, cut(feeds, shrunk)), [y, np.take(keys, kept, 1), values]) <= 1e-4


@pytest.mark.parametrize("kept", [(0, 1, 3), (2,)])
def test_caches_are_recognized_where_none_are_recorded(kept: tuple[int, ...]) -> None:
    model = decoder()
    model.metadata_props.clear()
    assert cache_names(model) == dict(PAIRS)
    assert_cut(model, kept)


def test_a_graph_that_records_no_caches_returns_every_head() -> None:
    model = decoder()
    record_caches(model, [])
    shrunk = shrink(model, plan((0, 1)))
    assert {refusal.code for refusal in shrunk.refused} <= {RefusalCode.EVERY_HEAD_NEEDED, RefusalCode.GRAPH_INPUT}
    assert shrunk.refused
    assert not shrunk.caches


def test_an_output_with_further_heads_or_features_is_no_cache() -> None:
    for axis, size in ((1, "7, P, 3"), (3, "4, P, 6")):
        model = graph(
            f"y = Concat <axis = {axis}> (x, z)",
            inputs=f"float[B, 4, P, 3] x, float[B, {3 if axis == 1 else 4}, P, 3] z",
            outputs=f"float[B, {size}] y",
        )
        assert not cache_names(model)


ATTENTIONS = {
    "GroupQueryAttention": (
        "com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (q, k, v, past_k, past_v, last, total)",
        "int32[B] last, int32[1] total",
    ),
    "MultiHeadAttention": (
        "com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, , , , past_k, past_v)",
        "",
    ),
    "Attention": ("Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v, , past_k, past_v)", ""),
}
"""Operator with a cache -> its call, and the further inputs of the graph."""


@pytest.mark.parametrize("name", ATTENTIONS)
def test_caches_of_fused_attentions_are_recognized_and_cut(name: str) -> None:
    call, extra = ATTENTIONS[name]
    heads = 2 if name == "MultiHeadAttention" else 4
    inputs = "float[B, S, 8] x, float[B, 2, P, 8] past_k, float[B, 2, P, 8] past_v, float[B, T] mask"
    model = graph(
        f"q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) c, present_k, present_v = {call} o = MatMul(c, wo)"
        " y = Add(x, o)",
        f"float[8, {heads * 8}] wq, float[8, 16] wk, float[8, 16] wv, float[{heads * 8}, 8] wo",
        inputs=", ".join(filter(None, [inputs, extra])),
        outputs="float[B, S, 8] y, float[B, 2, T, 8] present_k, float[B, 2, T, 8] present_v",
        opset=23 if name == "Attention" else 18,
    )
    assert cache_names(model) == dict(PAIRS)
    (group,) = find_groups(model).groups
    pruned = Plan(groups=(group.plan(range(heads // 2, heads)),))  # those of the second key/value head
    gate_groups(model, pruned)
    set_gates(model.graph, pruned)
    shrunk = shrink(model.clone(), pruned)
    assert not shrunk.refused
    assert {value.name: value.shape[1] for value in shrunk.model.graph.inputs[1:3] if value.shape} == {
        "past_k": 1,
        "past_v": 1,
    }
    if name == "Attention":
        return  # the installed ONNX Runtime may not have the operator with a cache
    sizes = {"B": 2, "S": 1, "P": 3, "T": 4}
    feeds = draw(model, sizes) | ({"last": np.full(2, 3, np.int32), "total": np.array([4], np.int32)} if extra else {})
    y, *caches = run(model, feeds)
    smaller = run(shrunk.model, cut(feeds, shrunk))
    assert error(smaller[:1], [y]) <= 1e-4
    assert error(smaller[1:], [cache[:, 1:] for cache in caches]) <= 1e-4


def test_groups_are_found_in_a_graph_with_caches() -> None:
    (group,) = find_groups(decoder()).groups
    assert (group.name, group.units) == ("a", 4)


def test_only_inputs_of_the_graph_can_be_caches() -> None:
    with pytest.raises(ValueError, match="past_q"):
        record_caches(decoder(), [("past_q", "present_q")])


def encoder(tail: str = "") -> ir.Model:
    """Keys and values of 4 heads of width 3, which a decoder reads."""
    return graph(
        "k1 = MatMul(x, wk) k2 = Reshape(k1, heads) k3 = Transpose<perm = [0, 2, 1, 3]>(k2)"
        " v1 = MatMul(x, wv) v2 = Reshape(v1, heads) v3 = Transpose<perm = [0, 2, 1, 3]>(v2)"
        f" {tail or 'present_k = Identity(k3)'} present_v = Identity(v3)",
        "float[8, 12] wk, float[8, 12] wv, int64[4] heads = {0, 0, 4, 3}",
        outputs="float[B, 4, S, 3] present_k, float[B, 4, S, 3] present_v",
    )


def reader() -> ir.Model:
    """Attention of 4 heads of width 3 over keys and values of another graph."""
    model = decoder()
    for name in ("k", "v"):  # reads the cache as it is, and returns none
        concat = next(node for node in model.graph if node.outputs[0].name == name)
        past = concat.inputs[0]
        assert past is not None
        ir.convenience.replace_all_uses_with(concat.outputs[0], past)
    del model.graph.outputs[1:]
    record_caches(model, PAIRS)
    return model


@pytest.mark.parametrize("kept", [(0, 1, 3), (2,), (0, 1, 2, 3)])
def test_an_encoder_returns_the_heads_that_its_decoder_reads(kept: tuple[int, ...]) -> None:
    whole = {"encoder": encoder(), "decoder": reader()}
    parts = shrink_parts({name: model.clone() for name, model in whole.items()}, plan(kept))
    source, feeds = draw(whole["encoder"], SIZES[0]), draw(whole["decoder"], SIZES[0])
    reference = gated(whole["decoder"], plan(kept))
    outputs = []
    for first, second in ((whole["encoder"], reference), (parts["encoder"].model, parts["decoder"].model)):
        keys, values = run(first, source)
        outputs.append(run(second, {"x": feeds["x"], "past_k": keys, "past_v": values}))
    assert keys.shape[1] == values.shape[1] == len(kept)
    assert error(outputs[1], outputs[0]) <= 1e-4


def test_an_encoder_that_nothing_reads_returns_nothing() -> None:
    """Whatever weights the run of the plan has changed."""
    changed = plan(()).model_copy(update={"weights": {"w": WeightRecord("3:" + "0" * 32, "3:" + "1" * 32)}})
    models = {"encoder": encoder(), "decoder": reader()}
    for model in models.values():
        model.metadata_props[FINGERPRINT] = "sha256:1"
    parts = shrink_parts(models, changed.model_copy(update={"model": "sha256:1"}))
    assert not parts["encoder"].model.graph.outputs
    assert [value.name for value in parts["decoder"].model.graph.inputs] == ["x"]


def test_an_encoder_that_mixes_its_heads_is_refused() -> None:
    model = encoder("axis = Constant<value_int = 1>() present_k = CumSum(k3, axis)")
    with pytest.raises(PlanError):
        shrink_parts({"encoder": model, "decoder": reader()}, plan((0, 3)))


def test_a_group_of_no_graph_is_refused() -> None:
    unknown = plan(site((0, 1)), site((0,), name="b"))
    with pytest.raises(PlanError):
        shrink_parts({"encoder": encoder(), "decoder": reader()}, unknown)


def fused() -> ir.Model:
    """`GroupQueryAttention` of 4 query heads and 2 key/value heads of width 8, with caches."""
    model = graph(
        "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
        " c, present_k, present_v = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>"
        "(q, k, v, past_k, past_v, lengths, total) y = MatMul(c, wo)",
        "float[8, 32] wq, float[8, 16] wk, float[8, 16] wv, float[32, 8] wo",
        "float[B, S, 32] c",
        inputs="float[B, S, 8] x, float[B, 2, P, 8] past_k, float[B, 2, P, 8] past_v, int32[B] lengths, int32 total",
        outputs="float[B, S, 8] y, float[B, 2, T, 8] present_k, float[B, 2, T, 8] present_v",
    )
    for value in model.graph.outputs[1:]:
        value.shape = ir.Shape(["B", 2, "P + S", 8])
    record_caches(model, PAIRS)
    return model


@pytest.mark.parametrize(("kept", "groups"), [((0, 1), 1), ((1, 3), 2), ((0, 1, 2, 3), 2)])
def test_a_fused_attention_loses_heads_of_its_caches(kept: tuple[int, ...], groups: int) -> None:
    model = fused()
    (group,) = find_groups(model.clone()).groups
    every = plan(site(kept, name=group.name, heads=4, kv_heads=2, head_dim=8))
    reference, shrunk = gated(model, every), shrink(model.clone(), every)
    assert not shrunk.refused
    feeds = {
        **draw(model, {"B": 2, "S": 1, "P": 3}),
        "lengths": np.full(2, 3, np.int32),
        "total": np.array(4, np.int32),
    }
    y, *_ = run(reference, feeds)
    smaller, keys, _ = run(shrunk.model, cut(feeds, shrunk))
    assert error([smaller], [y]) <= 1e-4
    assert keys.shape[1] == groups


def test_a_fused_attention_cannot_share_the_heads_of_a_cache_unevenly() -> None:
    model = fused()
    (group,) = find_groups(model.clone()).groups
    shrunk = shrink(model, plan(site((0, 1, 2), name=group.name, heads=4, kv_heads=2, head_dim=8)))
    assert [refusal.code for refusal in shrunk.refused] == [RefusalCode.UNSUPPORTED_FORM]


def test_the_cache_of_an_attention_without_heads_is_gone() -> None:
    model = decoder()
    shrunk = shrink(model.clone(), plan(()))
    assert [value.name for value in shrunk.model.graph.inputs] == ["x"]
    assert [value.name for value in shrunk.model.graph.outputs] == ["y"]
    assert not cache_names(shrunk.model)
    feeds = draw(model, SIZES[0])
    (y,) = run(shrunk.model, {"x": feeds["x"]})
    assert not y.any()


def test_a_length_is_read_off_a_cache_that_stays() -> None:
    model = graph(
        "length = Shape<start = 2, end = 3>(past_k) other = Shape<start = 2, end = 3>(past_v)"
        " present_k = Concat<axis = 2>(past_k, new) present_v = Concat<axis = 2>(past_v, new)"
        " sum = ReduceSum<keepdims = 0>(present_v) y = Expand(sum, length)",
        inputs="float[B, 4, 1, 3] new, float[B, 4, P, 3] past_k, float[B, 4, P, 3] past_v",
        outputs="float[P] y, float[B, 4, T, 3] present_k, float[B, 4, T, 3] present_v",
    )
    record_caches(model, PAIRS)
    reference = model.clone()
    assert DropIdleCaches()(model).report == ("past_k",)
    assert cache_names(model) == {"past_v": "present_v"}
    feeds = draw(reference, SIZES[0])
    y, *_ = run(reference, feeds)
    assert error(run(model, {name: feeds[name] for name in ("new", "past_v")})[:1], [y]) == 0


def test_one_of_several_caches_whose_lengths_are_read_stays() -> None:
    model = graph(
        "one = Constant<value_float = 1.0>() length = Shape<start = 2, end = 3>(past_k) y = Expand(one, length)"
        " other = Shape<start = 2, end = 3>(past_v) z = Expand(one, other)"
        " present_k = Concat<axis = 2>(past_k, new) present_v = Concat<axis = 2>(past_v, new)",
        inputs="float[B, 4, 1, 3] new, float[B, 4, P, 3] past_k, float[B, 4, P, 3] past_v",
        outputs="float[P] y, float[P] z, float[B, 4, T, 3] present_k, float[B, 4, T, 3] present_v",
    )
    record_caches(model, PAIRS)
    reference, feeds = model.clone(), draw(model, SIZES[0])
    assert len(DropIdleCaches()(model).report) == 1
    outputs = run(model, {name: feeds[name] for name in (value.name or "" for value in model.graph.inputs)})
    assert error(outputs[:2], run(reference, feeds)[:2]) == 0


def test_a_cache_whose_length_is_read_stays_without_another() -> None:
    model = graph(
        "length = Shape<start = 2, end = 3>(past_k) one = Constant<value_float = 1.0>() y = Expand(one, length)"
        " present_k = Concat<axis = 2>(past_k, new)",
        inputs="float[B, 4, 1, 3] new, float[B, 4, P, 3] past_k",
        outputs="float[P] y, float[B, 4, T, 3] present_k",
    )
    record_caches(model, PAIRS[:1])
    assert DropIdleCaches()(model).report == ()
