"""Attention that writes into the memory of its caches computes what attention over growing caches does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graph_passes.flow.caches import IN_PLACE, cache_names, record_caches
from graph_passes.passes import (
    FuseCachedAttention,
    FuseRotaryEmbedding,
    MergeReshapes,
    PackAttention,
    RotateInAttention,
)
from tests.graph_passes.graphs import error, graph, operators, run

WIDTH = 16
NEW = (4, 1, 1, 3, 1)
"""Tokens of successive calls."""
ROOM = 16
"""Positions that the memory of the caches has room for."""
SPLIT = """
    {to}1 = MatMul(h, W{to})
    {to}2 = Reshape({to}1, split_{heads})
    {to} = Transpose <perm = [0, 2, 1, 3]> ({to}2)
"""
POSITIONS = """
    earlier0 = Shape <start = 2, end = 3> (k_past)  new0 = Shape <start = 1, end = 2> (input_ids)
    earlier = Squeeze(earlier0)  new = Squeeze(new0)  end = Add(earlier, new)
    keys = Range(zero, end, one)  later = Range(zero, new, one)  later0 = Add(later, earlier)
    queries = Unsqueeze(later0, last)
"""
PADDING = """
    m0 = Cast <to = 9> (attention_mask)  m1 = Unsqueeze(m0, rows)
    causal = LessOrEqual(keys, queries)  allowed = And(m1, causal)  bias = Where(allowed, nothing, lowest)
"""
WINDOW = """
    m0 = Cast <to = 9> (attention_mask)  m1 = Unsqueeze(m0, rows)
    causal = LessOrEqual(keys, queries)  distance = Sub(queries, keys)  near = Less(distance, three)
    both = And(causal, near)  allowed = And(m1, both)  bias = Where(allowed, nothing, lowest)
"""
SQUARE = PADDING.replace(
    "causal = LessOrEqual(keys, queries)",
    "pairs = Unsqueeze(keys, last)  square = LessOrEqual(keys, pairs)  causal = Gather(square, later0)",
)
"""The same as `PADDING`, by way of the square of all positions, which is too large where there are many."""
SLOPES = (
    PADDING.replace("bias =", "hidden =")
    + """
    steps = Sub(keys, queries)  steps0 = Cast <to = 1> (steps)  steep = Mul(steps0, slopes)  bias = Add(hidden, steep)
"""
)
EVERY = PADDING.replace("causal)", "every)").replace("causal = LessOrEqual(keys, queries)", "every = Less(keys, end)")
ROTATED = """
    {x}a = Slice({x}, at0, at1, axis)  {x}b = Slice({x}, at1, at2, axis)  {x}n = Neg({x}b)
    {x}turned = Concat <axis = -1> ({x}n, {x}a)  {x}cos = Mul({x}, cos)  {x}sin = Mul({x}turned, sin)
    {x}r = Add({x}cos, {x}sin)
"""
PART = """
    {x}p = Slice({x}, at0, at2, axis)  {x}rest = Slice({x}, at2, at3, axis)
    {rotated}  {x}r = Concat <axis = -1> ({x}pr, {x}rest)
"""
EQUALLY, UNEQUALLY = "p2 = Mul(p1, speeds)", "squares = Mul(p1, p1)  p2 = Mul(squares, speeds)"
TABLES = """
    p0 = Cast <to = 1> (position_ids)  p1 = Unsqueeze(p0, axis)  {turn}  p3 = Concat <axis = -1> (p2, p2)
    cos0 = Cos(p3)  sin0 = Sin(p3)  cos = Unsqueeze(cos0, last)  sin = Unsqueeze(sin0, last)
"""


def decoder(
    heads: int = 4,
    sources: Sequence[int] = (0, 0, 1, 1),
    bias: str = PADDING,
    *,
    turn: str = "",
    width: int = WIDTH,
    rotated: int | None = None,
) -> ir.Model:
    """A layer over a cache.

    Args:
        heads: number of query heads.
        sources: the key/value head that each of them reads.
        bias: nodes that compute what is added to the scores.
        turn: nodes that compute the angles `p2` of positions `p1`; empty: nothing is rotated.
        width: width of a head.
        rotated: the first part of it that is rotated; None: all of it.
    """
    kv_heads, suffix, part = max(sources) + 1, "r" if turn else "", rotated or width
    body = "h = Gather(table, input_ids)" + "".join(
        SPLIT.format(to=to, heads="q" if to == "q" else "k") for to in "qkv"
    )
    if turn:
        body += TABLES.format(turn=turn)
        for x in "qk":
            whole, first = ROTATED.format(x=x), PART.format(x=x, rotated=ROTATED.format(x=f"{x}p"))
            body += whole if part == width else first
    body += POSITIONS + bias
    body += f"""
        k_all = Concat <axis = 2> (k_past, k{suffix})  v_all = Concat <axis = 2> (v_past, v)
        k_each = Gather <axis = 1> (k_all, sources)  v_each = Gather <axis = 1> (v_all, sources)
        kt = Transpose <perm = [0, 1, 3, 2]> (k_each)  s = MatMul(q{suffix}, kt)  c = Mul(s, scale)  a = Add(c, bias)
        p = Softmax <axis = -1> (a)  o = MatMul(p, v_each)  ot = Transpose <perm = [0, 2, 1, 3]> (o)
        om = Reshape(ot, merge)  logits = MatMul(om, Wo)
    """
    numbers = ", ".join(map(str, sources))
    cache, present = (f"float[B, {kv_heads}, {length}, {width}]" for length in "PT")
    positions = ", int64[B, S] position_ids" if turn else ""
    model = graph(
        body,
        f"float[50, 8] table, float[8, {heads * width}] Wq, float[8, {kv_heads * width}] Wk",
        f"float[8, {kv_heads * width}] Wv, float[{heads * width}, 8] Wo, float scale = {{0.3}}",
        f"int64[4] split_q = {{0, 0, {heads}, {width}}}, int64[4] split_k = {{0, 0, {kv_heads}, {width}}}",
        f"int64[3] merge = {{0, 0, {heads * width}}}, int64[{heads}] sources = {{{numbers}}}",
        "int64[2] rows = {1, 2}, int64[1] last = {1}, int64 zero = {0}, int64 one = {1}, int64 three = {3}",
        f"int64[1] axis = {{-1}}, int64[1] at0 = {{0}}, int64[1] at1 = {{{part // 2}}}, int64[1] at2 = {{{part}}}",
        f"int64[1] at3 = {{{width}}}, float[{part // 2}] speeds, float[1, {heads}, 1, 1] slopes",
        "float nothing = {0.0}, float lowest = {-3.4028234663852886e38}",
        inputs=f"int64[B, S] input_ids, int64[B, T] attention_mask{positions}, {cache} k_past, {cache} v_past",
        outputs=f"float[B, S, 8] logits, {present} k_all, {present} v_all",
    )
    record_caches(model, [("k_past", "k_all"), ("v_past", "v_all")])
    return model


def logits_in_place(model: ir.Model, calls: Sequence[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
    """Logits of successive calls that write into one memory."""
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    texts, memory, results = len(calls[0]["input_ids"]), dict[str, np.ndarray](), []
    for value in session.get_inputs():
        if value.name in cache_names(model):
            memory[value.name] = np.full((texts, value.shape[1], ROOM, value.shape[3]), np.nan, np.float32)
    for feeds in calls:
        binding = session.io_binding()
        for name in (value.name for value in session.get_inputs()):
            tensor = ort.OrtValue.ortvalue_from_numpy(memory[name] if name in memory else feeds[name])
            binding.bind_ortvalue_input(name, tensor)
            if name in memory:
                binding.bind_ortvalue_output(cache_names(model)[name], tensor)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        results.append(binding.get_outputs()[-1].numpy())
    return results


def compare(model: ir.Model, fused: ir.Model, texts: int = 3) -> None:
    """Check that calls compute the same where nothing is padding, with growing caches and in one memory."""
    calls = []
    rng = np.random.default_rng(0)
    mask = np.ones((texts, 0), np.int64)
    state = {
        name: np.zeros((texts, _heads(model, name), 0, _width(model, name)), np.float32) for name in cache_names(model)
    }
    grown = dict(state)
    for number, new in enumerate(NEW if texts == 1 else [1 if number else new for number, new in enumerate(NEW)]):
        mask = np.concatenate([mask, np.ones((texts, new), np.int64)], 1)
        if number == 0:
            mask[1:, :1] = mask[2:, :3] = 0
        feeds = {"input_ids": rng.integers(0, 50, (texts, new)), "attention_mask": mask}
        feeds["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)[:, -new:]
        calls.append(feeds)
    for feeds, logits in zip(calls, logits_in_place(fused, calls), strict=True):
        read = feeds["attention_mask"][:, -feeds["input_ids"].shape[1] :].astype(bool)
        expected, *caches = run(model, _fed(model, {**feeds, **state}))
        outputs, *grown_caches = run(fused, _fed(fused, {**feeds, **grown}))
        assert error([outputs[read]], [expected[read]]) < 1e-5
        assert error([logits[read]], [expected[read]]) < 1e-5
        state, grown = (dict(zip(state, tensors, strict=True)) for tensors in (caches, grown_caches))


def _fed(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {str(value.name): feeds[str(value.name)] for value in model.graph.inputs}


def _heads(model: ir.Model, name: str) -> int:
    return int(next(value for value in model.graph.inputs if value.name == name).shape[1])  # type: ignore[index, arg-type]


def _width(model: ir.Model, name: str) -> int:
    return int(next(value for value in model.graph.inputs if value.name == name).shape[3])  # type: ignore[index, arg-type]


def fused_in_place(model: ir.Model) -> ir.Model:
    copy = model.clone()
    FuseRotaryEmbedding()(copy)
    fused = FuseCachedAttention(in_place=True)(copy).model
    MergeReshapes()(fused)
    return fused


@pytest.mark.parametrize("texts", [3, 1])
@pytest.mark.parametrize("bias", [PADDING, WINDOW, SLOPES, SQUARE], ids=["padding", "window", "slopes", "square"])
@pytest.mark.parametrize(
    "sources",
    [(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 1), (1, 0, 1, 0), (0, 2, 2, 2), (1, 1, 1, 1)],
    ids=lambda each: "".join(map(str, each)),
)
def test_calls_compute_the_same(sources: tuple[int, ...], bias: str, texts: int) -> None:
    model = decoder(4, sources, bias)
    fused = fused_in_place(model)
    assert IN_PLACE in fused.metadata_props
    assert "GroupQueryAttention" in operators(fused)
    assert "Concat" not in [node.op_type for node in fused.graph if node.outputs[0].is_graph_output()]
    compare(model, fused, texts)


def test_a_mask_of_padding_is_computed_without_positions() -> None:
    assert "Range" not in operators(fused_in_place(decoder()))
    for bias in (WINDOW, SQUARE):
        assert "Range" in operators(fused_in_place(decoder(bias=bias)))


@pytest.mark.parametrize("width", [4, 12])
def test_heads_of_other_widths_get_growing_caches(width: int) -> None:
    fused = fused_in_place(decoder(width=width))
    assert IN_PLACE not in fused.metadata_props
    assert "MultiHeadAttention" in operators(fused)


def test_attention_in_both_directions_is_not_hidden_by_the_mask() -> None:
    """The operator hides later keys, so that whoever fuses has to compare outputs; growing caches keep them."""
    model = decoder(bias=EVERY)
    feeds: dict[str, np.ndarray] = {
        "input_ids": np.arange(4)[None],
        "attention_mask": np.ones((1, 4), np.int64),
        **dict.fromkeys(("k_past", "v_past"), np.zeros((1, 2, 0, WIDTH), np.float32)),
    }
    expected = run(model, feeds)
    assert error(run(FuseCachedAttention()(model.clone()).model, feeds), expected) < 1e-5
    assert error(run(fused_in_place(model), feeds), expected) > 1e-2


@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH], ids=["whole heads", "a part of heads"])
@pytest.mark.parametrize("texts", [3, 1])
def test_rotations_move_into_the_attention(texts: int, width: int) -> None:
    model = decoder(turn=EQUALLY, width=width, rotated=WIDTH)
    fused = fused_in_place(model)
    result = RotateInAttention()(fused)
    assert len(result.report) == 1
    assert "RotaryEmbedding" not in operators(fused)
    assert "position_ids" not in [value.name for value in fused.graph.inputs]
    compare(model, fused, texts)
    assert not RotateInAttention()(fused).modified


def test_rotations_of_selected_heads_stay() -> None:
    model = decoder(4, (0, 0, 0, 1), turn=EQUALLY)
    fused = fused_in_place(model)
    result = RotateInAttention()(fused)
    assert (result.modified, result.report) == (True, ())
    assert operators(fused).count("RotaryEmbedding") == 2
    compare(model, fused)


def test_rotations_by_unequal_angles_stay() -> None:
    model = decoder(turn=UNEQUALLY)
    fused = fused_in_place(model)
    assert not RotateInAttention()(fused).modified
    compare(model, fused)


def test_parts_of_one_tensor_are_read_as_it_is() -> None:
    inputs = "float[B, S, 64] x, float[B, 1, P, 16] k_past, float[B, 1, P, 16] v_past, int32[B] last, int32 total"
    outputs = "float[B, S, 32] y, float[B, 1, T, 16] k_all, float[B, 1, T, 16] v_all"
    attention = """y, k_all, v_all = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1>
        ({q}, k, v, k_past, v_past, last, total)"""
    split = "q, k, v = Split <axis = -1> (x, sizes)"
    sizes = "int64[3] sizes = {32, 16, 16}"
    model = graph(split + attention.format(q="q"), sizes, inputs=inputs, outputs=outputs)
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {"x": rng.standard_normal((2, 1, 64), np.float32)}
    feeds |= {name: rng.standard_normal((2, 1, 3, 16), np.float32) for name in ("k_past", "v_past")}
    feeds |= {"last": np.full(2, 3, np.int32), "total": np.array(4, np.int32)}
    expected = run(model, feeds)
    assert len(PackAttention()(model).report) == 1
    assert operators(model) == ["GroupQueryAttention"]
    assert error(run(model, feeds), expected) < 1e-6
    negated = graph(split + "r = Neg(q)" + attention.format(q="r"), sizes, inputs=inputs, outputs=outputs)
    assert not PackAttention()(negated).modified
