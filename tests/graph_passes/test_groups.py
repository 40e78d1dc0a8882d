"""Groups of a graph: each that is found can be removed, by its name, and what is not found has a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import transformers as hf

from graph_passes import (
    GraphError,
    GraphErrorCode,
    GraphGroup,
    GraphGroups,
    NeuronPlan,
    Plan,
    RefusalCode,
    find_groups,
    gate_groups,
    shrink,
)
from graph_passes.attention.gate_initializers import gate_name
from tests.graph_passes.exporters import Attention, export, fused_by_onnxruntime, fused_by_onnxscript, trace
from tests.graph_passes.graphs import Feeds, assert_same, content, error, graph, operators, run, shape
from tests.graph_passes.layers import LAYERS
from tests.graph_passes.test_shrink_exports import Source, feeds, nameless
from tests.projection_zoo import FAMILIES as PROJECTION_FAMILIES
from tests.units.masks import one_layer
from tests.zoo import VOCABULARY, Case, text

TOLERANCE = 1e-4


def albert(_: str) -> Case:
    """Three calls of one layer."""
    sizes: dict[str, Any] = {"hidden_size": 32, "embedding_size": 20, "num_attention_heads": 4, "intermediate_size": 44}
    config = hf.AlbertConfig(vocab_size=VOCABULARY, max_position_embeddings=70, num_hidden_layers=3, **sizes)
    return hf.AlbertForSequenceClassification(config).eval(), text()


def of_projections(family: str) -> Case:
    member = PROJECTION_FAMILIES[family]
    return member.build().eval(), member.inputs(3, 7)


def keeping_half(group: GraphGroup) -> list[int]:
    """The last half of the units."""
    return list(range((group.units + 1) // 2, group.units))


def assert_found(groups: GraphGroups) -> None:
    """Names are unique, and no product belongs to two groups."""
    names = [group.name for group in groups.groups]
    assert len(set(names)) == len(names)
    linears = [group.linear for group in groups.groups]
    assert len(set(linears)) == len(linears)
    products = [node for group in groups.groups for node in group.products]
    assert len(set(products)) == len(products)


def assert_removable(model: ir.Model, cases: list[Feeds] | None = None) -> GraphGroups:
    """Every group that is found can be removed, alone and with all of the others, and the numbers stay the same.

    Args:
        model: the graph, which is not changed.
        cases: inputs of the graph; None: random ones of two sizes.
    """
    result = find_groups(model.clone())
    assert_found(result)
    plans = [
        Plan(
            groups=tuple(
                group.plan(keeping_half(group) if group in pruned else range(group.units)) for group in result.groups
            )
        )
        for pruned in ([group] for group in result.groups)
    ]
    plans.append(Plan(groups=tuple(group.plan(keeping_half(group)) for group in result.groups)))
    for plan in plans:
        gated = gate_groups(model.clone(), plan)
        assert {gate_name(group) for group in plan.groups} <= set(gated.graph.initializers)
        shrunk = shrink(model.clone(), plan)
        assert shrunk.refused == ()
        assert {removed.group for removed in shrunk.removed} == {group.name for group in plan.groups if group.dropped}
        if cases is None:
            assert_same(shrunk.model, gated)
        for case in cases or ():
            assert error(run(shrunk.model, case), run(gated, case)) <= TOLERANCE
    return result


def assert_all_found(model: ir.Model, source: Source, *, has_names: bool = True) -> None:
    """The groups are those of the model, named as the exporter's wrapper names its modules, and can be removed."""
    result = assert_removable(model, [feeds(case, model) for case in source.cases()])
    assert result.obstacles == ()
    assert sorted((group.type, group.units, group.width) for group in result.groups) == sorted(
        (group.type, group.units, group.width) for group in source.groups
    )
    if has_names:
        names = {f"model.{group.name}" for group in source.groups}
        # Without an attention module that transformers registers, a model names heads by the linear after them.
        assert {group.name if group.name in names else group.linear for group in result.groups} == names
        assert {group.linear for group in result.groups} == {f"model.{group.linear}" for group in source.groups}


Exporter = Callable[..., ir.Model]
FORMS: Mapping[str, tuple[str, Callable[[str], Case], Exporter, int, Attention]] = {
    "grouped heads and gated neurons": ("llama", one_layer, trace, 17, "sdpa"),
}
IN_ZOO: Mapping[str, tuple[str, Callable[[str], Case], Exporter, int, Attention]] = {
    "fused projections": ("gpt2", one_layer, trace, 14, "eager"),
    "calls of one layer": ("albert", albert, trace, 17, "eager"),
    "encoder and decoder": ("t5", one_layer, trace, 17, "eager"),
    "norms of heads": ("qwen3", one_layer, trace, 17, "eager"),
    "windows": ("modernbert", one_layer, export, 18, "sdpa"),
    "classifier of two products": ("roberta", one_layer, export, 18, "sdpa"),
    "scores of positions": ("deberta-v2", of_projections, trace, 17, "eager"),
    "calls of one layer, by the newer exporter": ("albert", albert, export, 18, "sdpa"),
}


@pytest.mark.parametrize(
    ("family", "make", "exporter", "opset", "attention"),
    [
        *(pytest.param(*form, id=name) for name, form in FORMS.items()),
        *(pytest.param(*form, id=name, marks=pytest.mark.zoo) for name, form in IN_ZOO.items()),
    ],
)
def test_groups_of_exported_models(
    family: str, make: Callable[[str], Case], exporter: Exporter, opset: int, attention: Attention, tmp_path: Path
) -> None:
    source = Source(family, make)
    assert_all_found(source.graph(exporter, tmp_path / "graph.onnx", opset, attention), source)


@pytest.mark.zoo
def test_groups_of_a_fused_graph_and_of_one_without_names(tmp_path: Path) -> None:
    source = Source("bert", one_layer)
    traced = source.graph(trace, tmp_path / "traced.onnx", 17, "eager")
    assert_all_found(traced, source)
    assert_all_found(nameless(traced), source, has_names=False)
    fused = fused_by_onnxruntime(tmp_path / "traced.onnx", heads=4, width=32)
    assert "Attention" in operators(fused)
    assert_all_found(fused, source, has_names=False)


@pytest.mark.zoo
def test_groups_of_a_graph_that_onnxscript_has_fused(tmp_path: Path) -> None:
    source = Source("bert", one_layer)
    assert_all_found(fused_by_onnxscript(source.graph(export, tmp_path / "graph.onnx", 18, "sdpa")), source)


LAYER = """
    q0 = MatMul (x, Wq) q1 = Reshape (q0, split) q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul (x, Wk) k1 = Reshape (k0, split) kt = Transpose <perm = [0, 2, 3, 1]> (k1)
    v0 = MatMul (x, Wv) v1 = Reshape (v0, split) v = Transpose <perm = [0, 2, 1, 3]> (v1)
    scores = MatMul (q, kt) p = Softmax <axis = -1> (scores) heads = MatMul (p, v)
    back = Transpose <perm = [0, 2, 1, 3]> (heads) merged = Reshape (back, merge)
    o = MatMul (merged, Wo) s = Add (o, x) n = LayerNormalization (s, scale)
    u = MatMul (n, Wu) a = Relu (u)
"""


def layer(
    end: str,
    *weights: str,
    heads: int = 4,
    width: int = 3,
    hidden: int = 8,
    neurons: int = 20,
    probabilities: str = "",
) -> ir.Model:
    """An attention and a feed-forward up to its neurons `a`, and what follows them.

    Args:
        end: the nodes from `a` to `y`.
        weights: declarations of further initializers.
        heads: number of heads.
        width: width of a head.
        hidden: width of the residual stream.
        neurons: number of neurons.
        probabilities: nodes that compute `r`, by which values are multiplied, from the probabilities `p`.
    """
    body = LAYER.replace("MatMul (p, v)", "MatMul (r, v)" if probabilities else "MatMul (p, v)")
    body = body.replace("heads =", f"{probabilities} heads =")
    inner = heads * width
    projections = (f"float[{hidden}, {inner}] W{name}" for name in "qkv")
    declared = (
        f"float[{inner}, {hidden}] Wo, float[{hidden}, {neurons}] Wu, float[{neurons}, {hidden}] Wd",
        f"float[{hidden}] scale, int64[4] split = {{0, 0, {heads}, {width}}}, int64[3] merge = {{0, 0, {inner}}}",
    )
    free = f"float[B, S, {hidden}]"
    return graph(body + end, *projections, *declared, *weights, inputs=f"{free} x", outputs=f"{free} y")


END = "d = MatMul (a, Wd) y = Add (d, n)"


@pytest.mark.parametrize("sizes", [{}, {"hidden": 12, "neurons": 12}, {"heads": 3, "width": 4, "hidden": 4}])
def test_sizes_may_be_equal(sizes: Mapping[str, Any]) -> None:
    result = assert_removable(layer(END, **sizes))
    assert [(group.type, group.linear, group.weight) for group in result.groups] == [
        ("heads", "product_3", "Wo"),
        ("neurons", "product_5", "Wd"),
    ]
    assert not result.obstacles


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"positions in blocks"}))  # whose heads are refused
def test_the_last_head_of_an_attention_is_a_head(name: str) -> None:
    """Axes of a single head have size one, and may be those of rows too; without it the attention is gone."""
    model = LAYERS[name].graph()
    (group,) = find_groups(model.clone()).groups
    shrunk = shrink(model.clone(), Plan(groups=(group.plan((0,)),))).model
    listed = find_groups(shrunk.clone())
    (last,) = listed.groups
    assert (last.type, last.units, last.width, listed.obstacles) == ("heads", 1, group.width, ())
    nothing = Plan(groups=(last.plan(()),))
    empty = shrink(shrunk.clone(), nothing)
    assert empty.refused == ()
    assert not {"MatMul", "Softmax"} & set(operators(empty.model))
    assert_same(empty.model, gate_groups(shrunk.clone(), nothing))


def test_a_group_knows_its_sizes() -> None:
    heads, neurons = find_groups(layer(END)).groups
    assert (heads.units, heads.width, heads.kind, heads.kv_heads, heads.head_dim) == (4, 3, "bidirectional", 4, 3)
    assert (neurons.units, neurons.width, neurons.kind, neurons.position, neurons.axis) == (20, 1, None, 0, -1)
    read = [node.inputs[0] for group in (heads, neurons) for node in group.products]
    assert [value.name for value in read if value is not None] == ["merged", "a"]
    assert neurons.plan([3], [0.5]) == NeuronPlan("product_5", 20, (3,), (0.5,))


def test_a_name_is_the_path_of_the_module_else_of_the_weight_else_of_the_node() -> None:
    model = layer(END)
    weights = model.graph.initializers
    (down,) = (node for node, _ in weights["Wd"].uses())

    def name() -> str:
        return find_groups(model).groups[1].name

    down.name = "MatMul_7"
    assert name() == "MatMul_7"
    weights["Wd"].name = "layers.0.fc2.weight"
    assert name() == "layers.0.fc2"
    down.name = "/encoder/fc2/MatMul"
    assert name() == "encoder.fc2"


def test_gates_of_a_plan_are_ones_where_it_keeps_every_unit() -> None:
    model = layer(END)
    heads, neurons = find_groups(model).groups
    plan = Plan(groups=(heads.plan([0, 2], [1.0, 0.5]), neurons.plan(range(neurons.units))))
    gated = gate_groups(model, plan)
    assert content(gated, "product_3.head_gate").reshape(-1).tolist() == [1, 0, 0.5, 0]
    assert content(gated, "product_5.neuron_gate").tolist() == [1] * 20
    result = find_groups(gated)
    assert [group.name for group in result.groups] == ["product_3", "product_5"]
    assert shape(shrink(gated, plan).model, "Wo") == (6, 8)


def test_heads_are_also_paired_by_the_name_of_their_product() -> None:
    model = layer(END)
    for node in model.graph:
        is_softmax = node.op_type == "Softmax"
        node.name = "/attention/Softmax" if is_softmax else f"{node.op_type}_{node.outputs[0].name}"
    heads, neurons = find_groups(model).groups
    assert (heads.name, heads.linear, neurons.linear) == ("attention", "MatMul_o", "MatMul_d")
    named = dataclasses.replace(heads, name=heads.linear)
    gated = gate_groups(model, Plan(groups=(named.plan([0]), neurons.plan([]))))
    assert {"MatMul_o.head_gate", "MatMul_d.neuron_gate"} <= set(gated.graph.initializers)


def test_a_graph_with_gates_of_heads_loses_neurons_too() -> None:
    model = layer(END)
    heads, neurons = find_groups(model).groups
    gated = gate_groups(model.clone(), Plan(groups=(heads.plan(range(4)),)))
    plan = Plan(groups=(heads.plan([1, 2]), neurons.plan(range(10))))
    shrunk = shrink(gated, plan)
    assert shape(shrunk.model, "Wd") == (10, 8)
    assert_same(shrunk.model, gate_groups(model, plan))


def test_neurons_of_quantized_weights_are_found_and_heads_of_quantized_probabilities_refused() -> None:
    model = layer(
        "w = DequantizeLinear (Wi, step) d = MatMul (a, w) y = Add (d, n)",
        "int8[20, 8] Wi, float step = {0.5}, float unit = {0.004}, uint8 zero = {0}",
        probabilities="i = QuantizeLinear (p, unit, zero) r = DequantizeLinear (i, unit, zero)",
    )
    result = assert_removable(model)
    assert [(group.type, group.weight) for group in result.groups] == [("neurons", "Wi")]
    assert [(obstacle.op, obstacle.code) for obstacle in result.obstacles] == [("Softmax", RefusalCode.QUANTIZED)]


OBSTACLES: Mapping[str, tuple[str, str, str, RefusalCode]] = {
    "a norm of the neurons": (
        "m = LayerNormalization (a, wide) d = MatMul (m, Wd) y = Add (d, n)",
        "float[20] wide",
        "LayerNormalization",
        RefusalCode.MIXES_HEADS,
    ),
    "an operator without a rule": (
        "e, i = TopK (a, twenty) d = MatMul (e, Wd) y = Add (d, n)",
        "int64[1] twenty = {20}",
        "TopK",
        RefusalCode.NO_RULE,
    ),
    "a branch that the number of rows decides": (
        """
        rows = Shape <start = 0, end = 1> (x) alone = Equal (rows, one)
        f = If (alone) <then_branch = p () => (float[B, S, 20] g) { g = Neg (a) },
                        else_branch = q () => (float[B, S, 20] h) { h = Identity (a) }>
        d = MatMul (f, Wd) y = Add (d, n)
        """,
        "int64[1] one = {1}",
        "If",
        RefusalCode.UNKNOWN_SHAPE,
    ),
    "products in a branch": (
        """
        always = Relu (a) rows = Shape <start = 0, end = 1> (x) alone = Equal (rows, one)
        y = If (alone) <then_branch = p () => (float[B, S, 8] g) { d = MatMul (always, Wd) g = Add (d, n) },
                        else_branch = q () => (float[B, S, 8] h) { h = Identity (n) }>
        """,
        "int64[1] one = {1}",
        "If",
        RefusalCode.NO_RULE,
    ),
    "integers": (
        "i = Cast <to = 3> (a) j = MatMulInteger (i, Wi) d = Cast <to = 1> (j) y = Add (d, n)",
        "int8[20, 8] Wi",
        "MatMulInteger",
        RefusalCode.QUANTIZED,
    ),
}


@pytest.mark.parametrize(("end", "weights", "op", "code"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_is_no_group_is_an_obstacle(end: str, weights: str, op: str, code: RefusalCode) -> None:
    result = find_groups(layer(end, weights))
    assert [group.type for group in result.groups] == ["heads"]
    assert [(obstacle.op, obstacle.code) for obstacle in result.obstacles] == [(op, code)]


def test_what_reads_the_past_is_an_obstacle_of_that_name() -> None:
    model = layer(END)
    keys = next(node.outputs[0] for node in model.graph if node.outputs[0].name == "v")
    keys.name, keys.dtype = "present.0.value", ir.DataType.FLOAT
    model.graph.outputs.append(keys)
    result = find_groups(model)
    assert [group.type for group in result.groups] == ["neurons"]
    assert [(obstacle.op, obstacle.code) for obstacle in result.obstacles] == [("graph output", RefusalCode.CACHE)]


def test_a_plan_of_a_graph_of_integers_is_refused_by_its_operator() -> None:
    end, weights, _, _ = OBSTACLES["integers"]
    heads, _ = find_groups(layer(END)).groups
    plan = Plan(groups=(heads.plan(range(4)), NeuronPlan("d", 20, (0,))))
    with pytest.raises(GraphError) as error:
        shrink(layer(end, weights), plan)
    assert error.value.code is GraphErrorCode.UNSUPPORTED_OPERATOR
    assert error.value.details["operator"] == "MatMulInteger"


@pytest.mark.parametrize(
    ("down", "weight"),
    [("Einsum <equation = 'bsf,fd->bsd'> (r, w)", "float[6, 8] w"), ("MatMul(r, w)", "float[1, 6, 8] w")],
    ids=["a sum of products", "a weight of three axes"],
)
def test_a_product_of_another_form_is_an_obstacle(down: str, weight: str) -> None:
    down = down.replace("'", '"')
    model = graph(f"h = MatMul(x, up)  r = Relu(h)  d = {down}  y = Add(d, x)", weight, "float[8, 6] up")
    result = find_groups(model)
    assert result.groups == ()
    assert [obstacle.code for obstacle in result.obstacles] == [RefusalCode.UNSUPPORTED_FORM]


def test_probabilities_that_a_weight_mixes_are_an_obstacle() -> None:
    body = """q = MatMul(x, up)  r = Reshape(q, split)  h = Transpose <perm = [0, 2, 1, 3]> (r)
        k = Transpose <perm = [0, 1, 3, 2]> (h)  s = MatMul(h, k)  a = Softmax <axis = -1> (s)
        b = Transpose <perm = [0, 2, 3, 1]> (a)  c = MatMul(b, mix)  p = Transpose <perm = [0, 3, 1, 2]> (c)
        o = MatMul(p, h)  t = Transpose <perm = [0, 2, 1, 3]> (o)  j = Reshape(t, join)
        d = MatMul(j, w)  y = Add(d, x)"""
    shapes = "int64[4] split = {0, 0, 4, 3}, int64[3] join = {0, 0, 12}"
    result = find_groups(graph(body, f"float[8, 12] up, float[4, 4] mix, float[12, 8] w, {shapes}"))
    assert result.groups == ()
    assert [obstacle.code for obstacle in result.obstacles] == [RefusalCode.UNMATCHED_ATTENTION]


@pytest.mark.parametrize(
    ("joined", "size"),
    [("Concat <axis = 2> (j, x)", 20), ("Gather <axis = 2> (j, turned)", 12)],
    ids=["with the input", "in another order"],
)
def test_heads_that_a_weight_reads_otherwise_are_an_obstacle(joined: str, size: int) -> None:
    body = f"""q = MatMul(x, up)  r = Reshape(q, split)  h = Transpose <perm = [0, 2, 1, 3]> (r)
        k = Transpose <perm = [0, 1, 3, 2]> (h)  s = MatMul(h, k)  a = Softmax <axis = -1> (s)  o = MatMul(a, h)
        t = Transpose <perm = [0, 2, 1, 3]> (o)  j = Reshape(t, join)  c = {joined}  d = MatMul(c, w)  y = Add(d, x)"""
    shapes = "int64[4] split = {0, 0, 4, 3}, int64[3] join = {0, 0, 12}"
    order = "int64[12] turned = {9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2}"
    result = find_groups(graph(body, f"float[8, 12] up, float[{size}, 8] w, {shapes}, {order}"))
    assert [group.type for group in result.groups] != ["heads"]
    assert RefusalCode.NO_RULE in [obstacle.code for obstacle in result.obstacles]
